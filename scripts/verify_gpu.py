"""Runs on a machine with GPUs what the docs want to know from one: tests, tables, benchmarks, training, in this order.

    python scripts/verify_gpu.py out                         every step that the GPUs allow, but those that are done
    python scripts/verify_gpu.py out --seconds 1500          starts no step that could run past this time
    python scripts/verify_gpu.py out --step gpu-tests --step layer
    python scripts/verify_gpu.py --list

Steps run one after the other: two jobs on one machine measure each other. Each has a log, `out/STEP.log`, and a limit;
`out/evidence.json` says what ran on what, with which result, for cards and docs. The steps: verify_gpu.toml.
"""

import json
import os
import platform
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from fla_safe.installed import installed

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Step:
    """One command: `{out}` is a path for what it writes, `{all}` the folder of all steps.

    Attributes:
        gpus: fewest GPUs.
        limit: seconds until it is ended.
        shows: what its success shows.
    """

    name: str
    gpus: int
    limit: int
    shows: str
    command: str


def read_steps() -> dict[str, Step]:
    """The steps of verify_gpu.toml by name, in order."""
    text = Path(__file__).with_suffix(".toml").read_text()
    return {name: Step(name, **fields) for name, fields in tomllib.loads(text).items()}


type Status = Literal["ok", "failed", "out of time", "not run"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a step."""

    status: Status
    seconds: float = 0.0
    why: str = ""


def run(step: Step, out: Path, limit: float) -> Outcome:
    """Run one step with its output in a log; at its limit its whole process group is ended."""
    command = step.command.format(out=out / step.name, all=out)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    began = time.monotonic()
    with (out / f"{step.name}.log").open("w") as log:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=ROOT,
            env={**os.environ, "PATH": path},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except BaseException as error:  # an interrupt must not leave a training behind
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return Outcome("out of time", time.monotonic() - began, f"limit {limit:.0f} s")
    seconds = time.monotonic() - began
    return Outcome("failed", seconds, f"status {status}") if status else Outcome("ok", seconds)


def verify(steps: list[Step], out: Path, gpus: int, seconds: float) -> dict[str, Outcome]:
    """Run all steps that fit; write `evidence.json` after each."""
    evidence = out / "evidence.json"
    before = json.loads(evidence.read_text())["steps"] if evidence.is_file() else {}
    outcomes = {name: Outcome(**found) for name, found in before.items()}
    end = time.monotonic() + seconds
    for step in steps:
        if outcomes.get(step.name, Outcome("not run")).status == "ok":
            continue
        if step.gpus > gpus:
            outcomes[step.name] = Outcome("not run", why=f"needs {step.gpus} GPUs, {gpus} found")
        elif step.limit > end - time.monotonic():
            outcomes[step.name] = Outcome("not run", why="no time left for it")
        else:
            print(f"== {step.name}: {step.shows}", flush=True)
            outcomes[step.name] = run(step, out, step.limit)
            print(_tail(out / f"{step.name}.log"), flush=True)
        found = {name: asdict(outcome) for name, outcome in outcomes.items()}
        evidence.write_text(json.dumps({"machine": machine(), "steps": found}, indent=1) + "\n")
    return outcomes


def machine() -> dict[str, Any]:
    """What a number needs beside it."""
    import torch

    found = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "gpus": found,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "revision": revision.stdout.strip() or None,
        "versions": installed(),
    }


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(f"   {line[:180]}" for line in log.read_text(errors="replace").splitlines()[-lines:])


def main(
    out: Annotated[Path | None, typer.Argument(help="Folder for logs and results.")] = None,
    step: Annotated[list[str] | None, typer.Option(help="Only these; see --list.")] = None,
    seconds: Annotated[float, typer.Option(help="Start no step whose limit goes past this.")] = 1e9,
    show: Annotated[bool, typer.Option("--list", help="Print the steps and end.")] = False,
) -> None:
    """Collect evidence on this machine's GPUs; exit status 1 if a step failed."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    known = read_steps()
    unknown = set(step or ()) - set(known)
    if unknown or (out is None and not show):
        problem = f"unknown steps {sorted(unknown)}; there are {', '.join(known)}" if unknown else "name a folder"
        print(f"verify_gpu: {problem}", file=sys.stderr)
        raise typer.Exit(2)
    if show:
        table = Table("step", "GPUs", "limit, s", "shows")
        for each in known.values():
            table.add_row(each.name, str(each.gpus), str(each.limit), each.shows)
        console.print(table)
        return
    import torch

    assert out is not None
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    outcomes = verify([known[name] for name in step] if step else list(known.values()), out, gpus, seconds)
    table = Table("step", "status", "seconds", "")
    for name, outcome in outcomes.items():
        table.add_row(name, outcome.status, f"{outcome.seconds:.0f}", outcome.why)
    console.print(table)
    if any(outcome.status in ("failed", "out of time") for outcome in outcomes.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
