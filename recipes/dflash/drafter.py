"""The block-diffusion drafter: guesses all tokens of a block at once from the target's hidden states before it.

After "DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv:2602.06036): features of several target layers are
projected once and given to the keys and values of every drafter layer; a block is its anchor's token and masks; within
a block attention goes both ways. Embedding and output projection are the target's, frozen.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from dflash.anchors import AnchorBatch, Budget
from dflash.attention import Attention, attend

__all__ = ["Drafter", "DrafterSizes", "drafter_loss"]


@dataclass(frozen=True, slots=True)
class DrafterSizes:
    """Sizes of a drafter.

    Attributes:
        features: width of the target's features, all taken layers together.
        hidden: width, that of the target's embedding.
        heads, head_dim: of attention.
        layers: number of layers.
    """

    features: int
    hidden: int
    heads: int
    head_dim: int
    layers: int


class _Linear(nn.Linear):
    """Parameters stay in float32; the product has the dtype of its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * self.weight).to(x.dtype)


class _Layer(nn.Module):
    def __init__(self, sizes: DrafterSizes, kind: Attention, block: int) -> None:
        super().__init__()
        width = sizes.heads * sizes.head_dim
        self.kind: Attention = kind
        self.block, self.heads = block, sizes.heads
        self.norm, self.norm_mlp = _Norm(sizes.hidden), _Norm(sizes.hidden)
        self.q, self.out = _Linear(sizes.hidden, width), _Linear(width, sizes.hidden)
        self.kv = _Linear(sizes.hidden, 2 * width)
        self.up, self.down = _Linear(sizes.hidden, 4 * sizes.hidden), _Linear(2 * sizes.hidden, sizes.hidden)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, turn: torch.Tensor, mask: BlockMask | torch.Tensor
    ) -> torch.Tensor:
        rows = self.norm(x)
        q = _turned(self._heads(self.q(rows)), turn[context.shape[0] :])
        k, v = self.kv(torch.cat([context, rows])).chunk(2, -1)
        attended = attend(self.kind, q, _turned(self._heads(k), turn), self._heads(v), mask, self.block)
        x = x + self.out(attended[0].transpose(0, 1).flatten(1))
        gate, up = self.up(self.norm_mlp(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(0, 1)[None]


class Drafter(nn.Module):
    """A drafter for one budget.

    Args:
        sizes: of the layers.
        budget: A, B and C; shapes are fixed by it.
        embedding: `[V, hidden]`, the target's, on the drafter's device; kept frozen.
        attention: see `attention.attend`.
    """

    def __init__(self, sizes: DrafterSizes, budget: Budget, embedding: torch.Tensor, attention: Attention) -> None:
        super().__init__()
        self.budget = budget
        self.attention: Attention = attention
        self.head_dim = sizes.head_dim
        self.embedding: torch.Tensor
        self.register_buffer("embedding", embedding.detach())
        self.blank = nn.Parameter(torch.randn(sizes.hidden) * 0.02)
        self.features = _Linear(sizes.features, sizes.hidden)
        self.context_norm, self.norm = _Norm(sizes.hidden), _Norm(sizes.hidden)
        self.layers = nn.ModuleList(_Layer(sizes, attention, budget.block) for _ in range(sizes.layers))

    def forward(
        self,
        features: torch.Tensor,
        position: torch.Tensor,
        anchors: AnchorBatch,
        mask: BlockMask | torch.Tensor,
    ) -> torch.Tensor:
        """Logits of the B - 1 tokens after each anchor.

        Args:
            features: `[C, features]` hidden states of the target, in the dtype to compute in.
            position: `[C]` int64, place of each context row in its document.
            anchors: A of them.
            mask: for the attention that was chosen.

        Returns:
            `[A, B - 1, V]` in float32.
        """
        A, B = self.budget.anchors, self.budget.block
        dtype = features.dtype
        context = self.context_norm(self.features(features))
        known = F.embedding(anchors.token, self.embedding).to(dtype)[:, None]
        x = torch.cat([known, self.blank.to(dtype).expand(A, B - 1, -1)], 1).flatten(0, 1)
        within = torch.arange(B, device=x.device)
        turn = _turn(torch.cat([position, (anchors.position[:, None] + within).flatten()]), self.head_dim)
        for layer in self.layers:
            x = layer(x, context, turn, mask)
        guesses = self.norm(x).unflatten(0, (A, B))[:, 1:] * x.shape[-1] ** -0.5
        return F.linear(guesses, self.embedding.to(dtype)).float()


def drafter_loss(
    drafter: Drafter,
    features: torch.Tensor,
    position: torch.Tensor,
    anchors: AnchorBatch,
    mask: BlockMask | torch.Tensor,
) -> torch.Tensor:
    """Weighted cross-entropy of the guesses, a scalar; arguments as for `Drafter.forward`."""
    logits = drafter(features, position, anchors, mask)
    losses = F.cross_entropy(logits.flatten(0, 1), anchors.labels.flatten(), reduction="none")
    weights = anchors.weights.flatten()
    return (losses * weights).sum() / weights.sum().clamp_min(1e-6)


def _turn(position: torch.Tensor, width: int) -> torch.Tensor:
    """`[rows, 2, width / 2]`, cosines and sines of rotary embedding."""
    frequency = 10000.0 ** (-torch.arange(0, width, 2, device=position.device) / width)
    angle = position[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()], 1)


def _turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `x` `[1, heads, rows, D]` by `turn` `[rows, 2, D / 2]`."""
    cos, sin = turn[:, 0], turn[:, 1]
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)
