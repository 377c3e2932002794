"""Two ways to attend from draft tokens to context and block, neither of which holds a score for every query and key."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

__all__ = ["Attention", "attend", "sdpa_by_anchor"]

Attention = Literal["flex", "sdpa_by_anchor"]


def attend(
    kind: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask | torch.Tensor, block: int
) -> torch.Tensor:
    """Attention of draft tokens; belongs inside a compiled function, where "flex" becomes one kernel.

    Args:
        kind: "flex" wants a `BlockMask`, "sdpa_by_anchor" the mask of `AnchorMask.rows`.
        q: `[1, heads, A * B, D]`.
        k, v: `[1, heads, C + A * B, D]`.
        block: B.

    Returns:
        `[1, heads, A * B, D]`.
    """
    if kind == "flex":
        assert isinstance(mask, BlockMask)
        out = flex_attention(q, k, v, block_mask=mask)
        assert isinstance(out, torch.Tensor)
        return out
    assert isinstance(mask, torch.Tensor)
    return sdpa_by_anchor(q, k, v, mask, block)


def sdpa_by_anchor(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, block: int) -> torch.Tensor:
    """One fused attention call an anchor, for CPUs: PyTorch 2.11's flex_attention has no backward pass there.

    Args:
        q, k, v: as for `attend`.
        mask: `[A, C + A * B]` bool.
        block: B.

    Returns:
        `[1, heads, A * B, D]`.
    """
    outs = [
        F.scaled_dot_product_attention(q[:, :, i * block : (i + 1) * block], k, v, attn_mask=row[None, None, None])
        for i, row in enumerate(mask.unbind())
    ]
    return torch.cat(outs, 2)
