"""Draws a traced run: file operations by cause, step time and host gap, tunes and compilations, over time."""

from itertools import accumulate
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from fla_safe.trace.causes import CAUSES
from fla_safe.trace.merge import Run
from fla_safe.trace.words import touches

__all__ = ["COLOURS", "draw"]

COLOURS = dict(zip(CAUSES, ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#d55e00", "#7f7f7f"), strict=True))
"""Okabe and Ito's palette, told apart with any colour vision."""


def draw(run: Run) -> list[str]:
    """Write the PNGs into the run's folder and return their names."""
    start = min(p.head["t"] for p in run.processes)
    names = []
    for name, plot in (("operations.png", _operations), ("steps.png", _steps), ("triton.png", _triton)):
        figure = plot(run, start)
        if figure is None:
            continue
        figure.savefig(run.folder / name, dpi=120, bbox_inches="tight")
        plt.close(figure)
        names.append(name)
    return names


def _bins(run: Run, start: float) -> float:
    """Width of a bin in seconds: about 100 bins."""
    end = max((i["t1"] for p in run.processes for i in p.intervals), default=start + 1)
    return max((end - start) / 100, 0.25)


def _operations(run: Run, start: float) -> Any:
    width = _bins(run, start)
    rates: dict[str, dict[int, float]] = {}
    for process in run.processes:
        for interval in process.intervals:
            first, last = (int((interval[t] - start) / width) for t in ("t0", "t1"))
            for cause, operations in interval["ops"].items():
                bins = rates.setdefault(cause, {})
                each = touches(operations) / width / (last - first + 1)  # an interval may be longer than a bin
                for at in range(first, last + 1):
                    bins[at] = bins.get(at, 0) + each
    if not rates:
        return None
    last = max(max(bins) for bins in rates.values())
    figure, axes = plt.subplots(figsize=(9, 3.6))
    for cause in CAUSES:
        if cause in rates:
            x = [(i + 0.5) * width for i in range(last + 1)]
            y = [rates[cause].get(i, 0) for i in range(last + 1)]
            axes.plot(x, y, color=COLOURS[cause], label=cause, linewidth=1.6)
    _steady(axes, run, start)
    axes.set(
        xlabel="seconds", ylabel="operations a second", title="File operations by cause, all processes", yscale="symlog"
    )
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def _steps(run: Run, start: float) -> Any:
    process = max(run.trainers, key=lambda p: p.launches)
    gaps = [
        (i["t1"] - start, sum(v) / len(v), kernel) for i in process.intervals for kernel, v in i.get("gaps", {}).items()
    ]
    times = [
        (b["t1"] - start, (b["t1"] - a["t1"]) * 1e3 / (b["step"] - a["step"]))
        for a, b in zip(process.intervals, process.intervals[1:], strict=False)
        if b["step"] > a["step"]
    ]
    if not gaps and not times:
        return None
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 5), sharex=True)
    above.plot([t for t, _ in times], [ms for _, ms in times], color="#0072b2", linewidth=1.2)
    above.set(ylabel="ms a step", title=f"Step time and host gap, {process.name()}", yscale="log")
    for colour, kernel in zip(("#d55e00", "#009e73", "#cc79a7"), sorted({k for *_, k in gaps}), strict=False):
        below.plot(
            [t for t, _, k in gaps if k == kernel],
            [us for _, us, k in gaps if k == kernel],
            color=colour,
            label=kernel,
            linewidth=1.2,
        )
    below.set(xlabel="seconds", ylabel="us before the kernel", yscale="log")
    if gaps:
        below.legend(fontsize=8)
    _steady(above, run, start)
    _steady(below, run, start)
    return figure


def _triton(run: Run, start: float) -> Any:
    intervals = sorted((i for p in run.processes for i in p.intervals), key=lambda i: i["t1"])
    figure, axes = plt.subplots(figsize=(9, 3))
    drawn = False
    for kind, colour in (("tunes", "#e69f00"), ("compiles", "#0072b2"), ("loads", "#009e73")):
        y = list(accumulate(sum(i.get(kind, {}).values()) for i in intervals))
        if y and y[-1]:
            axes.step([i["t1"] - start for i in intervals], y, where="post", color=colour, label=f"{kind}: {y[-1]}")
            drawn = True
    if not drawn:
        plt.close(figure)
        return None
    _steady(axes, run, start)
    axes.set(xlabel="seconds", ylabel="so far", title="Triton: rounds of tuning, compilations, kernels read from disk")
    axes.legend(fontsize=8)
    return figure


def _steady(axes: Any, run: Run, start: float) -> None:
    axes.axvspan(run.window[0] - start, run.window[1] - start, color="#000000", alpha=0.05, linewidth=0)
    axes.grid(alpha=0.25)
