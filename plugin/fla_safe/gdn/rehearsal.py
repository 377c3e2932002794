"""Runs every call that training will make of a mixer: long and awkward rows, plain and under recomputation."""

from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch.utils.checkpoint import checkpoint

from fla_safe.gdn.segments import PackedSegments
from fla_safe.gdn.variant import MixerVariant

__all__ = ["AWKWARD_ROWS", "Rows", "rehearse"]

AWKWARD_ROWS = (1, 63, 64, 65, 272)
"""Around a chunk of 64, and a multiple of 16 that is no multiple of a chunk."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that a job sends through its GDN layers.

    Attributes:
        tokens: longest row T, over all context-parallel ranks.
        batch: B; 1 when packed.
        packed: whether rows hold several segments.
    """

    tokens: int
    batch: int
    packed: bool

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The inverse of `as_dict`."""
        return cls(**data)


def rehearse(variant: MixerVariant, rows: Rows, device: torch.device | str) -> None:
    """Forward and backward at the longest row first (which is where a kernel is tuned), then at awkward ones."""
    for tokens in dict.fromkeys((rows.tokens, *AWKWARD_ROWS)):
        if tokens > rows.tokens:
            continue
        segments = None
        if rows.packed:
            bounds = sorted({0, 1, tokens // 3, tokens // 2, tokens})
            offsets = torch.tensor(bounds, dtype=torch.int32, device=device)
            segments = PackedSegments.prepare(offsets, tokens, device=device)
        for recompute in (False, True):
            leaves = variant.draw(tokens, 1 if rows.packed else rows.batch, device)
            rest = {name: leaf for name, leaf in leaves.items() if name != "proj"}

            def forward(proj: torch.Tensor, rest: Any = rest, segments: Any = segments) -> torch.Tensor:
                return variant({"proj": proj, **rest}, segments)

            proj = leaves["proj"]
            out = checkpoint(forward, proj, use_reentrant=True) if recompute else forward(proj)  # type: ignore[arg-type]
            out.sum().backward()
