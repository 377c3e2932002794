"""A replacement for `Autotuner.run` that shares nothing between calls, so that any number of threads may use it.

Triton keeps a call's arguments in `self.nargs`, its timings in `self.configs_timings` and its saved tensors in
`self.restore_copies`; two threads overwrite each other's (triton issues 3095 and 11494; see docs/cache-and-freeze.md).
Here every tuning works on a private copy of the autotuner, and a call that finds its decision takes no lock.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from fla_safe.runtime.guard import Guard, NoWorkingConfigError
from fla_safe.runtime.kernels import Kernel
from fla_safe.runtime.seams import Seams
from fla_safe.runtime.tuning.decisions import DecisionTable
from fla_safe.runtime.tuning.keys import Decision, Source, TuningKey, UnknownConfigError

__all__ = ["Judge", "Tuned", "Tuning"]

_log = logging.getLogger(__name__)
_ABSENT = object()

Tuned = Callable[[TuningKey, int, float], None]
"""Told of each finished round: key, number of configs tried, seconds."""


class Judge(Protocol):
    """Decides whether a config may win. `launch` runs the kernel once with it on the call's own arguments."""

    def __call__(self, key: TuningKey, config: Any, launch: Callable[[], Any], named: dict[str, Any]) -> str | None:
        """None to accept, else the reason against."""


class Tuning:
    """Chooses the config of each call: from memory, from the decision table, by the guard, or by benchmarking.

    Args:
        table: decisions; winners are added.
        guard: says whether a key without decision is late.
        describe: facts of an autotuner's kernel.
        answers_for: whether a kernel, by name, is one of ours; others are only made thread-safe.
        judge: checks winners before they enter the table.
        told: called after each round of tuning.

    Attributes:
        asked: every key that was looked up since `forget`, with the decisions that it may have, fastest first.
        banned: reasons against decisions by key; none of them is ever chosen again.
        trials: milliseconds of every config that may win, by key, as far as this process or a child measured them.
        trying: told of each config before it is benchmarked or judged, and of each decision that is looked up.
        elsewhere: asked to put a decision for a key into the table before it is tuned here.
        ahead: runs compilations at once, before the configs are benchmarked one after the other (`Ahead`).
    """

    def __init__(
        self,
        table: DecisionTable,
        guard: Guard,
        describe: Callable[[Any], Kernel | None],
        *,
        answers_for: Callable[[str], bool] = lambda kernel: True,
        judge: Judge | None = None,
        told: Tuned | None = None,
    ) -> None:
        self.table = table
        self.guard = guard
        self.answers_for = answers_for
        self.describe = describe
        self.judge = judge
        self.told = told
        self.rounds = 0
        self.seconds = 0.0
        self.rejected: dict[str, dict[str, str]] = {}
        self.asked: dict[TuningKey, tuple[Decision, ...]] = {}
        self.banned: dict[TuningKey, dict[Decision, str]] = {}
        self.trying: Callable[[TuningKey, Any], None] | None = None
        self.elsewhere: Callable[[TuningKey], None] | None = None
        self.ahead: Callable[[list[Callable[[], Any]]], None] | None = None
        self.trials: dict[TuningKey, dict[Decision, float]] = {}
        self._memory: dict[int, tuple[Any, dict[Any, Any]]] = {}
        # One round of tuning at a time: parallel benchmarks on one device would measure each other. Only calls that
        # have nothing to run with wait for it, and it is re-entrant because a hook may call a tuned kernel.
        self._one_round = threading.RLock()

    def install(self, seams: Seams) -> None:
        """Exchange `Autotuner.run` and `Autotuner.warmup`."""
        from triton.runtime.autotuner import Autotuner

        tuning = self

        def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            config = tuning.choose(tuner, args, kwargs)
            if config.pre_hook is not None:
                config.pre_hook({**dict(zip(tuner.arg_names, args, strict=False)), **kwargs, **config.all_kwargs()})
            return tuner.fn.run(*args, **kwargs, **config.all_kwargs())

        def warmup(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            return stock_warmup(_copy(tuner), *args, **kwargs)

        seams.replace(Autotuner, "run", run)
        stock_warmup = seams.replace(Autotuner, "warmup", warmup)

    def forget(self) -> None:
        """Ask the table again for every key; after the table was replaced."""
        self._memory = {}
        self.asked = {}

    def ban(self, key: TuningKey, decision: Decision, reason: str) -> None:
        """Never choose this decision for this key again. The next fastest takes its place, or the key is tuned anew."""
        banned = self.banned.setdefault(key, {})
        banned.setdefault(decision, reason)
        self.rejected.setdefault(str(key), {})[str(decision)] = reason
        if self.table.get(key) == decision:
            self.table.discard(key)
            trials = {d: t for d, t in self.trials.get(key, {}).items() if d not in banned}
            if trials:
                best = min(trials, key=lambda d: trials[d])
                self.table.put(key, best, median_us=trials[best] * 1000)
        self.forget()

    def adopt(
        self,
        key: TuningKey,
        decision: Decision,
        trials: dict[Decision, float],
        rejected: dict[str, str],
        *,
        seconds: float,
        source: Source,
    ) -> None:
        """Take over a round of tuning from another process on the same device."""
        self.trials[key] = trials
        if rejected:
            self.rejected[str(key)] = dict(rejected)
        self.rounds += 1
        self.seconds += seconds
        median = trials[decision] * 1000 if decision in trials else None
        self.table.put(key, decision, median_us=median, source=source)

    def choose(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Config for one call.

        Raises:
            LateTuneError: no decision after the freeze, and the guard is strict.
            NoWorkingConfigError: tuning found nothing that works.
        """
        if len(tuner.configs) == 1:
            return tuner.configs[0]
        named = dict(zip(tuner.arg_names, args, strict=False))
        for name in tuner.arg_names:
            if name in kwargs:
                named[name] = kwargs[name]
        remembered = self._memory.get(id(tuner))
        if remembered is None:
            remembered = self._memory.setdefault(id(tuner), (tuner, {}))
        kernel = self.describe(tuner)
        dead = kernel.dead if kernel is not None else frozenset()
        dtypes = {n: named[n].dtype for n in tuner.arg_names if hasattr(named.get(n), "dtype")}
        values = {k: named[k] for k in tuner.keys if k in named}
        short = (tuple((k, v) for k, v in values.items() if k not in dead), tuple(dtypes.items()))
        config = remembered[1].get(short, _ABSENT)
        if config is _ABSENT:
            name = kernel.name if kernel is not None else f"{tuner.base_fn.__module__}.{tuner.base_fn.__qualname__}"
            key = TuningKey.of(name, values, dtypes, size_only=dead)
            config = self._decide(tuner, key, args, kwargs, named)
            remembered[1][short] = config
        return config

    def _decide(self, tuner: Any, key: TuningKey, args: Any, kwargs: Any, named: dict[str, Any]) -> Any:
        private = _private(tuner, args)
        offered = list(private.prune_configs(kwargs))
        self._note(key, offered)
        config = self._known(key, offered)
        if config is not None:
            if self.trying is not None:
                self.trying(key, config)
            return config
        late = self.guard.frozen and self.answers_for(key.kernel)
        if late and self.guard.mode == "off":
            self.guard.late_tune(key.kernel, str(key), "it is tuned now")
        if not late or self.guard.mode == "off":
            with self._one_round:
                config = self._known(key, offered)
                if config is None and self.elsewhere is not None and self.answers_for(key.kernel):
                    self.elsewhere(key)
                    config = self._known(key, offered)
                return self._tune(private, key, args, kwargs, named, offered) if config is None else config
        near = self.table.nearest(key)
        config = offered[0]
        if near is not None:
            config = next((c for c in offered if _is(c, near.decision)), config)
        self.guard.late_tune(key.kernel, str(key), f"{config} is used without a benchmark")
        return config

    def _note(self, key: TuningKey, offered: list[Any]) -> None:
        trials, banned = self.trials.get(key, {}), self.banned.get(key, {})
        decisions = [Decision.from_config(c) for c in offered if not getattr(c, "ir_override", None)]
        self.asked[key] = tuple(
            sorted((d for d in decisions if d not in banned), key=lambda d: trials.get(d, math.inf))
        )

    def _known(self, key: TuningKey, offered: list[Any]) -> Any | None:
        """The table's decision, if the kernel still offers it for these arguments and nothing speaks against it."""
        decision = self.table.get(key)
        if decision is None or decision in self.banned.get(key, {}):
            return None
        try:
            return decision.select(offered, key.kernel)
        except UnknownConfigError as error:
            _log.warning("fla-safe: %s", error)
            return None

    def _tune(self, private: Any, key: TuningKey, args: Any, kwargs: Any, named: Any, offered: list[Any]) -> Any:
        began = time.perf_counter()
        times: dict[int, float] = {}
        banned = self.banned.get(key, {})
        reasons: dict[str, str] = {str(decision): reason for decision, reason in banned.items()}
        everything, offered = offered, [c for c in offered if not any(_is(c, d) for d in banned)]
        if len(offered) > 1 or self.judge is not None:
            if self.ahead is not None and _only_compiles(private):
                self.ahead([_compilation(private, config, args, kwargs) for config in offered if not config.pre_hook])
            for i, config in enumerate(offered):
                if self.trying is not None:
                    self.trying(key, config)
                times[i] = _milliseconds(private, config, args, kwargs, reasons)
        order = sorted(
            (i for i in range(len(offered)) if times.get(i, 0.0) < math.inf), key=lambda i: times.get(i, 0.0)
        )
        winner = None
        for i in order:
            if self.trying is not None:
                self.trying(key, offered[i])
            reason = self._judged(private, key, offered[i], args, kwargs, named)
            if reason is None:
                winner = i
                break
            reasons[str(offered[i])] = reason
        seconds = time.perf_counter() - began
        self.rounds += 1
        self.seconds += seconds
        if reasons:
            self.rejected[str(key)] = reasons
        if winner is None:
            raise NoWorkingConfigError(
                f"none of the {len(everything)} configs of {key} works: "
                + "; ".join(f"[{config}] {reason}" for config, reason in list(reasons.items())[:4]),
                "at least one config that compiles, launches and gives right results",
                "look at the first reason; if memory ran out, tune before the optimizer is made",
            )
        config = offered[winner]
        self.trials[key] = {
            Decision.from_config(c): times[i]
            for i, c in enumerate(offered)
            if times.get(i, math.inf) < math.inf and str(c) not in reasons and not getattr(c, "ir_override", None)
        }
        if times:
            private.pre_hook({**named, **kwargs, **config.all_kwargs()}, reset_only=True)
        if not getattr(config, "ir_override", None):
            median = times[winner] * 1000 if winner in times else None
            source: Source = "tuned" if times else "single"
            self.table.put(key, Decision.from_config(config), median_us=median, source=source)
        _tell_listener(private, key, config, offered, times, seconds)
        if self.told is not None:
            self.told(key, len(offered), seconds)
        return config

    def _judged(self, private: Any, key: TuningKey, config: Any, args: Any, kwargs: Any, named: Any) -> str | None:
        if self.judge is None:
            return None

        def launch() -> Any:
            full = {**named, **kwargs, **config.all_kwargs()}
            if config.pre_hook is not None:
                config.pre_hook(full)
            return private.fn.run(*args, **kwargs, **config.all_kwargs())

        try:
            return self.judge(key, config, launch, named)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def _copy(tuner: Any) -> Any:
    # Not copy.copy, which leaves a note (`__slotnames__`) on Triton's class.
    twin = object.__new__(type(tuner))
    twin.__dict__.update(vars(tuner))
    return twin


def _only_compiles(tuner: Any) -> bool:
    """Whether a warm-up call of the kernel inside runs nothing else that may be tuned.

    That would wait for the end of this round, in threads that this round waits for.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    inner = tuner.fn
    while not isinstance(inner, (Autotuner, JITFunction)):
        inner = inner.fn
    return isinstance(inner, JITFunction) and not inner.pre_run_hooks


def _is(config: Any, decision: Decision) -> bool:
    return not getattr(config, "ir_override", None) and Decision.from_config(config) == decision


def _private(tuner: Any, args: tuple[Any, ...]) -> Any:
    """A copy of an autotuner for one call, whose default hooks keep their saved tensors to themselves."""
    private = _copy(tuner)
    private.nargs = dict(zip(tuner.arg_names, args, strict=False))
    saved: dict[str, Any] = {}
    users = tuner.pre_hook if tuner.user_defined_pre_hook else None

    def pre_hook(kwargs: dict[str, Any], reset_only: bool = False) -> None:
        if not reset_only:
            saved.update({n: kwargs[n].clone() for n in tuner.restore_value if kwargs.get(n) is not None})
        if users is not None:
            users(kwargs, reset_only=reset_only) if reset_only else users(kwargs)
            return
        for name in tuner.reset_to_zero:
            if kwargs.get(name) is not None:
                kwargs[name].zero_()

    def post_hook(kwargs: dict[str, Any], exception: BaseException | None) -> None:
        for name, value in saved.items():
            kwargs[name].copy_(value)
        saved.clear()

    if users is not None or tuner.reset_to_zero or tuner.restore_value:
        private.pre_hook = pre_hook
    if tuner.restore_value and not tuner.user_defined_post_hook:
        private.post_hook = post_hook
    return private


def _compilation(private: Any, config: Any, args: Any, kwargs: Any) -> Callable[[], Any]:
    """Compiles what a benchmark of the config will launch. Not for configs with hooks: they may change arguments."""
    return partial(private.fn.run, *args, **{**kwargs, "warmup": True}, **config.all_kwargs())


def _milliseconds(private: Any, config: Any, args: Any, kwargs: Any, reasons: dict[str, str]) -> float:
    """Median time of one config; infinity, with a reason, for one that fails in any way."""
    try:
        measured = private._bench(*args, config=config, **kwargs)
    except Exception as error:  # Triton lets all but three kinds end the job (rules out AMD's 32 warps, for one)
        reasons[str(config)] = f"{type(error).__name__}: {error}"
        return math.inf
    median = float(measured[0] if isinstance(measured, (list, tuple)) else measured)
    if math.isinf(median):
        reasons[str(config)] = "too large for the device, or refused by the compiler"
    return median


def _tell_listener(private: Any, key: TuningKey, config: Any, offered: list[Any], times: Any, seconds: float) -> None:
    from triton import knobs

    listener = getattr(knobs.autotuning, "listener", None)  # Triton 3.8 and later
    if listener is None:
        return
    jit = private.fn
    while hasattr(jit, "fn") and hasattr(jit, "run") and not hasattr(jit, "params"):
        jit = jit.fn
    timings = {c: [times[i]] * 3 for i, c in enumerate(offered) if i in times}
    listener(fn=jit, key=key.parts, best_config=config, configs_timings=timings, duration=seconds, cache_hit=False)
