"""Launches of the fused kernels: output buffers, grids and fixed launch configurations."""

from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

import torch
import triton

from fla_safe.gdn.chunk.grads import KernelGrads
from fla_safe.gdn.fused.inputs import mixer_in_forward
from fla_safe.gdn.fused.inputs_grad import mixer_in_backward
from fla_safe.gdn.fused.output import gate_backward, mixer_out_backward, mixer_out_forward
from fla_safe.gdn.fused.sums import add_sums
from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.segments import PackedSegments

__all__ = [
    "MAX_WINDOW",
    "Gates",
    "Inputs",
    "MixerShape",
    "grad_gate",
    "grad_in",
    "grad_out",
    "mixer_shape",
    "run_in",
    "run_out",
    "total_sums",
]

MAX_WINDOW: Final = 4
"""Longest convolution that the kernels hold in registers."""

_WARPS: Final = 4
_IN_TOKENS: Final = 64
_GRAD_TOKENS: Final = 128
_OUT_ROWS: Final = 16
_GRAD_OUT_STEPS: Final = 4
# Rows of an iteration, and rows that are loaded ahead.
_IN_UNROLL: Final = 4
_IN_AHEAD: Final = 4
_GRAD_UNROLL: Final = 2
_GRAD_AHEAD: Final = 1
_SUM_ROWS: Final = 64
_SUM_COLS: Final = 64
_NORM_ROWS: Final = 512
_NORM_COLS: Final = 8
# More registers would leave too few warps to hide memory latency; the compiler spills a few in the masked path only.
_GRAD_REGISTERS: Final = 128


@dataclass(frozen=True, slots=True, eq=False)
class MixerShape:
    """What the kernels are compiled for: one per layer shape and batch size, whatever the number of tokens.

    Compared and hashed by identity, so that looking up launch options costs nothing: get it from `mixer_shape`.

    Attributes:
        layout: heads, dimensions and where they lie.
        batch: rows B of the batch.
        window: width W of the convolution, at most `MAX_WINDOW`.
        bias: the convolution has a bias.
        packed: rows come in segments.
        l2norm: queries and keys are normalised.
        zero_centered: the norm's factor is `1 + weight`.
        norm_eps: of the gated norm.
    """

    layout: ProjectionLayout
    batch: int
    window: int
    bias: bool
    packed: bool
    l2norm: bool
    zero_centered: bool
    norm_eps: float


@cache
def mixer_shape(
    layout: ProjectionLayout,
    batch: int,
    window: int,
    bias: bool,
    packed: bool,
    l2norm: bool,
    zero_centered: bool,
    norm_eps: float,
) -> MixerShape:
    """The one `MixerShape` with these attributes."""
    return MixerShape(layout, batch, window, bias, packed, l2norm, zero_centered, norm_eps)


class Gates(NamedTuple):
    """Parameters of convolution and gates: `conv_weight` `[C, W]`, `conv_bias` `[C]`, `A_log` and `dt_bias` `[HV]`."""

    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    A_log: torch.Tensor
    dt_bias: torch.Tensor


class Inputs(NamedTuple):
    """What the chunk kernel reads: q, k `[B, T, H, K]`, v `[B, T, HV, V]`, g (float32) and beta `[B, T, HV]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


@cache
def _heads(layout: ProjectionLayout, batch: int) -> dict[str, Any]:
    return {
        "BATCH": batch,
        "H": layout.key_heads,
        "HV": layout.value_heads,
        "K": layout.key_dim,
        "V": layout.value_dim,
        "BV": triton.next_power_of_2(layout.value_dim),
        "INTERLEAVED": layout.kind == "interleaved",
        "num_warps": _WARPS,
    }


@cache
def _in_options(shape: MixerShape, tokens: int) -> dict[str, Any]:
    heads = _heads(shape.layout, shape.batch)
    block_k, block_v = triton.next_power_of_2(shape.layout.key_dim), heads["BV"]
    return {
        **heads,
        "eps": 1e-6,
        "BK": block_k,
        "BH": triton.next_power_of_2(shape.layout.value_heads),
        "W": shape.window,
        "TOKENS": tokens,
        "CHAINS_K": _chains(block_k, tokens),
        "CHAINS_V": _chains(block_v, tokens),
        "L2NORM": shape.l2norm,
        "PACKED": shape.packed,
        "HAS_BIAS": shape.bias,
    }


def _blocks(rows: int, size: int) -> int:
    return -(-rows // size)  # `triton.cdiv` costs several microseconds on the host


def _chains(block: int, tokens: int) -> int:
    # Four columns a thread: 8-byte accesses, the widest that mcore-bridge's layout aligns for every head.
    return max(1, min(_WARPS * 128 // block, tokens // 8))


@cache
def _out_options(shape: MixerShape) -> dict[str, Any]:
    return {
        **_heads(shape.layout, shape.batch),
        "eps": shape.norm_eps,
        "ROWS": _OUT_ROWS,
        "ZERO_CENTERED": shape.zero_centered,
    }


def _in_grid(shape: MixerShape, blocks: int) -> tuple[int, int]:
    layout = shape.layout
    return (2 * layout.key_heads + layout.value_heads + 1) * blocks, shape.batch


def _row_starts(segments: PackedSegments | None, otherwise: torch.Tensor) -> torch.Tensor:
    return otherwise if segments is None else segments.row_starts


def run_in(proj: torch.Tensor, gates: Gates, shape: MixerShape, segments: PackedSegments | None) -> Inputs:
    """Convolution, SiLU, split, l2norm and gates of `proj` `[T, B, proj_dim]`, contiguous. One launch."""
    layout, total, batch = shape.layout, proj.shape[0], proj.shape[1]
    H, HV, K, V = layout.key_heads, layout.value_heads, layout.key_dim, layout.value_dim
    qkv = proj.new_empty(batch * total * layout.conv_dim)
    g = proj.new_empty((batch, total, HV), dtype=torch.float32)
    beta = proj.new_empty((batch, total, HV))
    mixer_in_forward[_in_grid(shape, _blocks(total, _IN_TOKENS))](
        proj,
        gates.conv_weight,
        gates.conv_weight if gates.conv_bias is None else gates.conv_bias,
        gates.A_log,
        gates.dt_bias,
        _row_starts(segments, proj),
        qkv,
        g,
        beta,
        total,
        UNROLL=_IN_UNROLL,
        AHEAD=_IN_AHEAD,
        **_in_options(shape, _IN_TOKENS),
    )
    size, strides = (batch, total, H, K), (total * H * K, H * K, K, 1)
    return Inputs(
        qkv.as_strided(size, strides, 0),
        qkv.as_strided(size, strides, batch * total * H * K),
        qkv.as_strided((batch, total, HV, V), (total * HV * V, HV * V, V, 1), 2 * batch * total * H * K),
        g,
        beta,
    )


def run_out(
    o: torch.Tensor, proj: torch.Tensor, norm_weight: torch.Tensor, shape: MixerShape, segments: PackedSegments | None
) -> torch.Tensor:
    """Gated norm of `o` `[B, T, HV, V]` by the gate in `proj`: `[T, B, HV * V]`. One launch."""
    total, batch = proj.shape[0], proj.shape[1]
    out = proj.new_empty((total, batch, shape.layout.value_width))
    mixer_out_forward[(_blocks(total * shape.layout.value_heads, _OUT_ROWS), batch)](
        o, proj, norm_weight, out, total, total if segments is None else segments.used, **_out_options(shape)
    )
    return out


def grad_out(
    dout: torch.Tensor,
    o: torch.Tensor,
    proj: torch.Tensor,
    norm_weight: torch.Tensor,
    shape: MixerShape,
    segments: PackedSegments | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of `o`, and per-block sums `[*, V]` of the norm weight's. One launch."""
    total, batch, layout = proj.shape[0], proj.shape[1], shape.layout
    blocks = _blocks(total * layout.value_heads, _OUT_ROWS * _GRAD_OUT_STEPS)
    do = torch.empty_like(o)
    sums = proj.new_empty((blocks * batch, layout.value_dim), dtype=torch.float32)
    used = total if segments is None else segments.used
    mixer_out_backward[(blocks, batch)](
        o, proj, norm_weight, dout, do, sums, total, used, STEPS=_GRAD_OUT_STEPS, **_out_options(shape)
    )
    return do, sums


def grad_gate(
    dout: torch.Tensor,
    o: torch.Tensor,
    proj: torch.Tensor,
    norm_weight: torch.Tensor,
    dproj: torch.Tensor,
    shape: MixerShape,
    segments: PackedSegments | None,
) -> None:
    """The gradient of z into `dproj`. One launch."""
    total, batch = proj.shape[0], proj.shape[1]
    gate_backward[(_blocks(total * shape.layout.value_heads, _OUT_ROWS), batch)](
        o, proj, norm_weight, dout, dproj, total, total if segments is None else segments.used, **_out_options(shape)
    )


def grad_in(
    grads: KernelGrads,
    proj: torch.Tensor,
    gates: Gates,
    dproj: torch.Tensor,
    shape: MixerShape,
    segments: PackedSegments | None,
) -> torch.Tensor:
    """Gradients of q, k, v, b and a into `dproj`; per-block sums of the parameters' gradients. One launch."""
    total, layout = proj.shape[0], shape.layout
    blocks = _blocks(total, _GRAD_TOKENS)
    width = (shape.window + shape.bias) * layout.conv_dim + 2 * layout.value_heads
    sums = proj.new_empty((blocks * shape.batch, width), dtype=torch.float32)
    mixer_in_backward[_in_grid(shape, blocks)](
        proj,
        gates.conv_weight,
        gates.conv_weight if gates.conv_bias is None else gates.conv_bias,
        gates.A_log,
        gates.dt_bias,
        _row_starts(segments, proj),
        grads.dq,
        grads.dk,
        grads.dk if grads.dk2 is None else grads.dk2,
        grads.dv,
        grads.dg,
        grads.dg if grads.dg2 is None else grads.dg2,
        grads.dbeta,
        dproj,
        sums,
        total,
        GROUP=grads.dq.shape[2] // layout.key_heads,
        SECOND_K=grads.dk2 is not None,
        SECOND_G=grads.dg2 is not None,
        PARTS_G=1 if grads.dg.dim() == 3 else grads.dg.shape[0],
        CHUNK=grads.chunk,
        maxnreg=_GRAD_REGISTERS,
        UNROLL=_GRAD_UNROLL,
        AHEAD=_GRAD_AHEAD,
        **_in_options(shape, _GRAD_TOKENS),
    )
    return sums


def total_sums(
    in_sums: torch.Tensor, out_sums: torch.Tensor, gates: Gates, norm_weight: torch.Tensor, shape: MixerShape
) -> tuple[Gates, torch.Tensor]:
    """Gradients of all parameters, in their own dtypes, from the per-block sums. One launch."""
    layout = shape.layout
    grads = Gates(
        torch.empty_like(gates.conv_weight, memory_format=torch.contiguous_format),
        None if gates.conv_bias is None else torch.empty_like(gates.conv_bias),
        torch.empty_like(gates.A_log),
        torch.empty_like(gates.dt_bias),
    )
    dnorm_weight = torch.empty_like(norm_weight)
    grid = (_blocks(layout.value_dim, _NORM_COLS) + _blocks(in_sums.shape[1], _SUM_COLS),)
    add_sums[grid](
        in_sums,
        out_sums,
        grads.conv_weight,
        grads.conv_weight if grads.conv_bias is None else grads.conv_bias,
        grads.A_log,
        grads.dt_bias,
        dnorm_weight,
        in_sums.shape[0],
        out_sums.shape[0],
        C=layout.conv_dim,
        W=shape.window,
        HV=layout.value_heads,
        V=layout.value_dim,
        ROWS=_SUM_ROWS,
        COLS=_SUM_COLS,
        NORM_ROWS=_NORM_ROWS,
        NORM_COLS=_NORM_COLS,
        HAS_BIAS=shape.bias,
        num_warps=8,
    )
    return grads, dnorm_weight
