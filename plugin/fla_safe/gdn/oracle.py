"""The reference: a gated delta net row by row and segment by segment, in plain torch, written to be read.

Nothing here shares code with the kernels it judges. Everything computes in the dtype of its inputs, so give it float64.
Recurrence of "Gated Delta Networks" (Yang, Kautz, Hatamizadeh, 2024, arXiv:2412.06464), equation 10.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from fla_safe.gdn.layout import ProjectionLayout

__all__ = ["causal_conv1d", "gated_delta_rule", "gated_norm", "l2norm", "mixer"]


def _bounds(rows: int, offsets: Sequence[int] | None) -> list[tuple[int, int]]:
    offsets = (0, rows) if offsets is None else offsets
    return [(start, end) for start, end in itertools.pairwise(offsets) if end > start]


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, offsets: Sequence[int] | None = None
) -> torch.Tensor:
    """Causal depthwise convolution and SiLU of every segment; zeros beyond the last offset.

    Args:
        x: `[B, T, D]`.
        weight: `[D, W]`.
        bias: `[D]`.
        offsets: of the segments, the same in all batch rows; None is one segment.
    """
    width = weight.shape[-1]
    out = torch.zeros_like(x)
    for start, end in _bounds(x.shape[1], offsets):
        padded = F.pad(x[:, start:end].mT, (width - 1, 0))
        out[:, start:end] = F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=x.shape[2])).mT
    return out


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`x / sqrt(sum(x^2) + eps)` over the last dimension."""
    return x / (x.pow(2).sum(-1, keepdim=True) + eps).sqrt()


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    offsets: Sequence[int] | None = None,
) -> torch.Tensor:
    """One step a row, one state `[B, HV, K, V]` a segment; zeros beyond the last offset. Shapes as in `ops`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    rows = [torch.zeros_like(v[:, 0])] * v.shape[1]
    for start, end in _bounds(v.shape[1], offsets):
        state = v.new_zeros(*v[:, 0].shape[:2], k.shape[-1], v.shape[-1])
        for t in range(start, end):
            state = state * g[:, t].exp()[..., None, None]
            recalled = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
            written = beta[:, t, :, None] * (v[:, t] - recalled)
            state = state + k[:, t, :, :, None] * written[:, :, None, :]
            rows[t] = scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state)
    return torch.stack(rows, dim=1)


def gated_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, zero_centered: bool = False
) -> torch.Tensor:
    """`rmsnorm(x) * weight * silu(z)` over the last dimension; `1 + weight` if the weight is centred on zero."""
    factor = 1 + weight if zero_centered else weight
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * factor * z * z.sigmoid()


def mixer(
    proj: torch.Tensor,
    *,
    layout: ProjectionLayout,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    offsets: Sequence[int] | None = None,
    use_qk_l2norm: bool = True,
    zero_centered_norm: bool = False,
) -> torch.Tensor:
    """The mixer of `gdn.mixer.mixer` with plain offsets in place of prepared segments; `[T, B, proj_dim]` in."""
    columns = _columns(layout, "qkvzba")
    rows = proj.transpose(0, 1)
    part = {name: rows[..., index] for name, index in columns.items()}
    channels = _columns(layout, "qkv")
    # Channel by channel the convolution is blind to the layout: convolve the parts where they lie, then pick them.
    order = torch.cat([channels[name].flatten() for name in "qkv"])
    mixed = torch.cat([part[name].flatten(2) for name in "qkv"], dim=-1)
    bias = None if conv_bias is None else conv_bias[order]
    mixed = causal_conv1d(mixed, conv_weight.reshape(layout.conv_dim, -1)[order], bias, offsets)
    q, k, v = mixed.split([channels[name].numel() for name in "qkv"], dim=-1)
    q, k = (x.unflatten(-1, (layout.key_heads, layout.key_dim)) for x in (q, k))
    v = v.unflatten(-1, (layout.value_heads, layout.value_dim))
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    g = -A_log.exp() * F.softplus(part["a"].squeeze(-1) + dt_bias)
    o = gated_delta_rule(q, k, v, g, part["b"].squeeze(-1).sigmoid(), offsets=offsets)
    out = gated_norm(o, part["z"], norm_weight, eps=norm_eps, zero_centered=zero_centered_norm)
    used = rows.shape[1] if offsets is None else offsets[-1]
    return F.pad(out.flatten(-2)[:, :used], (0, 0, 0, rows.shape[1] - used)).transpose(0, 1)


def _columns(layout: ProjectionLayout, names: str) -> dict[str, torch.Tensor]:
    """For every part the `[heads, width]` columns it occupies, dealt out one by one in the order of the layout."""
    per_key_head = layout.value_heads // layout.key_heads
    heads = {name: layout.key_heads if name in "qk" else layout.value_heads for name in names}
    width = {name: layout.key_dim if name in "qk" else layout.value_dim if name in "vz" else 1 for name in names}
    columns: dict[str, list[list[int]]] = {name: [] for name in names}
    position = 0

    def deal(name: str, count: int) -> None:
        nonlocal position
        for _ in range(count):
            columns[name].append(list(range(position, position + width[name])))
            position += width[name]

    if layout.kind == "interleaved":
        for _ in range(layout.key_heads):
            for name in names:
                deal(name, 1 if name in "qk" else per_key_head)
    else:
        for name in names:
            deal(name, heads[name])
    return {name: torch.tensor(index) for name, index in columns.items()}
