"""A bar that names the kernel being tuned, checked or compiled; plain lines where there is no terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(plain: Callable[[str], None], console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Yield a function that is told of each step; how many there will be is known when all kernels have been called.

    Args:
        plain: is told instead where `console` is no terminal (a log file, say).
        console: default is standard error.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield plain
        return
    columns = (
        SpinnerColumn(),
        TextColumn("GDN kernels"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed} steps"),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda text: progress.update(task, advance=1, description=text)
