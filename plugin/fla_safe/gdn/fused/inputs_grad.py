"""Kernel from the chunk kernel's gradients to the projection's gradient, and per-block sums for the parameters."""

# Triton's conditional expression wants both sides of one type.
# ruff: noqa: SIM108

import triton
import triton.language as tl

from fla_safe.gdn.fused.conv_grad import head_backward
from fla_safe.gdn.fused.gates import gates_backward
from fla_safe.gdn.fused.rows import NOWHERE, columns_of_slot, place

__all__ = ["mixer_in_backward"]


@triton.jit(
    do_not_specialize=["total"],
    do_not_specialize_on_alignment=["conv_weight", "conv_bias", "a_log", "dt_bias", "starts"],
)
def mixer_in_backward(
    proj,
    conv_weight,
    conv_bias,
    a_log,
    dt_bias,
    starts,
    dq,
    dk,
    dk2,
    dv,
    dg,
    dg2,
    dbeta,
    dproj,
    sums,
    total,
    eps: tl.constexpr,
    BATCH: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
    W: tl.constexpr,
    TOKENS: tl.constexpr,
    CHAINS_K: tl.constexpr,
    CHAINS_V: tl.constexpr,
    UNROLL: tl.constexpr,
    AHEAD: tl.constexpr,
    GROUP: tl.constexpr,
    SECOND_K: tl.constexpr,
    SECOND_G: tl.constexpr,
    PARTS_G: tl.constexpr,
    CHUNK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    L2NORM: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Grid ((2 H + HV + 1 slots) * blocks of `TOKENS` rows, batch), as `mixer_in_forward`.

    `dq`, `dk`, `dk2` `[BATCH, total, H * GROUP, K]`: heads of a group, and `dk2` if `SECOND_K`, are summed here; `dg`
    and `dg2` likewise, and the `PARTS_G` parts of `dg`; see `KernelGrads` for `CHUNK`. Writes every column of `dproj`
    `[total, BATCH, P]` but those of z, and a row of `sums` a block:
    `[W + HAS_BIAS, C]` for the convolution, then `[2, HV]` for A_log and dt_bias.
    """
    P: tl.constexpr = 2 * H * K + 2 * HV * V + 2 * HV
    C: tl.constexpr = 2 * H * K + HV * V
    CW: tl.constexpr = (W + HAS_BIAS) * C + 2 * HV
    X_STRIDE: tl.constexpr = BATCH * P
    STEP: tl.constexpr = 16 if CHUNK > 0 else 32
    blocks = tl.cdiv(total, TOKENS)
    slot, block = place(tl.program_id(0), H, HV)
    begin = block * TOKENS
    batch = tl.program_id(1)
    x = proj + batch * P
    dx = dproj + batch * P
    row = batch.to(tl.int64) * total
    sums += (batch * blocks + block).to(tl.int64) * CW
    if slot == 2 * H + HV:
        gates_backward(
            x, a_log, dt_bias, starts, dg + row * HV, dg2 + row * HV, dbeta + row * HV, dx, sums + (W + HAS_BIAS) * C,
            begin, total, tl.cast(total, tl.int64) * (BATCH * HV), H, HV, K, V, X_STRIDE, TOKENS, STEP, BH,
            INTERLEAVED, PACKED, SECOND_G, PARTS_G, CHUNK,
        )  # fmt: skip
    else:
        column, channel = columns_of_slot(slot, H, HV, K, V, INTERLEAVED)
        x += column
        dx += column
        sums += channel
        weight = conv_weight + channel * W
        bias = conv_bias + channel
        # All rows that this block uses, three before and three after included, lie in one segment; none that it reads
        # lies before all rows.
        interior = (begin >= 3 + AHEAD) & (begin + TOKENS + 3 <= total)
        if PACKED:
            last = tl.load(starts + begin + TOKENS + 2, mask=begin + TOKENS + 3 <= total, other=NOWHERE)
            interior = interior & (last <= begin - 3)
        if slot < 2 * H:
            first = row * (H * GROUP * K) + (slot % H) * (GROUP * K)
            is_k = slot >= H
            if is_k:
                d = dk + first
            else:
                d = dq + first
            d2 = dk2 + first
            if interior:
                head_backward(
                    x, weight, bias, starts, d, d2, dx, sums, begin, total, is_k, eps, C, K, BK, X_STRIDE,
                    H * GROUP * K, GROUP, SECOND_K, W, CHAINS_K, TOKENS // CHAINS_K, UNROLL, AHEAD, L2NORM,
                    PACKED, False, HAS_BIAS,
                )  # fmt: skip
            else:
                head_backward(
                    x, weight, bias, starts, d, d2, dx, sums, begin, total, is_k, eps, C, K, BK, X_STRIDE,
                    H * GROUP * K, GROUP, SECOND_K, W, CHAINS_K, TOKENS // CHAINS_K, UNROLL, AHEAD, L2NORM,
                    PACKED, True, HAS_BIAS,
                )  # fmt: skip
        else:
            d = dv + row * (HV * V) + (slot - 2 * H) * V
            if interior:
                head_backward(
                    x, weight, bias, starts, d, d, dx, sums, begin, total, False, eps, C, V, BV, X_STRIDE,
                    HV * V, 1, False, W, CHAINS_V, TOKENS // CHAINS_V, UNROLL, AHEAD, False, PACKED, False, HAS_BIAS,
                )  # fmt: skip
            else:
                head_backward(
                    x, weight, bias, starts, d, d, dx, sums, begin, total, False, eps, C, V, BV, X_STRIDE,
                    HV * V, 1, False, W, CHAINS_V, TOKENS // CHAINS_V, UNROLL, AHEAD, False, PACKED, True, HAS_BIAS,
                )  # fmt: skip
