"""`fla-safe trace` and `fla-safe report`."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from fla_safe.trace.merge import TraceError

__all__ = ["report", "run_traced", "trace"]

KERNELS = ("chunk_gated_delta_rule_fwd_h", "chunk_gated_delta_rule_fwd_kernel_h")
"""What profilers show as the place of the gap: FLA's function, and the kernel in it."""

_STRACE_STARTS_S = 5.0


def run_traced(command: Sequence[str], folder: Path, *, kernels: Sequence[str] = KERNELS, exact: bool = False) -> int:
    """Run a command with the recorder in all its Python processes, and return its status.

    Args:
        folder: a new or empty folder for the trace.
        kernels: names (or parts of names) of Triton kernels before which the host gap is measured.
        exact: under strace.

    Raises:
        TraceError: the folder holds something or cannot be made, strace or the command cannot run, or the environment
            keeps the recorder out.
    """
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        raise TraceError(
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0", "PyTorch loads extensions at `import torch`", "unset the variable"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        filled = any(folder.iterdir())
    except OSError as error:
        raise TraceError(
            f"{folder}: {error.strerror}", "a folder that can be made and written to", "name another with --out"
        ) from error
    if filled:
        raise TraceError(
            f"{folder} is not empty", "a new folder: two runs would be added up", "name another with --out"
        )
    prefix: list[str] = []
    if exact:
        from fla_safe.trace import strace

        found = strace.command(folder)
        if found is None:
            raise TraceError("strace is not installed, or may not trace here", "strace", "install it, or drop --strace")
        prefix = found
    environment = {**os.environ, "FLA_SAFE_TRACE": str(folder.resolve()), "FLA_SAFE_TRACE_KERNELS": ",".join(kernels)}
    # A terminal sends Ctrl-C to the command as well; a scheduler sends SIGTERM to this process alone.
    terminator = _Terminator(exact)
    before = signal.signal(signal.SIGTERM, terminator)
    try:
        try:
            child = subprocess.Popen([*prefix, *command], env=environment)
        except OSError as error:
            raise TraceError(f"{command[0]}: {error.strerror}", "a command", "check its name") from error
        terminator.started(child.pid)
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


class _Terminator:
    """Signal handler that asks the command to end, as soon as there is one.

    Strace ignores that while it writes to files: then its child is asked, and strace ends with it.
    """

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self._child = 0
        self._asked = False

    def __call__(self, number: int, frame: object) -> None:
        self._asked = True
        if self._child:
            self._ask()

    def started(self, child: int) -> None:
        """The command, or strace, runs as process `child`."""
        self._child = child
        if self._asked:
            self._ask()

    def _ask(self) -> None:
        for command in self._commands():
            with suppress(ProcessLookupError):
                os.kill(command, signal.SIGTERM)

    def _commands(self) -> list[int]:
        me = Path(f"/proc/{self._child}")
        children = me / "task" / me.name / "children"
        if not self._exact or not children.exists():
            return [self._child]
        # Children that are strace itself only try what the kernel can do, or have not become the command yet.
        deadline, pids = time.monotonic() + _STRACE_STARTS_S, []
        while time.monotonic() < deadline:
            with suppress(OSError):
                pids = children.read_text().split()
                strace = (me / "exe").readlink()
                if found := [int(pid) for pid in pids if Path(f"/proc/{pid}/exe").readlink() != strace]:
                    return found
            time.sleep(0.01)
        return [int(pid) for pid in pids]


def trace(
    command: Annotated[list[str], typer.Argument(help="The command, after `--`.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Folder to write to; default runs/trace-<time>.")] = None,
    kernel: Annotated[
        list[str] | None, typer.Option(help="Measure the host gap before this Triton kernel, too.")
    ] = None,
    strace: Annotated[bool, typer.Option("--strace", help="Count exactly, under strace -f. Slow.")] = False,
) -> None:
    """Run any training command and record who touches which file, why, and from where. Status: the command's."""
    from fla_safe.console import named_errors

    folder = out or Path("runs") / time.strftime("trace-%Y%m%d-%H%M%S")
    with named_errors():
        status = run_traced(command, folder, kernels=(*KERNELS, *(kernel or ())), exact=strace)
    sys.stderr.write(f"fla-safe: traced to {folder}; next: fla-safe report {shlex.quote(str(folder))}\n")
    raise typer.Exit(status if status >= 0 else 128 - status)


def report(
    run: Annotated[Path, typer.Argument(help="A folder that `fla-safe trace` wrote.", show_default=False)],
) -> None:
    """Merge the processes of a traced run into report.json and report.md (with plots), and say what touched files."""
    from fla_safe.console import named_errors
    from fla_safe.trace.report import write_report

    with named_errors():
        made = write_report(run)
    for sentence in made["verdict"]:
        typer.echo(f"* {sentence}")
    typer.echo(
        f"{run / 'report.md'}" + ("" if made["plots"] is not None else " (no plots: matplotlib is not installed)")
    )
