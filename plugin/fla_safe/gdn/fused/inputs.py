"""Kernel from the projection's output to the chunk kernel's inputs: convolution, SiLU, split, q/k l2norm, gates."""

# Triton's conditional expression wants both sides of one type.
# ruff: noqa: SIM108

import triton
import triton.language as tl

from fla_safe.gdn.fused.gates import gates_forward
from fla_safe.gdn.fused.rows import (
    NOWHERE,
    columns_of_slot,
    load_rows,
    place,
    row_pointers,
    row_starts,
    seen,
    sigmoid,
    store_rows,
    tap,
)

__all__ = ["mixer_in_forward"]


@triton.jit
def _activate(x0, x1, x2, x3, t, first, w0, w1, w2, w3, bias, eps, NORM: tl.constexpr, MASKED: tl.constexpr):
    pre = bias + w0 * seen(x0, t, first, 0, MASKED)
    pre += w1 * seen(x1, t, first, 1, MASKED)
    pre += w2 * seen(x2, t, first, 2, MASKED)
    pre += w3 * seen(x3, t, first, 3, MASKED)
    y = pre * sigmoid(pre)
    if NORM:
        y = y * tl.rsqrt(tl.sum(y * y, axis=1, keep_dims=True) + eps)
    if MASKED:
        # A tail row saw nothing, but a bias would still show.
        y = tl.where(t >= first, y, 0.0)
    return y


@triton.jit
def _head(
    x,
    weight,
    bias,
    starts,
    out,
    begin,
    total,
    eps,
    D: tl.constexpr,
    BD: tl.constexpr,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    W: tl.constexpr,
    CHAINS: tl.constexpr,
    LENGTH: tl.constexpr,
    UNROLL: tl.constexpr,
    AHEAD: tl.constexpr,
    NORM: tl.constexpr,
    PACKED: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One head's columns of `CHAINS * LENGTH` tokens: a chain walks its own, the last three rows in registers.

    Rows are loaded `AHEAD` of their use: a store may alias what follows it, so the compiler moves no load above one.
    """
    cols = tl.arange(0, BD)
    w0 = tap(weight, 0, D, BD, W)
    w1 = tap(weight, 1, D, BD, W)
    w2 = tap(weight, 2, D, BD, W)
    w3 = tap(weight, 3, D, BD, W)
    if HAS_BIAS:
        b = tl.load(bias + cols, mask=cols < D, other=0.0).to(tl.float32)[None, :]
    else:
        b = 0.0
    t = begin + tl.arange(0, CHAINS)[:, None] * LENGTH
    px = row_pointers(x, t, BD, X_STRIDE)
    po = row_pointers(out, t, BD, OUT_STRIDE)
    x3 = load_rows(px - 3 * X_STRIDE, (t >= 3) & (t - 3 < total), D, BD, MASKED).to(tl.float32)
    x2 = load_rows(px - 2 * X_STRIDE, (t >= 2) & (t - 2 < total), D, BD, MASKED).to(tl.float32)
    x1 = load_rows(px - X_STRIDE, (t >= 1) & (t - 1 < total), D, BD, MASKED).to(tl.float32)
    coming = ()
    for j in tl.static_range(0, AHEAD):
        row = load_rows(px + j * X_STRIDE, t + j < total, D, BD, MASKED)
        coming = coming + ((row, row_starts(starts, t + j, total, PACKED, MASKED)),)
    for _ in tl.range(0, LENGTH, loop_unroll_factor=UNROLL):
        last = t + AHEAD
        row = load_rows(px + AHEAD * X_STRIDE, last < total, D, BD, MASKED)
        coming = coming + ((row, row_starts(starts, last, total, PACKED, MASKED)),)
        x0 = coming[0][0].to(tl.float32)
        first = coming[0][1]
        coming = coming[1:]
        y = _activate(x0, x1, x2, x3, t, first, w0, w1, w2, w3, b, eps, NORM, MASKED)
        store_rows(po, y, t < total, D, BD, MASKED)
        x3 = x2
        x2 = x1
        x1 = x0
        t += 1
        px += X_STRIDE
        po += OUT_STRIDE


@triton.jit(
    do_not_specialize=["total"],
    do_not_specialize_on_alignment=["conv_weight", "conv_bias", "a_log", "dt_bias", "starts"],
)
def mixer_in_forward(
    proj,
    conv_weight,
    conv_bias,
    a_log,
    dt_bias,
    starts,
    qkv,
    g,
    beta,
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
    INTERLEAVED: tl.constexpr,
    L2NORM: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Grid ((2 H + HV + 1 slots) * blocks of `TOKENS` rows, batch); see `rows.place`.

    `proj` `[total, BATCH, P]` contiguous; `qkv` holds q and k `[BATCH, total, H, K]` and v `[BATCH, total, HV, V]`, one
    after the other; `g` float32 and `beta` `[BATCH, total, HV]`; `starts` int32 `[total]` (see `rows.NOWHERE`).
    Rows of the tail become zeros whatever `proj` holds there.
    """
    P: tl.constexpr = 2 * H * K + 2 * HV * V + 2 * HV
    X_STRIDE: tl.constexpr = BATCH * P
    slot, block = place(tl.program_id(0), H, HV)
    begin = block * TOKENS
    batch = tl.program_id(1)
    x = proj + batch * P
    row = batch.to(tl.int64) * total
    if slot == 2 * H + HV:
        gates_forward(
            x, a_log, dt_bias, starts, g + row * HV, beta + row * HV, begin, total,
            H, HV, K, V, X_STRIDE, TOKENS, BH, INTERLEAVED, PACKED,
        )  # fmt: skip
    else:
        column, channel = columns_of_slot(slot, H, HV, K, V, INTERLEAVED)
        x += column
        weight = conv_weight + channel * W
        bias = conv_bias + channel
        # All rows that this block uses lie in one segment, none that it reads past the last: no masks at all.
        interior = (begin >= 3) & (begin + TOKENS + AHEAD <= total)
        if PACKED:
            last = tl.load(starts + begin + TOKENS - 1, mask=begin + TOKENS <= total, other=NOWHERE)
            interior = interior & (last <= begin - 3)
        rows = tl.num_programs(1).to(tl.int64) * total
        if slot < 2 * H:
            out = qkv + (slot // H) * rows * (H * K) + row * (H * K) + (slot % H) * K
            if interior:
                _head(
                    x, weight, bias, starts, out, begin, total, eps, K, BK, X_STRIDE, H * K,
                    W, CHAINS_K, TOKENS // CHAINS_K, UNROLL, AHEAD, L2NORM, PACKED, False, HAS_BIAS,
                )  # fmt: skip
            else:
                _head(
                    x, weight, bias, starts, out, begin, total, eps, K, BK, X_STRIDE, H * K,
                    W, CHAINS_K, TOKENS // CHAINS_K, UNROLL, AHEAD, L2NORM, PACKED, True, HAS_BIAS,
                )  # fmt: skip
        else:
            out = qkv + 2 * rows * (H * K) + row * (HV * V) + (slot - 2 * H) * V
            if interior:
                _head(
                    x, weight, bias, starts, out, begin, total, eps, V, BV, X_STRIDE, HV * V,
                    W, CHAINS_V, TOKENS // CHAINS_V, UNROLL, AHEAD, False, PACKED, False, HAS_BIAS,
                )  # fmt: skip
            else:
                _head(
                    x, weight, bias, starts, out, begin, total, eps, V, BV, X_STRIDE, HV * V,
                    W, CHAINS_V, TOKENS // CHAINS_V, UNROLL, AHEAD, False, PACKED, True, HAS_BIAS,
                )  # fmt: skip
