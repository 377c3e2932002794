"""Reads what the processes of one traced run wrote, and adds it up: all of it, and its steady half."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fla_safe.errors import FlaSafeError
from fla_safe.trace.record import VERSION

__all__ = ["Process", "Run", "Table", "TraceError", "per", "read_run", "spread", "table"]

Table = dict[str, dict[str, float]]
"""Cause -> what was counted -> how often."""


Sites = dict[tuple[str, str, str], dict[str, Any]]
"""Operation, path and stack -> the place with its counts."""


class TraceError(FlaSafeError, ValueError):
    """A folder holds no trace, or a command cannot be traced."""


@dataclass(slots=True)
class Process:
    """One process: head of its file, intervals in order, places with their final counts."""

    head: dict[str, Any]
    intervals: list[dict[str, Any]] = field(default_factory=list)
    sites: Sites = field(default_factory=dict)
    ended: bool = False

    @property
    def steps(self) -> int:
        """Training steps that were finished."""
        return max((i["step"] for i in self.intervals), default=0)

    @property
    def launches(self) -> int:
        """Triton kernels launched."""
        return sum(i.get("launches", 0) for i in self.intervals)

    def name(self) -> str:
        """For people."""
        rank = self.head["rank"]
        return f"{'rank ' + rank if rank is not None else 'no rank'}, pid {self.head['pid']} on {self.head['host']}"


@dataclass(slots=True)
class Run:
    """A traced run.

    Attributes:
        trainers: processes that finished steps, or else launched kernels; else all.
        window: begin and end (seconds since the epoch) of the steady half: from where every trainer is past half of its
            steps to the last step; by time where there are no steps.
    """

    folder: Path
    processes: list[Process]
    trainers: list[Process]
    window: tuple[float, float]

    def steady(self, process: Process) -> list[dict[str, Any]]:
        """Intervals of a process inside the window."""
        begin, end = self.window
        return [i for i in process.intervals if i["t0"] >= begin - 1e-6 and i["t1"] <= end + 1e-6]

    @property
    def steady_steps(self) -> int:
        """Steps inside the window, summed over trainers."""
        total = 0
        for process in self.trainers:
            before = max((i["step"] for i in process.intervals if i["t0"] < self.window[0] - 1e-6), default=0)
            total += process.steps - before
        return total

    @property
    def steady_seconds(self) -> float:
        """Length of the window."""
        return max(self.window[1] - self.window[0], 1e-9)

    def sustained(self) -> list[str]:
        """Causes that a process has in at least three quarters of the window: not an import that came late, once."""
        found: set[str] = set()
        for process in self.processes:
            intervals = self.steady(process)
            seen: dict[str, set[int]] = defaultdict(set)
            # Quarters of the intervals, not of the time: one slow step must not hide the others.
            for number, interval in enumerate(intervals):
                for cause in interval["ops"]:
                    seen[cause].add(4 * number // len(intervals))
            found |= {cause for cause, quarters in seen.items() if len(quarters) >= min(3, len(intervals))}
        return sorted(found)

    def sites(self, *, steady: bool) -> list[dict[str, Any]]:
        """Places of all processes together, the most frequent first; `steady`: those still active in the window."""
        merged: Sites = {}
        for process in self.processes:
            for site in process.sites.values():
                if not steady or (site["last"] >= self.window[0] and site["first"] <= self.window[1]):
                    _add(merged, site)
        return sorted(merged.values(), key=lambda s: -s["count"])


def read_run(folder: Path) -> Run:
    """Read all `*.jsonl` of a trace folder. A file that was cut off (a killed rank) counts up to its last whole line.

    Raises:
        TraceError: there is none, or one of another version.
    """
    processes = [p for path in sorted(folder.glob("*.jsonl")) if (p := _read(path)) is not None]
    if not processes:
        raise TraceError(
            f"{folder} holds no trace of a Python process that imported torch",
            "files written by `fla-safe trace`",
            "name the folder that `fla-safe trace` printed; no process writes one without torch, without fla-safe in "
            "its Python, or with TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        )
    trainers = [p for p in processes if p.steps] or [p for p in processes if p.launches] or processes
    begins = [_middle(p) for p in trainers]
    # After the last step comes the end of the job: checkpoints, reports, exit handlers.
    ends = [next(i["t1"] for i in p.intervals if i["step"] == p.steps) for p in trainers if p.steps]
    ends = ends or [p.intervals[-1]["t1"] for p in trainers if p.intervals]
    return Run(folder, processes, trainers, (max(begins, default=0.0), max(ends, default=0.0)))


def _read(path: Path) -> Process | None:
    process = None
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if not isinstance(line, dict):
            return None
        if line.get("kind") == "process":
            if line["version"] != VERSION:
                raise TraceError(f"{path} has format {line['version']}", f"format {VERSION}", "trace it again")
            process = Process(line)
        elif process is None:
            return None
        elif line["kind"] == "interval":
            process.intervals.append(line)
        elif line["kind"] == "sites":
            for site in line["sites"]:
                _add(process.sites, site)
        elif line["kind"] == "end":
            process.ended = True
    return process


def _add(sites: Sites, site: dict[str, Any]) -> None:
    key = (site["operation"], site["path"], site["stack"])
    if (seen := sites.get(key)) is None:
        sites[key] = dict(site)
    else:
        seen["count"] += site["count"]
        seen["size"] += site["size"]
        seen["first"], seen["last"] = min(seen["first"], site["first"]), max(seen["last"], site["last"])


def _middle(process: Process) -> float:
    if not process.intervals:
        return float(process.head["t"])
    if process.steps >= 2:
        half = process.steps // 2
        return float(next(i["t1"] for i in process.intervals if i["step"] >= half))
    first, last = process.intervals[0]["t0"], process.intervals[-1]["t1"]
    return float((first + last) / 2)


def table(intervals: Iterable[dict[str, Any]]) -> Table:
    """Operations by cause."""
    found: Table = defaultdict(lambda: defaultdict(float))
    for interval in intervals:
        for cause, operations in interval["ops"].items():
            for operation, n in operations.items():
                found[cause][operation] += n
    return {cause: dict(operations) for cause, operations in found.items()}


def per(counts: Table, number: float) -> Table:
    """Counts divided by a number of steps or seconds."""
    return {c: {o: round(n / number, 3) for o, n in ops.items()} for c, ops in counts.items()} if number else {}


def spread(values: list[float]) -> dict[str, float] | None:
    """Median, 90th percentile and maximum."""
    if not values:
        return None
    ordered = sorted(values)
    at = min(len(ordered) - 1, int(len(ordered) * 0.9))
    return {
        "n": len(values),
        "median": round(statistics.median(ordered), 3),
        "p90": round(ordered[at], 3),
        "max": round(ordered[-1], 3),
    }
