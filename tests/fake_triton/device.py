"""State of the stand-in GPU: current device of each thread, counts of what was compiled and benchmarked, launches."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PROPERTIES", "FakeGpu", "Launch"]

PROPERTIES = {
    "max_shared_mem": 232448,
    "max_num_regs": 65536,
    "multiprocessor_count": 132,
    "warpSize": 32,
    "sm_clock_rate": 1980000,
    "mem_clock_rate": 3201000,
    "mem_bus_width": 6144,
}
"""Of an H200, in the form of Triton's `get_device_properties`."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch as the device would have seen it; pointers are addresses, constexprs are left out."""

    kernel: str
    grid: tuple[int, int, int]
    device: int
    stream: int
    arguments: tuple[Any, ...]
    specialisation: str
    num_warps: int


@dataclass
class FakeGpu:
    """What happened on the device since `install` (or `reset`)."""

    count: int = 8
    bench_ms: Callable[[], float] = lambda: 1.0
    compiled: list[str] = field(default_factory=list)
    benchmarks: int = 0
    launches: list[Launch] = field(default_factory=list)
    loaded: int = 0
    _thread: threading.local = field(default_factory=threading.local)

    def current_device(self) -> int:
        """Index of the calling thread's device."""
        return getattr(self._thread, "device", 0)

    def set_device(self, index: Any) -> None:
        """Choose the calling thread's device."""
        self._thread.device = getattr(index, "index", index)

    def reset(self) -> None:
        """Forget all counts and launches; keep what was compiled in memory."""
        self.compiled.clear()
        self.launches.clear()
        self.benchmarks = 0

    def bench(self, call: Callable[[], None], quantiles: Any = None, **_: Any) -> list[float]:
        """Triton's `do_bench`: one call, and a time that `bench_ms` makes up."""
        self.benchmarks += 1
        call()
        return [self.bench_ms()] * 3
