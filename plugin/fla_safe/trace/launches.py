"""Counts what Triton tunes, compiles, loads and launches, and the time between launches on the host.

Three seams of Triton: its autotuner's `_bench`, its compilation listener, and the C launcher of each compiled kernel,
which stock FLA and frozen plans both end in. A launch costs one Python call and two clock readings more.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["MODULES", "Launches", "attach", "count_for"]

MODULES = ("triton.runtime.autotuner", "triton.compiler.compiler")
"""Modules that `attach` waits for."""

_attached: set[str] = set()
_current: "Launches | None" = None


class _Thread:
    """What one thread launched."""

    __slots__ = ("benching", "last", "launches", "tried")

    def __init__(self) -> None:
        self.benching = 0
        self.launches = 0
        self.last = 0.0
        self.tried: tuple[str, set[str]] = ("", set())


class Launches:
    """Counters since the last `take`.

    Args:
        watched: names or parts of names of kernels before which the host gap is measured.
    """

    def __init__(self, watched: tuple[str, ...]) -> None:
        self.watched = watched
        self._threads: list[_Thread] = []
        self._local = threading.local()
        self._given = 0
        self._gaps: dict[str, list[float]] = {}
        self._events: list[tuple[str, str]] = []

    def thread(self) -> _Thread:
        """State of the calling thread."""
        try:
            return self._local.state  # type: ignore[no-any-return]
        except AttributeError:
            state = self._local.state = _Thread()
            self._threads.append(state)
            return state

    def gap(self, kernel: str, seconds: float) -> None:
        """Time between the end of the thread's last launch and this one."""
        self._gaps.setdefault(kernel, []).append(seconds)

    def event(self, kind: str, kernel: str) -> None:
        """One `tune` (a round of benchmarks), `benchmark`, `compile`, or `load` (of a compiled kernel from disk)."""
        self._events.append((kind, kernel))

    def take(self) -> dict[str, Any]:
        """Counters for one interval, zeros left out; gaps in microseconds."""
        total = sum(t.launches for t in list(self._threads))
        found: dict[str, Any] = {"launches": total - self._given} if total != self._given else {}
        self._given = total
        events, self._events = self._events, []
        for kind, kernel in events:
            kernels = found.setdefault(kind + "s", {})
            kernels[kernel] = kernels.get(kernel, 0) + 1
        gaps, self._gaps = self._gaps, {}
        if gaps:
            found["gaps"] = {k: [round(s * 1e6, 1) for s in v] for k, v in gaps.items()}
        return found


def attach(module: Any) -> None:
    """Hook into one of `MODULES`, which was just imported. Never raises: an unknown Triton is only not counted."""
    name = module.__name__
    if name in _attached:
        return
    _attached.add(name)
    try:
        if name == MODULES[0]:
            _hook_tuner(module.Autotuner)
        else:
            _hook_listener()
            _hook_launcher(module.CompiledKernel)
    except Exception as error:
        sys.stderr.write(f"fla_safe: {name} is not traced: {type(error).__name__}: {error}\n")


def count_for(launches: Launches | None) -> None:
    """From now on count for these; None counts nothing."""
    global _current
    _current = launches


def _hook_tuner(autotuner: Any) -> None:
    stock = autotuner._bench

    def _bench(tuner: Any, *args: Any, config: Any, **meta: Any) -> Any:
        launches = _current
        if launches is None:
            return stock(tuner, *args, config=config, **meta)
        name, text, mine = tuner.base_fn.__name__, str(config), launches.thread()
        # A round tries each config once: another kernel, or a config again, is the next round.
        if mine.tried[0] != name or text in mine.tried[1]:
            mine.tried = (name, set())
            launches.event("tune", name)
        mine.tried[1].add(text)
        launches.event("benchmark", name)
        mine.benching += 1
        try:
            return stock(tuner, *args, config=config, **meta)
        finally:
            mine.benching -= 1

    autotuner._bench = _bench


def _hook_listener() -> None:
    from triton import knobs

    before = knobs.compilation.listener

    def listener(*args: Any, **kwargs: Any) -> None:
        launches = _current
        if launches is not None:
            launches.event(
                "load" if kwargs.get("cache_hit") else "compile", str(getattr(kwargs.get("src"), "name", ""))
            )
        if before is not None:
            before(*args, **kwargs)

    knobs.compilation.listener = listener


def _hook_launcher(compiled_kernel: Any) -> None:
    stock = compiled_kernel._init_handles

    def _init_handles(compiled: Any) -> None:
        stock(compiled)
        run: Any = getattr(compiled, "_run", None)
        launch = getattr(run, "launch", None)
        if callable(launch) and not hasattr(launch, "_fla_safe_traced"):
            run.launch = _timed(launch, compiled.name)

    compiled_kernel._init_handles = _init_handles


def _timed(launch: Callable[..., Any], name: str) -> Callable[..., Any]:
    clock = time.perf_counter
    watched = _current is not None and any(part in name for part in _current.watched)

    def timed(*args: Any) -> Any:
        began = clock()
        launches = _current
        if launches is None:
            return launch(*args)
        mine = launches.thread()
        mine.launches += 1
        if watched and mine.last and not mine.benching:
            launches.gap(name, began - mine.last)
        try:
            return launch(*args)
        finally:
            mine.last = clock()

    timed._fla_safe_traced = True  # type: ignore[attr-defined]
    return timed
