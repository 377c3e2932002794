"""Makes report.json and report.md from a traced run, with plots where matplotlib is installed."""

import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from fla_safe.trace import strace
from fla_safe.trace.causes import CAUSES
from fla_safe.trace.merge import Process, Run, Table, TraceError, per, read_run, spread, table
from fla_safe.trace.words import verdict

__all__ = ["summarise", "write_report"]

_SITES = 80
_COLUMNS = ("opens", "missing", "stats", "listings", "searches", "changes", "programs", "bytes")
_LIMITS = """\
Counted in every Python process that imports torch, from the end of that import on. Opens, listings, import
searches, changes and programs come from Python's audit hook. No audit event exists for stats: they are calls of
`stat`, `lstat`, `access` and `readlink` of `os` and `posix`, which the import system uses, too. Bytes are the sizes
of the files that were opened for reading, not what was read; the number of reads is known for whole processes only
(/proc/self/io). Not seen: what C, C++ and Rust code opens by itself (Arrow, safetensors, the dynamic linker),
`DirEntry.stat`, and processes without torch. With `--strace` all of these are counted exactly, by path. The host
gap is the time from the end of a thread's last Triton launch to this one; other launches (ATen, TransformerEngine)
inside it are not told apart."""


def summarise(run: Run) -> dict[str, Any]:
    """Everything that is known of a run, JSON-serialisable."""
    everything = [i for p in run.processes for i in p.intervals]
    steady = [i for p in run.processes for i in run.steady(p)]
    counts = table(steady)
    places = run.sites(steady=True)
    report: dict[str, Any] = {
        "run": run.folder.name,
        "processes": [_process(p, p in run.trainers) for p in run.processes],
        "launches": sum(p.launches for p in run.processes),
        "counts": table(everything),
        "io": _io(everything),
        "steady": {
            "begin": run.window[0],
            "intervals": len(steady),
            "seconds": round(run.steady_seconds, 3),
            "steps": run.steady_steps,
            "counts": counts,
            "sustained": run.sustained(),
            "per_second": per(counts, run.steady_seconds),
            "per_rank_and_step": per(counts, run.steady_steps),
            "io": _io(steady),
            **{kind: _events(steady, kind) for kind in ("tunes", "benchmarks", "compiles", "loads")},
        },
        **{kind: _events(everything, kind) for kind in ("tunes", "benchmarks", "compiles", "loads")},
        "gaps": _gaps(run),
        "step": _step_time(run),
        "sites": places[:_SITES],
        "sites_at_start": [s for s in run.sites(steady=False) if s not in places][:_SITES],
    }
    known: dict[str, str] = {}
    for site in reversed([*places, *(s for s in run.sites(steady=False) if s["last"] < run.window[0])]):
        known[site["path"]] = site["cause"]
    exact = strace.counts(run.folder, run.window, known)
    report["strace"] = exact and {
        "counts": exact[0],
        "per_second": per(exact[1], run.steady_seconds),
        "per_rank_and_step": per(exact[1], run.steady_steps),
    }
    report["verdict"] = verdict(report)
    return report


def write_report(folder: Path) -> dict[str, Any]:
    """Write report.json, report.md and plots into the folder of a trace, and return the report.

    Raises:
        TraceError: the folder holds no trace, or cannot be read or written to.
    """
    try:
        run = read_run(folder)
        report = summarise(run)
        report["plots"] = _plots(run)
        (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        # A file's name may be no text.
        (folder / "report.md").write_text(_markdown(report), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise TraceError(
            f"{error.filename or folder}: {error.strerror}", "a trace that can be read, and room beside it", "copy it"
        ) from error
    return report


def _plots(run: Run) -> list[str] | None:
    try:
        from fla_safe.trace.plots import draw
    except ImportError:
        return None
    return draw(run)


def _process(process: Process, trainer: bool) -> dict[str, Any]:
    head = process.head
    return {
        **{k: head[k] for k in ("host", "pid", "parent", "rank", "python", "torch", "argv", "environment")},
        "name": process.name(),
        "trainer": trainer,
        "steps": process.steps,
        "launches": process.launches,
        "complete": process.ended,
    }


def _io(intervals: list[dict[str, Any]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for interval in intervals:
        total.update(interval["io"])
    return dict(total)


def _events(intervals: list[dict[str, Any]], kind: str) -> dict[str, int]:
    total: Counter[str] = Counter()
    for interval in intervals:
        total.update(interval.get(kind, {}))
    return dict(total.most_common())


def _gaps(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for process in run.trainers:
        for interval in process.intervals:
            for kernel, values in interval.get("gaps", {}).items():
                found.setdefault(kernel, {"all": [], "steady": []})["all"] += values
        for interval in run.steady(process):
            for kernel, values in interval.get("gaps", {}).items():
                found[kernel]["steady"] += values
    result = {}
    for kernel, samples in found.items():
        values, third = samples["steady"], len(samples["steady"]) // 3
        early, late = values[:third], values[-third:] if third else []
        growth = statistics.median(late) / statistics.median(early) - 1 if third >= 5 else None
        result[kernel] = {"all": spread(samples["all"]), "steady": spread(values), "growth": growth}
    return result


def _step_time(run: Run) -> dict[str, Any] | None:
    """Seconds a step in the steady half, and how its second part compares with its first."""
    times, drifts = [], []
    for process in run.trainers:
        last, mine = None, []
        for interval in process.intervals:
            if last is not None and interval["step"] > last[1] and interval["t0"] >= run.window[0] - 1e-6:
                mine.append((interval["t1"] - last[0]) / (interval["step"] - last[1]))
            if last is None or interval["step"] > last[1]:
                last = (interval["t1"], interval["step"])
        times += mine
        half = len(mine) // 2
        if half >= 5:
            drifts.append(statistics.median(mine[half:]) / statistics.median(mine[:half]) - 1)
    spread_ = spread([t * 1e3 for t in times])
    return {"milliseconds": spread_, "drift": statistics.mean(drifts) if drifts else None} if spread_ else None


def _markdown(report: dict[str, Any]) -> str:
    steady = report["steady"]
    lines = [f"# File operations of `{report['run']}`", "", *(f"* {sentence}" for sentence in report["verdict"]), ""]
    trainers = sum(p["trainer"] for p in report["processes"])
    lines += [
        f"{len(report['processes'])} processes, {trainers} of them train; the steady half is "
        f"{steady['seconds']:.1f} s and {steady['steps']} steps, summed over ranks.",
        "",
    ]
    if steady["steps"]:
        lines += _rows("Steady half, a rank and step", steady["per_rank_and_step"])
    lines += _rows("Steady half, a second, all processes", steady["per_second"])
    if report["strace"]:
        exact = report["strace"]["per_rank_and_step"] or report["strace"]["per_second"]
        unit = "a rank and step" if report["strace"]["per_rank_and_step"] else "a second"
        lines += _rows(
            f"The same by strace, {unit}, exact", exact, ("opens", "missing", "stats", "listings", "reads", "bytes")
        )
    lines += _rows("From the first interval to the last", report["counts"])
    lines += [
        "## Places active in the steady half",
        "",
        "| count | what | cause | path | from |",
        "|---|---|---|---|---|",
    ]
    for site in report["sites"][:20]:
        path = " ".join(site["path"].replace("|", "\\|").splitlines())
        lines.append(
            f"| {site['count']} | {site['operation']} | {site['cause']} | `{path}` | {site['stack'].replace('|', '')} |"
        )
    lines += ["", "## Triton", "", "| | whole run | steady half |", "|---|---|---|"]
    for kind in ("tunes", "benchmarks", "compiles", "loads"):
        lines.append(f"| {kind} | {sum(report[kind].values())} | {sum(steady[kind].values())} |")
    lines.append(f"| launches | {report['launches']} | |")
    for kernel, gap in report["gaps"].items():
        if gap["steady"]:
            lines.append(
                f"| host gap before `{kernel}`, us, median | {gap['all']['median']} | {gap['steady']['median']} |"
            )
    if report["step"]:
        ms = report["step"]["milliseconds"]
        drift = report["step"]["drift"]
        lines.append(f"| milliseconds a step, median | | {ms['median']} |")
        lines.append(
            f"| drift of the step time inside the steady half | | {'' if drift is None else f'{drift:+.1%}'} |"
        )
    lines += ["", "## Over time", ""]
    if report["plots"] is None:
        lines.append("No plots: matplotlib is not installed (`pip install 'fla-safe[plots]'`).")
    else:
        lines += [f"![{name}]({name})" for name in report["plots"]]
    return "\n".join([*lines, "", "## How it was counted", "", _LIMITS, ""])


def _rows(title: str, counts: Table, columns: tuple[str, ...] = _COLUMNS) -> list[str]:
    used = [c for c in columns if any(ops.get(c) for ops in counts.values())]
    lines = [f"## {title}", "", f"| cause | {' | '.join(used)} |", "|---|" + "---|" * len(used)]
    for cause in CAUSES:
        if cause in counts:
            cells = [f"{counts[cause].get(c, 0):.10g}" for c in used]
            lines.append(f"| {cause} | {' | '.join(cells)} |")
    return [*lines, ""] if used else [f"## {title}", "", "Nothing.", ""]
