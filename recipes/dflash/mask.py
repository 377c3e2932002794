"""Which keys an anchor's draft tokens attend to: the context before the anchor in its document, and their own block."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dflash.anchors import AnchorBatch, Budget

__all__ = ["AnchorMask"]

type MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_compiled_create_block_mask: Callable[..., Any] = torch.compile(create_block_mask, dynamic=False, fullgraph=True)


class AnchorMask:
    """The mask of one pair. Queries are the A * B draft tokens; keys are the C context rows and then the draft tokens.

    Its tensors live as long as the pair and are written in place, so that compiled code sees one mask function.

    Args:
        budget: A, B and C.
        device: the drafter's.
        compiled: make block masks in compiled code. Eager `create_block_mask` holds eight bytes for every query and
            key, more than the scores that flex_attention saves.
    """

    def __init__(self, budget: Budget, device: torch.device, *, compiled: bool) -> None:
        self.budget = budget
        self.device = device
        self.first = torch.zeros(budget.anchors, dtype=torch.int32, device=device)
        self.last = torch.zeros(budget.anchors, dtype=torch.int32, device=device)
        self._create = _compiled_create_block_mask if compiled else create_block_mask
        self._keys = torch.arange(budget.tokens, dtype=torch.int32, device=device)
        self._function = _mask_function(self.first, self.last, budget.block, budget.context)

    def update(self, anchors: AnchorBatch) -> None:
        """Take the anchors of a step; they are on the mask's device."""
        self.first.copy_(anchors.first)
        self.last.copy_(anchors.last)

    def block_mask(self) -> BlockMask:
        """For flex_attention."""
        return self._create(self._function, 1, None, self.budget.draft, self.budget.tokens, device=self.device)

    def rows(self) -> torch.Tensor:
        """`[A, C + A * B]` bool, for `attention.sdpa_by_anchor`: all draft tokens of an anchor see the same keys."""
        query = torch.arange(self.budget.anchors, device=self.device) * self.budget.block
        return self._function(query, query, query[:, None], self._keys[None])


def _mask_function(first: torch.Tensor, last: torch.Tensor, block: int, context: int) -> MaskFunction:
    # Few operations: Inductor computes a long function once into memory, queries x keys of it.
    def allowed(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        anchor = query // block
        before = (key >= first[anchor]) & (key < last[anchor])
        return before | ((key - context) // block == anchor)

    return allowed
