"""The functional API of a gated delta net, usable without Megatron.

Every function takes a batch `[B, T, ...]`, or one packed row (`B = 1`) with its `PackedSegments`. On a packed row no
segment sees another, and rows beyond the last offset give zeros and receive zero gradients even if they hold NaN.
Computation is in float32 (float64 for float64 inputs); results have the dtype of the input.
"""

import torch
import torch.nn.functional as F

from fla_safe.gdn.backends import Backend, resolve
from fla_safe.gdn.segments import OffsetsError, PackedSegments, zero_tail

__all__ = ["causal_conv1d", "check_rows", "gated_delta_rule", "gated_norm", "gates", "l2norm"]


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    segments: PackedSegments | None = None,
    activation: bool = True,
) -> torch.Tensor:
    """Causal depthwise convolution, then SiLU: `y[t] = silu(bias + sum_i weight[:, i] * x[t - W + 1 + i])`.

    Args:
        x: `[B, T, D]`.
        weight: `[D, W]`, or `[D, 1, W]` as `torch.nn.Conv1d` keeps it.
        bias: `[D]`.
        segments: rows before a segment's first count as zeros.
        activation: False leaves SiLU out.

    Returns:
        `[B, T, D]`.
    """
    check_rows(x, segments)
    dtype = _compute_dtype(x)
    inside = zero_tail(x, segments, 1).to(dtype)
    taps = weight.reshape(weight.shape[0], -1).to(dtype).unbind(-1)
    y = inside * taps[-1]
    position = None if segments is None else _positions(segments)
    for back, tap in enumerate(reversed(taps[:-1]), start=1):
        if back >= x.shape[1]:
            break
        shifted = F.pad(inside[:, :-back], (0, 0, back, 0))
        if position is not None:
            shifted = shifted.masked_fill((position < back).unsqueeze(-1), 0)
        y = y + shifted * tap
    if bias is not None:
        y = y + bias.to(dtype)
    return zero_tail((F.silu(y) if activation else y).to(x.dtype), segments, 1)


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`x / sqrt(sum(x^2) + eps)` over the last dimension.

    Args:
        x: `[..., K]`.
        eps: added to the sum of squares.
    """
    wide = x.to(_compute_dtype(x))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decay and write strength: `g = -exp(A_log) * softplus(a + dt_bias)` and `beta = sigmoid(b)`.

    Args:
        a, b: `[..., HV]`, from the projection.
        A_log, dt_bias: `[HV]`.

    Returns:
        g `[..., HV]` in float32 (float64 for float64 inputs), beta `[..., HV]` in the dtype of b.
    """
    dtype = _compute_dtype(a)
    return -A_log.to(dtype).exp() * F.softplus(a.to(dtype) + dt_bias.to(dtype)), b.sigmoid()


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    segments: PackedSegments | None = None,
    kernel: Backend | None = None,
) -> torch.Tensor:
    """The gated delta rule: `S = exp(g) S; S += k (beta (v - k S))^T; o = scale * q S`, from S = 0 in every segment.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`, HV a multiple of H: value head j reads key head `j // (HV / H)`.
        g: `[B, T, HV]`, logarithm of the decay.
        beta: `[B, T, HV]`.
        scale: default `K ** -0.5`.
        kernel: from `backends.resolve`; default "torch".

    Returns:
        `[B, T, HV, V]` in the dtype of v.
    """
    check_rows(q, segments)
    kernel = kernel or resolve("torch", q.device)
    q, k, v, g, beta = (zero_tail(x, segments, 1) for x in (q, k, v, g, beta))
    out = kernel.gated_delta_rule(q, k, v, g, beta, q.shape[-1] ** -0.5 if scale is None else scale, segments)
    return zero_tail(out, segments, 1)


def gated_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, zero_centered: bool = False
) -> torch.Tensor:
    """`rmsnorm(x) * weight * silu(z)` over the last dimension; the norm is rounded to x's dtype before the gate.

    Args:
        x, z: `[..., V]`.
        weight: `[V]`.
        zero_centered: the factor is `1 + weight` (Megatron's `layernorm_zero_centered_gamma`).
    """
    dtype = _compute_dtype(x)
    wide, factor = x.to(dtype), weight.to(dtype) + zero_centered
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * factor).to(x.dtype)
    return (normed * F.silu(z.to(dtype))).to(x.dtype)


def check_rows(x: torch.Tensor, segments: PackedSegments | None, *, rows: int = 1, batch: int = 0) -> None:
    """Raise `OffsetsError` unless `x` is the packed row that the segments describe; any batch without segments.

    Args:
        x: activations.
        rows, batch: which of its dimensions are these.
    """
    if segments is None:
        return
    if x.shape[batch] == 1 and x.shape[rows] == segments.total and x.device == segments.device:
        return
    raise OffsetsError(
        f"activations of batch {x.shape[batch]} and {x.shape[rows]} rows on {x.device}",
        f"batch 1 and {segments.total} rows on {segments.device}, as the segments were prepared for",
        "prepare the segments for this micro-batch",
    )


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _positions(segments: PackedSegments) -> torch.Tensor:
    """`[T]`, the place of every row in its segment; no synchronisation, for the number of rows is known."""
    starts = segments.offsets[:-1]
    lengths = segments.offsets[1:] - starts
    first = torch.repeat_interleave(starts, lengths, output_size=segments.total)
    return torch.arange(segments.total, device=segments.device) - first
