"""The `fla-safe` command."""

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fla_safe.console import named_errors
from fla_safe.diagnosis.command import replay
from fla_safe.preparation.command import warmup
from fla_safe.trace.command import report, trace

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Gated DeltaNet training that never stalls.")
bundles = typer.Typer(no_args_is_help=True, help="Bundles: a decision table with its compiled kernels, in one file.")
app.add_typer(bundles, name="bundle")
app.command()(replay)
app.command()(trace)
app.command()(report)
app.command()(warmup)

COLOURS = {"ok": "green", "warn": "yellow", "error": "bold red"}

BundlePath = Annotated[Path, typer.Argument(help="The bundle.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Expect = Annotated[str | None, typer.Option(help="Refuse any bundle but the one with this id (12 or more digits).")]


class Policy(Enum):
    """What to do where two bundles decide differently."""

    refuse = "refuse"
    keep = "keep"
    replace = "replace"
    fastest = "fastest"


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Name each known trap of this environment. Status 0: all well, 1: warnings, 2: errors."""
    from fla_safe.doctor.checks import CHECKS
    from fla_safe.doctor.facts import Environment
    from fla_safe.doctor.report import examine

    report = examine(Environment(), CHECKS)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=1))
    else:
        console = Console(soft_wrap=True)
        for name, finding, milliseconds in report.findings:
            line = Text(f"{finding.level:>5}", style=COLOURS[finding.level])
            line.append(f"  {name:<14} {finding.seen}", style="default")
            line.append(f"  ({milliseconds:.0f} ms)", style="dim")
            console.print(line)
            if finding.level != "ok":
                console.print(Text(f"{'':22}expected: {finding.expected}\n{'':22}to do: {finding.remedy}"))
    raise typer.Exit(report.status)


@bundles.command()
def pack(
    out: BundlePath,
    table: Annotated[Path, typer.Option(help="Decision table (JSON).", show_default=False)],
    cache: Annotated[Path | None, typer.Option(help="A rank's artifact directory, or an unpacked bundle.")] = None,
) -> None:
    """Write a bundle from a decision table and, if given, the compiled kernels of a rank's directory."""
    from fla_safe.runtime.artifacts.bundle import BundleError
    from fla_safe.runtime.artifacts.bundle import pack as write
    from fla_safe.runtime.artifacts.groups import read_groups
    from fla_safe.runtime.tuning.decisions import DecisionTable

    with named_errors():
        decisions = DecisionTable.load(table)
        # As a rank's store has them, and as `unpack` writes them.
        places = [] if cache is None else [cache / part for part in ("entries", "artifacts") if (cache / part).is_dir()]
        if cache is not None and not places:
            raise BundleError(
                f"{cache} holds no kernels",
                "a directory with entries/ or artifacts/",
                "name a rank's directory or an unpacked bundle",
            )
        groups = [group for place in places for group in read_groups(place, decisions.stamp.triton)]
        made = write(out, decisions, groups)
    typer.echo(f"{out}: {len(made.table)} decisions, {len(made.groups)} kernels, id {made.id}")


@bundles.command()
def unpack(bundle: BundlePath, directory: Path, expect: Expect = None) -> None:
    """Write a verified bundle's contents below a new or empty directory."""
    from fla_safe.runtime.artifacts.bundle import unpack as write

    with named_errors():
        found = write(bundle, directory, expect_id=expect)
    typer.echo(f"{directory}: {len(found.table)} decisions, {len(found.groups)} kernels")


@bundles.command()
def verify(
    bundle: BundlePath,
    expect: Expect = None,
    here: Annotated[bool, typer.Option(help="Also check that this machine can use it.")] = True,
) -> None:
    """Check every hash of a bundle and whether this machine's GPU, Triton and FLA can use it."""
    from fla_safe.runtime.artifacts.bundle import verify as check
    from fla_safe.runtime.tuning.decisions import Stamp

    with named_errors():
        found = check(bundle, Stamp.current() if here else None, expect_id=expect)
    typer.echo(f"{bundle}: whole{' and usable here' if here else ''}, id {found.id}")


@bundles.command()
def show(
    bundle: BundlePath,
    as_json: AsJson = False,
    decisions: Annotated[bool, typer.Option("--decisions", help="Print the whole decision table as JSON.")] = False,
) -> None:
    """Say what is in a bundle."""
    from fla_safe.runtime.artifacts.bundle import read

    with named_errors():
        found = read(bundle)
    if decisions:
        typer.echo(found.table.to_json(), nl=False)
        return
    facts = found.describe()
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    rows = Table(show_header=False, box=None)
    for name, value in facts.items():
        lines = (
            value
            if isinstance(value, list)
            else [f"{k} {v}" for k, v in value.items()]
            if isinstance(value, dict)
            else [value]
        )
        rows.add_row(name, "\n".join(map(str, lines)))
    Console(soft_wrap=True).print(rows)


@bundles.command()
def merge(
    out: BundlePath,
    sources: Annotated[list[Path], typer.Argument(help="Bundles to merge; the first is 'ours'.", show_default=False)],
    policy: Annotated[Policy, typer.Option(help="What to do where they decide differently.")] = Policy.refuse,
) -> None:
    """Write one bundle with the decisions and kernels of several."""
    from fla_safe.runtime.artifacts.bundle import merge as write

    with named_errors():
        made, conflicts = write(out, sources, policy.value)
    for conflict in conflicts:
        typer.echo(f"{conflict.key}: kept {conflict.kept.decision}")
    typer.echo(f"{out}: {len(made.table)} decisions, {len(made.groups)} kernels, id {made.id}")


if __name__ == "__main__":
    app()
