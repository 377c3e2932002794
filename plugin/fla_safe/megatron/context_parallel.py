"""Context parallelism for GDN: an all-to-all trades this rank's tokens of all heads for all tokens of its heads.

A recurrence runs over the whole sequence but each head runs alone, so the layer splits heads across the group while it
mixes (the head-parallel form of DeepSpeed-Ulysses, arXiv:2309.14509), and trades back. Megatron gives each rank two of
`2 * cp` chunks of every sequence (rank r: chunks r and 2 * cp - 1 - r), so tokens are put in order in between.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from fla_safe.errors import FlaSafeError

__all__ = ["ContextParallelError", "TokenOrder", "to_heads", "to_tokens", "token_order"]


class ContextParallelError(FlaSafeError, ValueError):
    """The tokens cannot be divided over the context-parallel group as Megatron divides them."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenOrder:
    """The permutation between natural token order and the order in which the group's ranks hold the tokens.

    Attributes:
        natural_to_held: int64 [T]; `held[i] = natural[natural_to_held[i]]`, ranks one after another.
        held_to_natural: int64 [T], its inverse.
    """

    natural_to_held: torch.Tensor
    held_to_natural: torch.Tensor


def token_order(offsets: tuple[int, ...], group_size: int, device: torch.device) -> TokenOrder:
    """Build the order for segments at `offsets` (0, ..., T), on the host and without a device sync.

    Raises:
        ContextParallelError: a segment's length is not a multiple of `2 * group_size`.
    """
    pieces = 2 * group_size
    parts: list[list[torch.Tensor]] = [[] for _ in range(group_size)]
    for start, end in pairwise(offsets):
        if (end - start) % pieces:
            raise ContextParallelError(
                f"a segment of {end - start} tokens under context parallel size {group_size}",
                f"lengths that are multiples of {pieces}",
                "pad each sample (ms-swift does with --packing or --padding_free and --context_parallel_size)",
            )
        chunks = torch.arange(start, end).chunk(pieces) if end > start else ()
        for rank in range(group_size if chunks else 0):
            parts[rank] += [chunks[rank], chunks[pieces - 1 - rank]]
    held = torch.cat([token for rank in parts for token in rank])
    natural = torch.empty_like(held)
    natural[held] = torch.arange(len(held))
    return TokenOrder(_to_device(held, device), _to_device(natural, device))


def _to_device(index: torch.Tensor, device: torch.device) -> torch.Tensor:
    # From pinned memory the copy is asynchronous; from pageable memory torch would wait for the device.
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index.to(device)


class _Permute(torch.autograd.Function):
    """Rows by index; the gradient goes back by the inverse index instead of an atomic scatter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _Exchange(torch.autograd.Function):
    """All-to-all over dim 0, `[cp, ...]` -> `[cp, ...]`; it is its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchange(grad, ctx.group), None


def _exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


def to_heads(x: torch.Tensor, order: TokenOrder, group: dist.ProcessGroup) -> torch.Tensor:
    """`[T / cp, B, D]`, this rank's tokens -> `[T, B, D / cp]`, all tokens in order, columns from `rank * D / cp`."""
    size = group.size()
    tokens, batch, width = x.shape
    split = x.view(tokens, batch, size, width // size).permute(2, 0, 1, 3)
    held = _Exchange.apply(split, group).reshape(size * tokens, batch, width // size)
    return _Permute.apply(held, order.held_to_natural, order.natural_to_held)


def to_tokens(x: torch.Tensor, order: TokenOrder, group: dist.ProcessGroup) -> torch.Tensor:
    """The inverse of `to_heads`: `[T, B, D / cp]` -> `[T / cp, B, D]`."""
    size = group.size()
    total, batch, width = x.shape
    held = _Permute.apply(x, order.natural_to_held, order.held_to_natural)
    received = _Exchange.apply(held.view(size, total // size, batch, width), group)
    return received.permute(1, 2, 0, 3).reshape(total // size, batch, size * width)
