"""Inputs for the tests of `fla_safe.gdn`: segment layouts that have broken kernels, and random tensors for them."""

import torch

from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.segments import PackedSegments

__all__ = ["PACKS", "mixer_parameters", "pack", "rule_inputs", "segments_of"]

# Name -> (segment lengths, rows of the tail). Chunks hold 64 rows, the convolution reaches back 3.
PACKS: dict[str, tuple[list[int], int]] = {
    "one-row": ([1], 0),
    "shorter-than-the-convolution": ([2, 1, 3], 0),
    "around-the-chunk": ([63, 64, 65, 1, 128, 129], 0),
    "empty-segments": ([0, 0, 5, 0, 70, 0], 0),
    "tail": ([66, 3], 9),
    "tail-of-one-row": ([64], 1),
    "nothing-but-tail": ([0], 4),
    "hundreds-of-pad-tokens": ([40] + [1] * 255, 0),
    "hundreds-of-segments": ([1 + (7 * i) % 11 for i in range(300)], 2),
}


def pack(name: str) -> tuple[torch.Tensor, int]:
    """`cu_seqlens` int32 and total rows of a named pack."""
    lengths, tail = PACKS[name]
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return offsets, sum(lengths) + tail


def segments_of(lengths: list[int], tail: int = 0) -> PackedSegments:
    """Prepared segments of the given lengths."""
    return PackedSegments.prepare(torch.tensor([0, *lengths]).cumsum(0), sum(lengths) + tail)


def rule_inputs(
    batch: int,
    rows: int,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (8, 6),
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> list[torch.Tensor]:
    """q, k (normalised), v, g (some decays near 1, some near 0) and beta for (H, HV) heads of (K, V) dimensions."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(batch, rows, heads[0], dims[0]), dim=-1) for _ in range(2))
    v, g, beta = normal(batch, rows, heads[1], dims[1]), normal(batch, rows, heads[1]), normal(batch, rows, heads[1])
    g = -torch.nn.functional.softplus(4 * g)
    return [x.to(torch.float32 if x is g and dtype.itemsize < 4 else dtype) for x in (q, k, v, g, beta.sigmoid())]


def mixer_parameters(
    layout: ProjectionLayout, *, dtype: torch.dtype = torch.float64, seed: int = 1
) -> dict[str, torch.Tensor]:
    """Random parameters of a mixer with a convolution of width 4 with bias."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        "conv_weight": (layout.conv_dim, 1, 4),
        "conv_bias": (layout.conv_dim,),
        "A_log": (layout.value_heads,),
        "dt_bias": (layout.value_heads,),
        "norm_weight": (layout.value_dim,),
    }
    return {
        name: torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }
