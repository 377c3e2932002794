"""Makes a check that failed on one rank fail on every rank, with one message."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from fla_safe.errors import FlaSafeError

__all__ = ["OtherRankError", "together"]


class OtherRankError(FlaSafeError, RuntimeError):
    """This rank was well; another one was not."""


@contextmanager
def together(step: str) -> Iterator[None]:
    """Run the body on every rank; if it raises on any, it raises on all.

    The rank that failed raises its own error, the others `OtherRankError` with that message. Without
    `torch.distributed` this is the plain body. Every rank of the default group must enter.

    Args:
        step: what the body does, for the message, as in "checking the built model".
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    messages = _gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = [(rank, message) for rank, message in enumerate(messages) if message is not None]
    if failed:
        ranks = ", ".join(str(rank) for rank, _ in failed)
        raise OtherRankError(
            f"{step} failed on rank {ranks}: {failed[0][1]}", "the same on all ranks", "mend what that message names"
        )


def _gather(message: str | None) -> list[str | None]:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [message]
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    return messages
