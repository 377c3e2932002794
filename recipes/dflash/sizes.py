"""Sizes of a run: as on one GPU with realistic GDN heads, or scaled down for a CPU; flags change single numbers."""

from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal

import torch

from dflash.anchors import Budget, Documents
from dflash.drafter import DrafterSizes
from dflash.target import TargetSizes
from fla_safe.errors import FlaSafeError
from fla_safe.gdn.layout import ProjectionLayout

__all__ = ["MEMORY", "PRESETS", "Sizes", "SizesError"]


class SizesError(FlaSafeError, ValueError):
    """Sizes that make no target, no drafter or no documents."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Everything about a pair that is a number.

    Attributes:
        budget, anchors, block: tokens of a step, anchors, draft tokens of an anchor.
        vocabulary, words: V, and how many of its tokens the synthetic documents use.
        shortest, longest: documents.
        hidden, layers: of the target.
        key_heads, value_heads, head_dim: of its GDN layers, K = V = head_dim.
        draft_heads, draft_head_dim, draft_layers: of the drafter.
        lr: of AdamW.
        dtype: of the activations.
    """

    budget: int
    anchors: int
    block: int
    vocabulary: int
    words: int
    shortest: int
    longest: int
    hidden: int
    layers: int
    key_heads: int
    value_heads: int
    head_dim: int
    draft_heads: int
    draft_head_dim: int
    draft_layers: int
    lr: float
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for wrong, seen, expected in (
            (self.hidden % self.draft_heads, f"hidden {self.hidden}, draft_heads {self.draft_heads}", "a multiple"),
            (self.draft_head_dim % 2, f"draft_head_dim {self.draft_head_dim}", "an even number: pairs are rotated"),
            (self.shortest > self.longest, f"documents of {self.shortest} to {self.longest} tokens", "a range"),
            (not (self.lr > 0 and isfinite(self.lr)), f"lr {self.lr}", "a positive number"),
        ):
            if wrong:
                raise SizesError(seen, expected, "change these flags")

    @property
    def step_budget(self) -> Budget:
        """Of one step."""
        return Budget(self.budget, self.anchors, self.block)

    @property
    def target(self) -> TargetSizes:
        """Of the target; features are the outputs of its first, middle and last layer."""
        layout = ProjectionLayout("sectioned", self.key_heads, self.value_heads, self.head_dim, self.head_dim)
        taps = tuple(sorted({0, self.layers // 2, self.layers - 1}))
        return TargetSizes(self.vocabulary, self.hidden, self.layers, layout, self.draft_heads, taps)

    @property
    def drafter(self) -> DrafterSizes:
        """Of the drafter."""
        return DrafterSizes(self.target.features, self.hidden, self.draft_heads, self.draft_head_dim, self.draft_layers)

    @property
    def scores(self) -> int:
        """Elements of the matrix that must never exist: heads x queries x keys."""
        return self.draft_heads * self.step_budget.draft * self.budget

    @property
    def largest(self) -> int:
        """Elements that no tensor of the drafter reaches: those of `scores`, or of a wide activation if that is more.

        With few anchors the scores are smaller than other tensors, and nothing can be told from sizes.
        """
        wide = max(self.target.features, 4 * self.hidden, 2 * self.draft_heads * self.draft_head_dim, self.vocabulary)
        return max(self.scores, self.budget * wide + 1)

    def documents(self, seed: int) -> Documents:
        """Training data."""
        return Documents(self.vocabulary, self.words, self.shortest, self.longest, seed=seed)


PRESETS: dict[Literal["cuda", "cpu"], Sizes] = {
    "cuda": Sizes(
        budget=8192, anchors=256, block=16, vocabulary=8192, words=256, shortest=32, longest=3000, hidden=1024,
        layers=4, key_heads=4, value_heads=8, head_dim=128, draft_heads=8, draft_head_dim=64, draft_layers=2,
        lr=1e-3, dtype=torch.bfloat16,
    ),
    "cpu": Sizes(
        budget=192, anchors=16, block=4, vocabulary=64, words=16, shortest=8, longest=64, hidden=32,
        layers=4, key_heads=1, value_heads=2, head_dim=16, draft_heads=2, draft_head_dim=16, draft_layers=1,
        lr=1e-2, dtype=torch.float32,
    ),
}  # fmt: skip
"""For training."""

MEMORY: dict[Literal["cuda", "cpu"], Sizes] = {
    "cuda": replace(PRESETS["cuda"], anchors=1024, budget=4096 + 1024 * 16, vocabulary=1024),
    "cpu": replace(PRESETS["cpu"], anchors=64, block=8, budget=512 + 64 * 8),
}
"""For `--memory`: few other tensors, so that a matrix of scores would be the largest by far."""
