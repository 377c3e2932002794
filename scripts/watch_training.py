"""Runs a training command with its output in a log, and shows its progress from ms-swift's logging.jsonl."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["find_one", "first_error", "records", "steps", "watch"]


def find_one(folder: Path, name: str) -> Path | None:
    """The newest file of that name below the folder (ms-swift may add a version folder), or None."""
    found = sorted(folder.rglob(name), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
    return found[-1] if found else None


def records(path: Path | None) -> Iterator[dict[str, Any]]:
    """The lines of a logging.jsonl."""
    if path is None or not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue  # being written


def steps(path: Path | None) -> Iterator[dict[str, Any]]:
    """Those lines that belong to training steps, with `step` and `of` as numbers."""
    for entry in records(path):
        if "loss" in entry and "/" in str(entry.get("iteration", "")):
            step, of = str(entry["iteration"]).split("/")
            yield {**entry, "step": int(step), "of": int(of)}


def first_error(log: Path) -> str:
    """The line of a log that says best why the run failed: the first exception that is not a consequence of another."""
    consequences = ("ChildFailedError", "Connection closed by peer", "Connection reset by peer", "SIGTERM")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    for line in lines:
        text = line.split("]: ", 1)[-1] if line.startswith("[rank") else line
        head = text.split(":", 1)[0]
        if head.endswith(("Error", "Exception")) and " " not in head and not any(c in text for c in consequences):
            return text.strip()
    return lines[-1].strip() if lines else "no output"


def watch(folder: Path, log: Path, command: list[str]) -> int:
    """Run the command and return its exit status; on a terminal a live bar is shown, elsewhere a line a step."""
    console = Console()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            if console.is_terminal:
                _live(console, folder, process)
            else:
                _lines(folder, process)
        except BaseException:
            process.terminate()  # torchrun passes it on to its workers
            process.wait(timeout=60)
            raise
    return process.returncode


def _live(console: Console, folder: Path, process: subprocess.Popen[bytes]) -> None:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=None)
        while process.poll() is None:
            entries = list(steps(find_one(folder, "logging.jsonl")))
            if entries:
                last = entries[-1]
                text = f"loss {last['loss']:.3f}"
                progress.update(task, description=text, completed=last["step"], total=last["of"])
            time.sleep(0.5)


def _lines(folder: Path, process: subprocess.Popen[bytes]) -> None:
    started, spoke, shown = time.monotonic(), time.monotonic(), 0
    while process.poll() is None:
        for entry in list(steps(find_one(folder, "logging.jsonl")))[shown:]:
            shown += 1
            spoke = time.monotonic()
            print(f"   step {entry['step']:>3}/{entry['of']}  loss {entry['loss']:.4f}", flush=True)
        if time.monotonic() - spoke > 15:
            spoke = time.monotonic()
            print(f"   {spoke - started:4.0f} s  {'saving' if shown else 'starting'}", flush=True)
        time.sleep(0.5)


def _main(
    folder: Annotated[Path, typer.Argument(help="The run's output folder.")],
    log: Annotated[Path, typer.Argument(help="File for the command's output.")],
    command: Annotated[list[str], typer.Argument(help="The command, after --.")],
) -> None:
    """Run a training command and show its progress."""
    try:
        status = watch(folder, log, command)
    except OSError as error:
        print(f"fla-safe: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    if status:
        print(f"fla-safe: training failed with status {status}: {first_error(log)} (log: {log})", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(_main)
