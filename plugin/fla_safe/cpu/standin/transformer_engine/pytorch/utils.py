"""Tensor helpers that Megatron imports from TransformerEngine."""

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["SplitAlongDim", "make_weak_ref"]


class SplitAlongDim(torch.autograd.Function):
    """`torch.split` whose parts may be written in place."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, split_dim: int, split_size_or_sections: int | Sequence[int], squeeze: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Parts of `x` along `split_dim`; `squeeze` drops that dimension (sections of one)."""
        ctx.split_dim, ctx.squeeze = split_dim, squeeze
        sections = split_size_or_sections if isinstance(split_size_or_sections, int) else list(split_size_or_sections)
        parts = torch.split(x, sections, dim=split_dim)
        return tuple((p.squeeze(split_dim) if squeeze else p).clone() for p in parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """The gradients joined again."""
        if ctx.squeeze:
            grads = tuple(g.unsqueeze(ctx.split_dim) for g in grads)
        return torch.cat(grads, dim=ctx.split_dim), None, None, None


def make_weak_ref(x: Any) -> Any:
    """The argument itself."""
    return x
