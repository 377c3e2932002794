"""Prints a short table about a finished run, and fails if its loss did not fall."""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from watch_training import find_one, steps

__all__ = ["Summary", "SummaryError", "check", "read"]

MINIMUM_STEPS = 20


class SummaryError(RuntimeError):
    """The run did not do what a quick start must show."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What is known of a run.

    Attributes:
        losses: one a logged step.
        report: the job's gdn_report.json, empty if the run wrote none (stock layers).
        checkpoint: the newest folder with weights.
    """

    losses: tuple[float, ...]
    report: dict[str, Any]
    report_path: Path | None
    checkpoint: Path | None


def read(folder: Path) -> Summary:
    """Collect a run's losses, report and checkpoint from its output folder."""
    losses = tuple(float(entry["loss"]) for entry in steps(find_one(folder, "logging.jsonl")))
    report_path = find_one(folder, "gdn_report.json")
    report = json.loads(report_path.read_text()) if report_path else {}
    weights = find_one(folder, "model.safetensors") or find_one(folder, "model.safetensors.index.json")
    return Summary(losses, report, report_path, weights.parent if weights else None)


def check(summary: Summary, minimum_steps: int = MINIMUM_STEPS) -> None:
    """Raise SummaryError unless the run made enough steps, its loss is finite and fell, and the flag's kernel ran.

    A quarter of the steps is averaged at each end, because single micro-batches differ.
    """
    losses = summary.losses
    if len(losses) < minimum_steps:
        raise SummaryError(f"{len(losses)} steps were logged, expected at least {minimum_steps}")
    if not all(math.isfinite(loss) for loss in losses):
        raise SummaryError(f"a loss is not finite: {losses}")
    quarter = max(1, len(losses) // 4)
    first, last = sum(losses[:quarter]) / quarter, sum(losses[-quarter:]) / quarter
    if not last < first:
        raise SummaryError(
            f"the loss did not fall: {first:.4f} over the first {quarter} steps, {last:.4f} over the last"
        )
    if summary.report.get("gdn_impl", "default") != "default" and not summary.report.get("kernel_calls_per_step"):
        raise SummaryError("the report counts no GDN call, although --gdn_impl was given")


def _main(
    folder: Annotated[Path, typer.Argument(help="The run's output folder.")],
    minimum_steps: Annotated[int, typer.Option(help="Fewer logged steps are a failure.")] = MINIMUM_STEPS,
) -> None:
    """Print what a run did; exit with 1 if its loss did not fall."""
    summary = read(folder)
    report, losses = summary.report, summary.losses
    table = Table(show_header=False, title="run")
    rows = {
        "steps": str(len(losses)),
        "first loss": f"{losses[0]:.4f}" if losses else "-",
        "last loss": f"{losses[-1]:.4f}" if losses else "-",
        "GDN layers": str(report.get("gdn_layers", "-")),
        "GDN calls a step": str(report.get("kernel_calls_per_step", "-")),
        "implementation, kernel": f"{report.get('gdn_impl', 'default')}, {report.get('kernel', 'not reported')}",
        "checkpoint": str(summary.checkpoint or "-"),
        "report": str(summary.report_path or "-"),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    # Wide, so that paths can be copied from a log.
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    try:
        check(summary, minimum_steps)
    except SummaryError as error:
        print(f"fla-safe: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(_main)
