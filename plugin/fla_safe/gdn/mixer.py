"""The token mixer of a gated delta net: everything between its input projection and its output projection."""

from functools import partial
from typing import Final

import torch

from fla_safe.gdn.backends import Backend
from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.ops import causal_conv1d, check_rows, gated_norm, gates, l2norm
from fla_safe.gdn.segments import PackedSegments, zero_tail

__all__ = ["FUSED_WINDOW", "composed_mixer", "mixer"]

FUSED_WINDOW: Final = 4
"""Longest convolution of the fused mixer; a longer one is composed of the functions of `gdn.ops`."""


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
    segments: PackedSegments | None,
    kernel: Backend,
    use_qk_l2norm: bool = True,
    zero_centered_norm: bool = False,
) -> torch.Tensor:
    """Convolution, normalisation, gates, gated delta rule and gated norm, in Megatron's row-first order.

    Args:
        proj: `[T, B, proj_dim]`, the input projection's output.
        layout: where the parts of `proj` lie; per-rank heads.
        conv_weight: `[conv_dim, W]` or `[conv_dim, 1, W]`.
        conv_bias: `[conv_dim]` or None.
        A_log, dt_bias: `[HV]`.
        norm_weight: `[V]`.
        norm_eps: of the gated norm.
        segments: of the packed row (B is 1 then), or None: every batch row is one sequence.
        kernel: from `backends.resolve`.
        use_qk_l2norm: normalise queries and keys.
        zero_centered_norm: the norm's factor is `1 + norm_weight`.

    Returns:
        `[T, B, HV * V]` in the dtype of `proj`; zeros in rows beyond the last offset.

    Raises:
        OffsetsError: `proj` is not the packed row that the segments describe.
        LayoutError: `proj` has another width than the layout.
    """
    check_rows(proj, segments, rows=0, batch=1)
    run = kernel.mixer
    if run is None or conv_weight.shape[-1] > FUSED_WINDOW:
        run = partial(composed_mixer, kernel=kernel)
    return run(
        proj,
        layout=layout,
        conv_weight=conv_weight,
        conv_bias=conv_bias,
        A_log=A_log,
        dt_bias=dt_bias,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        segments=segments,
        use_qk_l2norm=use_qk_l2norm,
        zero_centered_norm=zero_centered_norm,
    )


def composed_mixer(
    proj: torch.Tensor,
    *,
    layout: ProjectionLayout,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    segments: PackedSegments | None,
    kernel: Backend,
    use_qk_l2norm: bool = True,
    zero_centered_norm: bool = False,
) -> torch.Tensor:
    """The same as `mixer`, always from the functions of `gdn.ops` around the kernel."""
    check_rows(proj, segments, rows=0, batch=1)
    rows = proj.transpose(0, 1)
    # Cleared once, here: every later function then works on zeros in the tail, and none of them needs to know.
    qkv, z, b, a = layout.split(zero_tail(rows, segments, 1))
    q, k, v = layout.split_conv(causal_conv1d(qkv, conv_weight, conv_bias, segments=segments))
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    g, beta = gates(a, b, A_log, dt_bias)
    o = kernel.gated_delta_rule(q, k, v, g, beta, layout.key_dim**-0.5, segments)
    out = gated_norm(o, z, norm_weight, eps=norm_eps, zero_centered=zero_centered_norm)
    return zero_tail(out.flatten(-2), segments, 1).transpose(0, 1).contiguous()
