"""Puts the cells of the matrix side by side: report.json, report.md, plots, and the cause in words."""

import json
from pathlib import Path
from typing import Any

from fla_safe.trace.causes import NORMAL
from fla_safe.trace.merge import TraceError, read_run
from fla_safe.trace.report import write_report
from fla_safe.trace.words import touches

__all__ = ["read_cell", "write"]

PROBING = "FLA backend probing"


def read_cell(cell: Any, folder: Path, exact: Path | None, status: str, error: str) -> dict[str, Any]:
    """Numbers of one cell; also of one that failed, as far as it came."""
    result: dict[str, Any] = {"fla": cell.fla, "tilelang": cell.tilelang, "stack": cell.stack, "name": cell.name}
    result |= {"status": status, "error": error, "folder": folder.name}
    try:
        report = write_report(folder)
    except TraceError as missing:
        return {**result, "error": error or str(missing)}
    if status != "trained":
        return result
    steady = report["steady"]
    rates = steady["per_rank_and_step"]
    result |= {
        "verdict": report["verdict"],
        "per_step": rates,
        "per_second": steady["per_second"],
        "counts": steady["counts"],
        "sustained": steady["sustained"],
        "io": steady["io"],
        "steps": steady["steps"],
        "abnormal": sum(touches(ops) for cause, ops in steady["counts"].items() if cause not in NORMAL),
        "gaps": report["gaps"],
        "step": report["step"],
        "tunes": [sum(report["tunes"].values()), sum(steady["tunes"].values())],
        "compiles": [sum(report["compiles"].values()), sum(steady["compiles"].values())],
        "loads": [sum(report["loads"].values()), sum(steady["loads"].values())],
        "sites": [s for s in report["sites"] if s["cause"] not in NORMAL],
        "strace": None,
        "over_time": _over_time(folder),
    }
    if exact is not None:
        counted = write_report(exact)["strace"]
        result["strace"] = counted and counted["per_rank_and_step"]
    return result


def _over_time(folder: Path) -> list[dict[str, Any]]:
    """One entry a finished step of the first trainer: operations by cause, tunes and compilations so far."""
    process = read_run(folder).trainers[0]
    series, sums, step = [], {"tunes": 0, "compiles": 0, "loads": 0}, 0
    ops: dict[str, float] = {}
    for interval in process.intervals:
        for cause, operations in interval["ops"].items():
            ops[cause] = ops.get(cause, 0) + touches(operations)
        for kind in sums:
            sums[kind] += sum(interval.get(kind, {}).values())
        if interval["step"] > step:
            step = interval["step"]
            series.append({"step": step, "ops": ops, **sums})
            ops = {}
    return series


def write(out: Path, cells: list[dict[str, Any]], facts: dict[str, Any]) -> dict[str, Any]:
    """Write report.json, report.md and the plots, and return the report."""
    trained = [c for c in cells if c["status"] == "trained"]
    ours = [c for c in cells if c["stack"] == "fla_safe"]
    report: dict[str, Any] = {
        **facts,
        "ours_is_clean": all(c["status"] == "trained" and not _dirty(c) for c in ours),
        "verdict": _verdict(cells),
        "cells": cells,
    }
    try:
        import matrix_plots

        report["plots"] = matrix_plots.draw(out, trained)
    except ImportError:
        report["plots"] = None
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "report.md").write_text(_markdown(report))
    return report


def _dirty(cell: dict[str, Any]) -> bool:
    return bool(cell["abnormal"] or cell["tunes"][1] or cell["compiles"][1] or not cell["steps"])


def _verdict(cells: list[dict[str, Any]]) -> list[str]:
    said = []
    stock = [c for c in cells if c["stack"] == "stock"]
    ours = [c for c in cells if c["stack"] == "fla_safe"]
    probing = [c for c in stock if c["status"] == "trained" and PROBING in c["sustained"]]
    for c in sorted(probing, key=lambda c: -touches(c["per_step"][PROBING]))[:1]:
        said.append(f"Stock FLA {c['fla']} with TileLang {_STATE[c['tilelang']]}: {c['verdict'][0]}")
    for c in probing:
        ops = c["per_step"][PROBING]
        said.append(
            f"FLA {c['fla']}, TileLang {_STATE[c['tilelang']]}, stock: every step asks for TileLang again "
            f"({ops.get('opens', 0):.3g} opens, {ops.get('stats', 0):.3g} stats, "
            f"{ops.get('bytes', 0) / 1024:.0f} KiB of files opened)."
        )
    quiet = [c for c in stock if c["status"] == "trained" and c not in probing]
    if quiet:
        cells_ = ", ".join(f"{c['fla']} with TileLang {_STATE[c['tilelang']]}" for c in quiet)
        said.append(f"Stock without repeated file operations other than data loading: {cells_}.")
    for c in cells:
        if c["status"] != "trained":
            said.append(f"FLA {c['fla']}, TileLang {_STATE[c['tilelang']]}, {c['stack']} did not train: {c['error']}")
    tuned = [c for c in stock if c["status"] == "trained" and c["tunes"][1]]
    if tuned:
        cells_ = ", ".join(f"{c['fla']}/{c['tilelang']} {c['tunes'][1]}" for c in tuned)
        said.append(f"Stock still tuned in its steady half (rounds): {cells_}.")
    dirty = [c for c in ours if c["status"] == "trained" and _dirty(c)]
    if dirty:
        said.append("fla_safe was NOT clean in: " + ", ".join(c["name"] for c in dirty) + ".")
    elif ours and all(c["status"] == "trained" for c in ours):
        said.append("fla_safe: no file operation but data loading, no tune and no compilation in any steady half.")
    return said


_STATE = {"absent": "absent", "half": "half-installed", "working": "working"}


def _markdown(report: dict[str, Any]) -> str:
    lines = ["# File operations in training: FLA x TileLang x {stock, fla_safe}", ""]
    lines += [f"* {sentence}" for sentence in report["verdict"]]
    versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    lines += [
        "",
        f"`{report['command']}`, {report['date']}, {report['device']}, {report['cores']} cores (load at the end "
        f"{report['load']}), Python {report['python']}, {versions}. {report['steps']} steps, {report['ranks']} rank(s)"
        f", {report['workload']}; half-installed TileLang: {report['half_installed']}, "
        f"{'with' if report['bytecode'] else 'without'} .pyc files.",
        "",
        "## Steady half, a rank and step",
        "",
        "Images / everything else, as Python sees it. Gap: host time before `chunk_gated_delta_rule_fwd_h`'s kernel.",
        "",
        "| FLA | TileLang | | images opened | other opens | other stats | other KiB opened | gap us, median | 90 % | "
        "step ms | drift | tunes, all / steady | compiles |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for c in report["cells"]:
        head = f"| {c['fla']} | {_STATE[c['tilelang']]} | {c['stack']} |"
        if c["status"] != "trained":
            lines.append(f"{head} did not train: {c['error'][:90]} |" + " |" * 9)
            continue
        others = [ops for cause, ops in c["per_step"].items() if cause not in NORMAL]
        total = {k: sum(ops.get(k, 0) for ops in others) for k in ("opens", "stats", "bytes")}
        images = c["per_step"].get("image loading", {}).get("opens", 0)
        gap = next((g["steady"] for g in c["gaps"].values() if g["steady"]), None) or {"median": 0, "p90": 0}
        drift = c["step"]["drift"]
        lines.append(
            f"{head} {images:.3g} | {total['opens']:.3g} | {total['stats']:.3g} | {total['bytes'] / 1024:.0f} | "
            f"{gap['median']:.0f} | {gap['p90']:.0f} | {c['step']['milliseconds']['median']:.1f} | "
            f"{'' if drift is None else f'{drift:+.0%}'} | {c['tunes'][0]} / {c['tunes'][1]} | "
            f"{c['compiles'][0]} / {c['compiles'][1]} |"
        )
    lines += ["", *_exact(report), *_places(report)]
    if report["plots"] is None:
        lines.append("No plots: matplotlib is not installed.")
    else:
        lines += [f"![{name}]({name})" for name in report["plots"]]
    lines += ["", "Each cell's folder has its own report.md with all causes, places and the limits of counting.", ""]
    return "\n".join(lines)


def _exact(report: dict[str, Any]) -> list[str]:
    cells = [c for c in report["cells"] if c.get("strace")]
    if not cells:
        return ["No exact counts: strace is not installed, may not trace here, or was not asked for.", ""]
    lines = [
        "## By strace, a rank and step",
        "",
        "A second, shorter run of each cell on the Triton cache of the first: "
        "a kernel class that this process meets for the first time is read from there.",
    ]
    lines += ["", "| FLA | TileLang | | cause | opens | missing | stats | reads | KiB read |", "|" + "---|" * 9]
    for c in cells:
        for cause, ops in c["strace"].items():
            lines.append(
                f"| {c['fla']} | {_STATE[c['tilelang']]} | {c['stack']} | {cause} | {ops.get('opens', 0):.4g} | "
                f"{ops.get('missing', 0):.4g} | {ops.get('stats', 0):.4g} | {ops.get('reads', 0):.4g} | "
                f"{ops.get('bytes', 0) / 1024:.4g} |"
            )
    return [*lines, ""]


def _places(report: dict[str, Any]) -> list[str]:
    cells = [c for c in report["cells"] if c.get("sites")]
    if not cells:
        return []
    worst = max(cells, key=lambda c: c["abnormal"])
    order = ("opens", "searches", "listings", "changes", "programs", "stats")
    merged: dict[tuple[str, str], int] = {}
    for site in worst["sites"]:
        key = (site["operation"], site["path"])
        merged[key] = merged.get(key, 0) + site["count"]
    lines = [f"## Where from: FLA {worst['fla']}, TileLang {_STATE[worst['tilelang']]}, {worst['stack']}", ""]
    lines += [f"Most often from `{worst['sites'][0]['stack']}`.", "", "| count | what | path |", "|---|---|---|"]
    for operation, path in sorted(merged, key=lambda key: (order.index(key[0]), -merged[key]))[:20]:
        lines.append(f"| {merged[operation, path]} | {operation} | `{path}` |")
    return [*lines, ""]
