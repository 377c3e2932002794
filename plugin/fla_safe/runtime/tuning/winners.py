"""A config enters a decision table only after its results were right and repeated bit for bit.

Two ways in. `elect` tries configs in a child process, so one that kills the CUDA context, crashes or hangs costs that
process and nothing else; `RepeatCheck` checks inside the job, on the arguments of the call that is being tuned.

Why: more than once a config that upstream offered was wrong or irreproducible on some GPU (fla issues 640, 984, 1228).
"""

import json
import logging
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from fla_safe.errors import FlaSafeError
from fla_safe.runtime.tuning.decisions import Decision, DecisionTable, TuningKey
from fla_safe.runtime.tuning.keys import ConfigLike
from fla_safe.runtime.tuning.trial_child import same_bits

__all__ = ["REPEATS", "Election", "NoWinnerError", "RepeatCheck", "TrialError", "Verdict", "elect"]

log = logging.getLogger("fla_safe")

REPEATS = 20


class TrialError(FlaSafeError, RuntimeError):
    """The child process cannot even build what is to be tuned: no config is at fault."""


class NoWinnerError(FlaSafeError, RuntimeError):
    """No config passed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one config: `stage` is where it ended, `reason` why (None for the winner and the untried)."""

    decision: Decision
    stage: Literal["timed", "examined", "won"]
    reason: str | None
    median_us: float | None


@dataclass(frozen=True, slots=True)
class Election:
    """Result of `elect`: the fastest config that passed, and what became of every candidate."""

    winner: Decision
    median_us: float
    verdicts: tuple[Verdict, ...]

    def enter(self, table: DecisionTable, key: TuningKey) -> None:
        """Put the winner in a table, as verified."""
        table.put(key, self.winner, median_us=self.median_us, verified=True)


def elect(
    factory: str,
    arguments: Mapping[str, Any],
    candidates: Iterable[Decision],
    *,
    repeats: int = REPEATS,
    seconds: float = 120.0,
    start_seconds: float = 300.0,
    told: Callable[[str], None] | None = None,
) -> Election:
    """Time every candidate in a child process, then examine them from fastest to slowest until one passes.

    Args:
        factory: `"module:function"`; called in the child, returns a `trial_child.Subject`.
        arguments: keyword arguments of the factory, JSON-serialisable.
        candidates: configs that the kernel offers.
        repeats: bitwise-equal runs asked of a winner.
        seconds: longest time for one request; a config that takes longer hangs.
        start_seconds: longest time for the child to import and build the subject.
        told: called with a line of progress.

    Raises:
        TrialError: the subject cannot be built.
        NoWinnerError: no candidate passed; says why for the first ones.
    """
    verdicts: dict[Decision, Verdict] = {}
    times: dict[Decision, float] = {}
    ordered = list(dict.fromkeys(candidates))
    say = told or (lambda line: None)
    with _Child(factory, arguments, start_seconds) as child:
        for n, decision in enumerate(ordered):
            say(f"timing config {n + 1} of {len(ordered)}: {decision}")
            reply = child.ask({"do": "time", "decision": decision.as_dict()}, seconds)
            if isinstance(reply.get("us"), float) and 0 < reply["us"] < math.inf:
                times[decision] = reply["us"]
            else:
                verdicts[decision] = Verdict(decision, "timed", reply.get("error") or f"time {reply.get('us')}", None)
        for decision in sorted(times, key=lambda d: times[d]):
            say(f"examining {decision}")
            reply = child.ask({"do": "examine", "decision": decision.as_dict(), "repeats": repeats}, seconds)
            reason = reply.get("error") or reply.get("reason")
            verdicts[decision] = Verdict(decision, "examined" if reason else "won", reason, times[decision])
            if not reason:
                break
    for decision in ordered:
        verdicts.setdefault(decision, Verdict(decision, "timed", None, times.get(decision)))
    refused = [v for v in verdicts.values() if v.reason]
    for verdict in refused:
        log.warning("fla-safe: config [%s] is not used: %s", verdict.decision, verdict.reason)
    winner = next((v for v in verdicts.values() if v.stage == "won"), None)
    if winner is None or winner.median_us is None:
        raise NoWinnerError(
            f"none of {len(ordered)} configs of {factory} {dict(arguments)!r:.200} passed: "
            + "; ".join(f"[{v.decision}] {v.reason}" for v in refused[:4]),
            f"a config with right results that repeat bitwise {repeats} times",
            "look at the first reason; if memory ran out, tune before the optimizer is made",
        )
    return Election(winner.decision, winner.median_us, tuple(verdicts[d] for d in ordered))


class _Child:
    """A process that tries configs, started again whenever one of them took it down."""

    def __init__(self, factory: str, arguments: Mapping[str, Any], start_seconds: float) -> None:
        # "" means the current directory of the process that reads it, which is the same in the child.
        self._hello = {"factory": factory, "arguments": dict(arguments), "path": [p for p in sys.path if p]}
        self._start_seconds = start_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._write = -1
        self._read = -1
        self._rest = b""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed in __exit__)

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *unused: object) -> None:
        self._end()
        self._log.close()

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Answer of the child; `{"error": ...}` when the request raised, killed it, or took too long."""
        if self._process is None:
            self._start()
        reply = self._exchange(request, seconds)
        if "died" in reply:
            self._end()
            return {"error": f"it {reply['died']}"}
        if reply.get("dead"):
            self._end()
            return {"error": f"{reply['error']} (and it took the device context with it)"}
        return reply

    def _start(self) -> None:
        there, self._write = os.pipe()
        self._read, back = os.pipe()
        self._rest = b""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fla_safe.runtime.tuning.trial_child", str(there), str(back)],
                pass_fds=(there, back),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )
        finally:
            os.close(there)
            os.close(back)
        reply = self._exchange(self._hello, self._start_seconds)
        if not reply.get("ready"):
            reason = reply.get("error") or f"the process {reply.get('died')}"
            self._end()
            raise TrialError(
                f"{self._hello['factory']} cannot be built for a trial: {reason}",
                "a factory that works in a new process",
                "run it alone to see the whole error",
            )

    def _exchange(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # it died: the read below says how
            os.write(self._write, (json.dumps(request) + "\n").encode())
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, until - time.monotonic())):
                    return {"died": f"did not answer in {seconds:g} s"}
                piece = os.read(self._read, 65536)
                if not piece:
                    return {"died": self._last_words()}
                self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def _last_words(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended the process with status {code}"
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 2000))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"{how}{f' ({lines[-1]:.200})' if lines else ''}"

    def _end(self) -> None:
        if self._process is None:
            return
        for end in (self._read, self._write):
            os.close(end)
        with suppress(ProcessLookupError):
            # The whole session: a config may have started compilers of its own.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None


class RepeatCheck:
    """Judge for tuning inside the job: runs a config again and again on the call's own tensors and restores them.

    Args:
        check: says what is wrong with the arguments after one launch, by name, or None; without it only
            reproducibility is checked.
        repeats: bitwise-equal runs asked after the first.
    """

    def __init__(
        self, check: Callable[[TuningKey, Mapping[str, Any]], str | None] | None = None, *, repeats: int = REPEATS
    ) -> None:
        self.check = check
        self.repeats = repeats

    def __call__(
        self, key: TuningKey, config: ConfigLike, launch: Callable[[], Any], named: Mapping[str, Any]
    ) -> str | None:
        """None when the config may win, else the reason against it."""
        tensors = {n: t for n, t in named.items() if hasattr(t, "clone") and hasattr(t, "copy_") and _is_writable(t)}
        before = {n: t.clone() for n, t in tensors.items()}

        def restore() -> None:
            for name, tensor in tensors.items():
                tensor.copy_(before[name])

        try:
            launch()
            if self.check is not None and (reason := self.check(key, named)):
                return f"wrong: {reason}"
            first = {n: t.clone() for n, t in tensors.items()}
            for i in range(self.repeats):
                restore()
                launch()
                for name, tensor in tensors.items():
                    if not same_bits(first[name], tensor):
                        return f"not reproducible: {name} of repeat {i + 1} has other bits"
            return None
        finally:
            restore()


def _is_writable(tensor: Any) -> bool:
    """An expanded tensor has many elements in one place; no kernel can write it, and `copy_` refuses to."""
    return all(stride != 0 or size == 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
