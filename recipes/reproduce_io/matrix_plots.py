"""Plots of the matrix: operations a step by cause, host gap, and both stacks over time."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from fla_safe.trace.causes import CAUSES
from fla_safe.trace.plots import COLOURS
from fla_safe.trace.words import touches

__all__ = ["draw"]

STOCK, OURS = "#d55e00", "#0072b2"


def draw(out: Path, cells: list[dict[str, Any]]) -> list[str]:
    """Write the PNGs and return their names."""
    names = []
    for name, plot in (
        ("operations.png", _operations),
        ("gap.png", _gap),
        ("over_time.png", _over_time),
        ("tunes.png", _tunes),
    ):
        figure = plot(cells)
        if figure is not None:
            figure.savefig(out / name, dpi=120, bbox_inches="tight")
            plt.close(figure)
            names.append(name)
    return names


def _label(cell: dict[str, Any]) -> str:
    return f"{cell['fla']}  TileLang {cell['tilelang']}  {cell['stack']}"


def _rows(cells: list[dict[str, Any]], title: str, x: str) -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=(9, 0.32 * len(cells) + 1.4))
    axes.set_yticks(range(len(cells)), [_label(c) for c in cells], fontsize=8, family="monospace")
    axes.invert_yaxis()
    axes.set(title=title, xlabel=x)
    axes.grid(alpha=0.25)
    return figure, axes


def _operations(cells: list[dict[str, Any]]) -> Any:
    if not cells:
        return None
    figure, axes = _rows(
        cells, "File operations in the steady half, by cause", "operations a rank and step (0 where no dot)"
    )
    for cause in CAUSES:
        dots = [(touches(c["per_step"][cause]), i) for i, c in enumerate(cells) if cause in c["per_step"]]
        if dots:
            axes.scatter(*zip(*dots, strict=True), color=COLOURS[cause], label=cause, s=36)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(left=0)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def _gap(cells: list[dict[str, Any]]) -> Any:
    found = [(c, g["steady"]) for c in cells for g in list(c["gaps"].values())[:1] if g["steady"]]
    if not found:
        return None
    figure, axes = _rows(
        [c for c, _ in found], "Host gap before chunk_gated_delta_rule_fwd_h", "us: median, 90th percentile"
    )
    for i, (cell, gap) in enumerate(found):
        colour = STOCK if cell["stack"] == "stock" else OURS
        axes.plot([gap["median"], gap["p90"]], [i, i], color=colour, linewidth=2)
        axes.scatter([gap["median"]], [i], color=colour, s=36)
    axes.set_xscale("log")
    return figure


def _over_time(cells: list[dict[str, Any]]) -> Any:
    """The cell in which stock is worst, beside ours."""
    stock = [c for c in cells if c["stack"] == "stock"]
    if not stock:
        return None
    worst = max(stock, key=lambda c: c["abnormal"])
    pair = [worst, *(c for c in cells if c["stack"] == "fla_safe" and _same(c, worst))]
    figure, all_axes = plt.subplots(1, len(pair), figsize=(5.2 * len(pair), 3.6), sharey=True, squeeze=False)
    for axes, cell in zip(all_axes[0], pair, strict=True):
        for cause in CAUSES:
            y = [entry["ops"].get(cause, 0) for entry in cell["over_time"]]
            if any(y):
                axes.plot([e["step"] for e in cell["over_time"]], y, color=COLOURS[cause], label=cause, linewidth=1.5)
        axes.set(title=_label(cell), xlabel="step", yscale="symlog")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    shown: dict[str, Any] = {}
    for axes in all_axes[0]:
        shown |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    all_axes[0][-1].legend(shown.values(), shown, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    all_axes[0][0].set_ylabel("operations in the step")
    return figure


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return (a["fla"], a["tilelang"]) == (b["fla"], b["tilelang"])


def _tunes(cells: list[dict[str, Any]]) -> Any:
    chosen = [c for c in cells if c["tilelang"] == "absent"] or cells
    if not chosen:
        return None
    figure, axes = plt.subplots(figsize=(9, 3.4))
    for cell, dashes in zip(chosen, ("-", "-", "--", "--", ":", ":"), strict=False):
        colour = STOCK if cell["stack"] == "stock" else OURS
        series = cell["over_time"]
        axes.step(
            [e["step"] for e in series],
            [e["tunes"] for e in series],
            where="post",
            color=colour,
            linestyle=dashes,
            label=f"{_label(cell)}: {cell['compiles'][0]} compilations",
        )
    axes.set(xlabel="step", ylabel="rounds of tuning so far", title="Tuning over time")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    return figure
