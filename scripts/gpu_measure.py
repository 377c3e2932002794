"""Measures calls on a CUDA GPU: wall, host and GPU busy time, kernels, synchronisations, memory; and its ceilings."""

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["IN_A_ROW", "Ceilings", "Measurement", "busy_ms", "measure", "measure_ceilings"]

type Step = Callable[[], object]

IN_A_ROW = 8


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates of this GPU, measured.

    Attributes:
        copy: bytes read plus written per second by a large device-to-device copy.
        matrix: bfloat16 floating-point operations per second of a large matrix product.
    """

    copy: float
    matrix: float


@dataclass(slots=True)
class Measurement:
    """One way to compute something; times in milliseconds, medians over repeats.

    Attributes:
        wall: from the call to the end of its GPU work.
        in_a_row: wall time a call of `IN_A_ROW` calls, as of a model's layers: the host need not wait between them.
        host: from the call to its return.
        busy: sum of the durations of its kernels, copies and fills.
        kernels: how many.
        syncs: host-device synchronisations.
        peak: MiB allocated at most, beyond what was allocated before.
        by_kernel: kernel name -> milliseconds of one call.
    """

    wall: float = 0.0
    in_a_row: float = 0.0
    host: float = 0.0
    busy: float = 0.0
    kernels: float = 0.0
    syncs: int = 0
    peak: float = 0.0
    by_kernel: dict[str, float] = field(default_factory=dict)


def _median_event_time(step: Step, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure_ceilings() -> Ceilings:
    """A 2 GiB copy and an 8192-wide bfloat16 product."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        target.copy_(source)
        a @ b
    copy = 2 * source.nbytes / _median_event_time(lambda: target.copy_(source), 15)
    return Ceilings(copy, 2 * 8192**3 / _median_event_time(lambda: a @ b, 15))


def measure(ways: Mapping[str, Step], repeats: int, *, profiled: int = 3) -> dict[str, Measurement]:
    """Measure all ways in turns, so that drift of clocks and temperature hits them alike.

    Args:
        profiled: calls under the profiler, which counts kernels and their time; 0: neither, nor memory and syncs.
    """
    results = {name: Measurement() for name in ways}
    walls: dict[str, list[float]] = {name: [] for name in ways}
    hosts: dict[str, list[float]] = {name: [] for name in ways}
    for step in ways.values():
        for _ in range(3):
            step()
    for _ in range(repeats):
        for name, step in ways.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            returned = time.perf_counter()
            torch.cuda.synchronize()
            walls[name].append((time.perf_counter() - start) * 1e3)
            hosts[name].append((returned - start) * 1e3)
    rows: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(3):
        for name, step in ways.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(IN_A_ROW):
                step()
            torch.cuda.synchronize()
            rows[name].append((time.perf_counter() - start) * 1e3 / IN_A_ROW)
    for name, step in ways.items():
        result = results[name]
        result.wall, result.host = statistics.median(walls[name]), statistics.median(hosts[name])
        result.in_a_row = statistics.median(rows[name])
        if profiled:
            result.peak = _peak(step)
            result.syncs = _syncs(step)
            _profile(step, profiled, result)
    return results


def busy_ms(step: Step, calls: int = 20) -> float:
    """Milliseconds that the GPU works for one call, however long the host takes; caches as the last call left them."""
    result = Measurement()
    for _ in range(3):
        step()
    _profile(step, calls, result)
    return result.busy


def _peak(step: Step) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _syncs(step: Step) -> int:
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def _profile(step: Step, calls: int, result: Measurement) -> None:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            step()
        torch.cuda.synchronize()
    count = 0
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA or getattr(event, "is_user_annotation", False):
            continue
        count += 1
        spent = event.time_range.elapsed_us() / 1e3 / calls
        result.by_kernel[event.name] = result.by_kernel.get(event.name, 0.0) + spent
    result.kernels, result.busy = count / calls, sum(result.by_kernel.values())
