"""`fla-safe replay`: a recorded GDN call again, as a table."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fla_safe.diagnosis.record import Record
    from fla_safe.diagnosis.replay import Replay

__all__ = ["replay"]


def replay(
    file: Annotated[Path, typer.Argument(help="What --gdn_check wrote.", show_default=False)],
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu; default: a GPU if there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a recorded GDN call again beside float64. Status 0: finite and right, 1: reproduced, 2: not a good file."""
    from fla_safe.console import named_errors

    with named_errors():
        from fla_safe.diagnosis.record import read
        from fla_safe.diagnosis.replay import replay as run

        record = read(file)
        result = run(record, _device(device))
    if as_json:
        typer.echo(json.dumps({"file": str(file), "finding": dict(record.finding)} | result.as_dict(), indent=1))
    else:
        _show(record, result)
    raise typer.Exit(int(result.reproduced))


def _device(name: str | None) -> str | None:
    import torch

    from fla_safe.settings import SettingsError

    if name is None:
        return None
    try:
        wanted = torch.device(name)
        if wanted.type == "cpu" or (wanted.type == "cuda" and (wanted.index or 0) < torch.cuda.device_count()):
            return name
        seen = f"--device {name}, which is not here"
    except RuntimeError:
        seen = f"--device {name}"
    raise SettingsError(seen, "cpu, or cuda on a machine with that GPU", "use --device cpu")


def _show(record: "Record", result: "Replay") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 160  # a log has no width of its own
    found = record.finding
    if found:
        step = "no training step" if found.get("step") is None else f"step {found['step']}"
        console.print(
            f"in the job: {found.get('tensor')}, {found.get('stage')}, layer {found.get('number')} "
            f"({found.get('layer')}), {found.get('direction')} of micro-batch {found.get('micro_batch')}, {step}, "
            f"{found.get('where')}"
        )
        console.print(f"            {found.get('cause')}")
    console.print(f"here:       kernel {result.kernel} on {result.device}, compared with {result.reference}")
    if result.note:
        console.print(f"            {result.note}")
    table = Table("tensor", "from", "finite", "float64", "max error", "limit", "first bad value", box=None)
    for row in result.rows:
        finite = {True: "yes", False: "no", None: ""}
        error, limit = ("" if x is None else f"{x:.1e}" for x in (row.error, row.limit))
        where = "" if row.place is None else str(row.place)
        style = None if row.good else "bold red"
        table.add_row(
            row.name, row.source, finite[row.finite], finite[row.reference_finite], error, limit, where, style=style
        )
    console.print(table)
    console.print(result.verdict)
