"""Warm-up, freeze, steady state: the life of a process's Triton kernels, and the object that leads it.

rt = activate(RuntimeSettings(guard="strict"))   # before the first kernel; idempotent; one in a process
with rt.warmup():                                # tuning and compiling allowed
    ...                                          # call every kernel that training will call
rt.freeze()                                      # agree, compile, plan, forbid
rt.counters()                                    # late_tunes, late_compiles, file_ops, syncs since the freeze
rt.report()                                      # JSON-serialisable
rt.deactivate()                                  # everything as it was
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fla_safe.runtime.agreement.rounds import Agreed, Agreement
from fla_safe.runtime.artifacts.rank_store import RankStore, open_rank_store
from fla_safe.runtime.audit import Audit, AuditScope
from fla_safe.runtime.guard import Guard, GuardMode
from fla_safe.runtime.kernels import Kernel, describe, without_specialisation
from fla_safe.runtime.launching.ahead import Ahead, threads_of_this_rank
from fla_safe.runtime.launching.compiling import Compiling
from fla_safe.runtime.launching.launch import Launching
from fla_safe.runtime.probes import PACKAGES, Probes
from fla_safe.runtime.seams import Seams
from fla_safe.runtime.stamp import Stamp
from fla_safe.runtime.tuning.autotune import Judge, Tuning
from fla_safe.runtime.tuning.decisions import DecisionTable, TuningKey
from fla_safe.runtime.tuning.settle import Check, Settled, settle

__all__ = ["Phase", "Runtime", "RuntimeSettings", "activate", "active"]

Phase = Literal["open", "warm-up", "frozen", "inactive"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """Choices of the runtime floor.

    Attributes:
        guard: what a key or binary that was not planned meets after the freeze (`Guard`).
        table: decisions to start from; None starts an empty table stamped with this process's versions.
        size_arguments: patterns of run-time arguments that only size the problem; no code is special for their values.
        packages: optional packages that are tried once (`Probes`).
        guarded: module prefixes of the kernels this runtime answers for; empty means every Triton kernel.
        audit: which file operations are counted after the freeze (`Audit`).
        watch_syncs: count synchronizing CUDA calls inside `Runtime.section`.
        judge: accepts or refuses winners of tuning (`repeats.RepeatCheck`, for one).
        agree: at the freeze, hold one table on all ranks of the default process group (`Agreement`).
        isolate: keep compiled kernels in a directory of this rank (`open_rank_store`), seeded from `bundle`.
        cache_root: where that directory lies; None chooses.
        bundle: decisions and kernels to start from.
        tables: decision tables to try in order when the bundle has none that fits.
        local_rank: rank on this host, if known better than from the environment.
        compile_threads: compilations at a time in tuning and at the freeze; None is this rank's share of the host.
    """

    guard: GuardMode = "warn"
    table: DecisionTable | None = None
    size_arguments: Sequence[str] = ("T", "BS", "stride_*_n")
    packages: Sequence[str] = PACKAGES
    guarded: Sequence[str] = ()
    audit: AuditScope = "sections"
    watch_syncs: bool = False
    judge: Judge | None = None
    agree: bool = True
    isolate: bool = False
    cache_root: Path | None = None
    bundle: Path | None = None
    tables: Sequence[Path] = ()
    local_rank: int | None = None
    compile_threads: int | None = None


_active: "Runtime | None" = None
_activation = threading.Lock()


def activate(settings: RuntimeSettings | None = None) -> "Runtime":
    """Take over Triton's tuning, compiling and launching in this process. A second call returns the same runtime.

    Raises:
        StampMismatchError: `settings.table` was made for other hardware or versions.
        ArtifactError: `settings.isolate` and there is no place for this rank's directory.
    """
    global _active
    with _activation:
        if _active is None:
            _active = Runtime(settings or RuntimeSettings())
        return _active


def active() -> "Runtime | None":
    """The runtime of this process, if it is activated."""
    return _active


class Runtime:
    """Made by `activate`. Attributes `table`, `audit`, `guard` and `probes` may be read at any time."""

    def __init__(self, settings: RuntimeSettings) -> None:
        self.settings = settings
        self.phase: Phase = "open"
        self.guard = Guard(settings.guard)
        self.audit = Audit(settings.audit, watch_syncs=settings.watch_syncs)
        self.probes = Probes(settings.packages)
        self.stamp = Stamp.current()
        if settings.table is not None:
            settings.table.stamp.require(
                self.stamp, "the decision table", "give one made here, or none and let it tune"
            )
        self._seams = Seams()
        self.store = self._open_store() if settings.isolate else None
        found = self.store.table if self.store is not None else None
        table = next((t for t in (settings.table, found) if t is not None), DecisionTable(self.stamp))
        self.tuning = Tuning(
            table,
            self.guard,
            self.describe,
            answers_for=self._answers_for,
            judge=settings.judge,
            told=self._tuned,
        )
        self.compiling = Compiling(self.guard, self._answers_for)
        ahead = Ahead(settings.compile_threads or threads_of_this_rank())
        self.tuning.ahead = ahead if ahead.threads > 1 else None
        self.launching = Launching(self.guard, self.describe, ahead)
        self.freeze_seconds = 0.0
        self._known: dict[int, tuple[Any, Kernel | None]] = {}
        self._progress: Callable[[str], None] = _say
        self._agreement: Agreement | None = None
        self.agreed: Agreed | None = None
        self.settled: Settled | None = None
        self._describing = threading.Lock()
        try:
            for part in (self.probes, self.tuning, self.compiling, self.launching):
                part.install(self._seams)
            self.probes.settle(self._seams)
        except BaseException:
            self._seams.restore()
            raise

    @property
    def table(self) -> DecisionTable:
        """Decisions of this process; after the freeze those of all ranks."""
        return self.tuning.table

    @property
    def section(self) -> contextlib.AbstractContextManager[None]:
        """`with rt.section:` around a call that must not touch files nor wait for the device; costs a microsecond."""
        return self.audit.section

    @contextlib.contextmanager
    def warmup(self, progress: Callable[[str], None] | None = None) -> Iterator["Runtime"]:
        """Allow tuning and compiling. After an earlier freeze the block ends with a new one.

        Args:
            progress: told of each tuned kernel in a short text; default is the log.
        """
        before, shown = self.phase, self._progress
        self._progress = progress or shown
        self._thaw("warm-up")
        # Opened here and closed by the freeze, so that the other ranks can tell slow from dead meanwhile.
        agreement = self._open_agreement()
        try:
            yield self
        except BaseException as error:
            self._agreement = None
            agreement.__exit__(type(error), error, error.__traceback__)
            raise
        finally:
            self._progress = shown
            self.phase = "open"
        if before == "frozen":
            self.freeze()

    def freeze(
        self,
        guard: GuardMode | None = None,
        *,
        devices: Collection[int] = (),
        progress: Callable[[str], None] | None = None,
        checks: Mapping[str, Check] | None = None,
        again: Callable[[], None] = lambda: None,
    ) -> None:
        """Agree on one table, compile every class of calls that was seen, make direct launches, forbid the rest.

        Args:
            guard: replaces the mode given at activation.
            devices: GPUs of this process that will run the kernels; default are those of the calls seen.
            progress: told of each check, and of each kernel that is planned.
            checks: by name; what a config fails on one rank is banned on all (`settle`).
            again: runs what the warm-up ran, for keys whose decision was banned.

        Raises:
            WrongResultsError: a check fails whatever the configs are.
            AgreementError: a rank failed; the same error on all ranks, in bounded time.
        """
        began = time.perf_counter()
        self._thaw("warm-up")
        self.probes.settle(self._seams)
        agreement, shown = self._open_agreement(), self._progress
        self._progress = progress or shown
        with agreement:
            try:
                self.settled = settle(self.tuning, agreement, self.stamp, checks or {}, again=again, tell=self.say)
                self.launching.freeze(devices, self.say)
                # A rank that cannot compile must not leave the others waiting in their first collective.
                agreement.share(None)
            finally:
                self._agreement, self._progress = None, shown
        self.agreed = self.settled.agreed
        if guard is not None:
            self.guard.mode = guard
        self.guard.reset()
        self.guard.frozen = True
        self.compiling.served_general = self.launching.misses = 0
        self.phase = "frozen"
        self.freeze_seconds = time.perf_counter() - began
        self.audit.start()

    def counters(self) -> dict[str, int]:
        """Since the freeze. The first ones are 0 in a healthy job; the last two only cost time on the host.

        `syncs` is there with `watch_syncs` only, for elsewhere nobody counts them. `served_general` counts classes that
        got the general binary, `unplanned_launches` calls on Triton's own path.
        """
        return {
            "late_tunes": self.guard.late_tunes,
            "late_compiles": self.guard.late_compiles,
            "file_ops": self.audit.file_ops,
            **({"syncs": self.audit.syncs} if self.audit.watch_syncs else {}),
            "served_general": self.compiling.served_general,
            "unplanned_launches": self.launching.misses,
        }

    def report(self) -> dict[str, Any]:
        """Versions, decisions, timings and counters, ready for `json.dumps`."""
        return {
            "phase": self.phase,
            "guard": self.guard.mode,
            "stamp": self.table.stamp.as_dict(),
            "table_hash": self.table.hash(),
            "decisions": {str(key): str(self.table.get(key)) for key in self.table},
            "rejected": {key: dict(reasons) for key, reasons in self.tuning.rejected.items()},
            "probes": self.probes.report(),
            "launches": self.launching.summary(),
            "timings": {
                "tuning_rounds": self.tuning.rounds,
                "tuning_s": round(self.tuning.seconds, 3),
                "compiled": self.compiling.compiled,
                "freeze_s": round(self.freeze_seconds, 3),
            },
            "counters": self.counters(),
            "file_examples": list(self.audit.examples),
            "agreement": self._agreement_report(),
            "store": self._store_report(),
        }

    def deactivate(self) -> None:
        """Give Triton and FLA back what was exchanged; Triton compiles anew what it runs after this. Idempotent."""
        global _active
        with _activation:
            if self.phase == "inactive":
                return
            self.guard.frozen = False
            self.audit.stop()
            if self._agreement is not None:
                self._agreement.__exit__(None, None, None)
                self._agreement = None
            self._seams.restore()
            self.phase = "inactive"
            if _active is self:
                _active = None

    def describe(self, outer: Any) -> Kernel | None:
        """Facts of a kernel, found once; also the moment at which its size arguments lose their specialisation."""
        known = self._known.get(id(outer))
        if known is not None:
            return known[1]
        with self._describing:
            known = self._known.get(id(outer))
            if known is None:
                kernel = describe(outer)
                if kernel is not None and not self._answers_for(kernel.name):
                    kernel = None
                if kernel is not None:
                    self._unspecialise(kernel)
                known = self._known[id(outer)] = (outer, kernel)
        return known[1]

    def _open_store(self) -> RankStore:
        s = self.settings
        store = open_rank_store(
            os.environ,
            self.stamp,
            local_rank=s.local_rank,
            cache_root=s.cache_root,
            bundle=s.bundle,
            tables=s.tables,
        )
        self._seams.on_restore(store.close)
        return store

    def _open_agreement(self) -> Agreement:
        if self._agreement is None:
            self._agreement = Agreement.of_job() if self.settings.agree else Agreement(None, 0, 1)
            self._agreement.__enter__()
        return self._agreement

    def _agreement_report(self) -> dict[str, Any] | None:
        a = self.agreed
        if a is None:
            return None
        ranks = {arch: list(numbers) for arch, numbers in a.ranks.items()}
        return {"ranks": ranks, "overruled": a.overruled, "seconds": round(a.seconds, 3)}

    def _store_report(self) -> dict[str, Any] | None:
        s = self.store
        if s is None:
            return None
        refused = {path: str(error) for path, error in s.refused.items()}
        return {"directory": str(s.directory.path), "bundle": s.bundle_id, "refused": refused}

    def _answers_for(self, kernel: str) -> bool:
        guarded = self.settings.guarded
        return not guarded or any(kernel == p or kernel.startswith(p.rstrip(".") + ".") for p in guarded)

    def _unspecialise(self, kernel: Kernel) -> None:
        parameters = without_specialisation(kernel, self.settings.size_arguments)
        if not parameters:
            return
        jit = kernel.jit

        def put(value: bool) -> None:
            for parameter in parameters:
                parameter.do_not_specialize = value
            jit.device_caches.clear()  # each holds a binder that was generated from the parameters

        put(True)
        self._seams.on_restore(lambda: put(False))

    def _thaw(self, phase: Phase) -> None:
        self.guard.frozen = False
        self.audit.stop()
        self.launching.thaw()
        self.phase = phase

    def say(self, text: str) -> None:
        """Tell whoever shows progress, and the other ranks that this one goes on.

        Raises:
            AgreementError: another rank failed.
        """
        self._progress(text)
        if self._agreement is not None:
            self._agreement.progress(text)

    def share(self, value: Any) -> list[Any]:
        """In a warm-up: gather a JSON-serialisable value from all ranks, by rank. All ranks call it.

        Raises:
            AgreementError: another rank failed.
        """
        return self._open_agreement().share(value)

    def _tuned(self, key: TuningKey, configs: int, seconds: float) -> None:
        self.say(f"tuned {key.kernel.rsplit('.', 1)[-1]} ({configs} configs, {seconds:.1f} s)")


def _say(text: str) -> None:
    _log.info("fla-safe: %s", text)
