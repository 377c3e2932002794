"""How the `fla-safe` command shows what went wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from fla_safe.errors import FlaSafeError

__all__ = ["named_errors"]


@contextmanager
def named_errors() -> Iterator[None]:
    """A known error is three lines on standard error and status 2, not a traceback."""
    try:
        yield
    except FlaSafeError as error:
        text = f"{type(error).__name__}: {error.seen}\n  expected: {error.expected}\n  to do: {error.remedy}"
        Console(stderr=True, soft_wrap=True).print(Text(text, style="red"))
        raise typer.Exit(2) from None
