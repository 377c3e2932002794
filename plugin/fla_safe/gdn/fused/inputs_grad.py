"""Kernel from the chunk kernel's gradients to the projection's gradient, and per-block sums for the parameters."""

# Triton's conditional expression wants both sides of one type.
# ruff: noqa: SIM108

import triton
import triton.language as tl

from fla_safe.gdn.fused.gates_grad import gates_backward
from fla_safe.gdn.fused.rows import (
    NOWHERE,
    columns_of_slot,
    load_rows,
    row_pointers,
    row_starts,
    seen,
    sigmoid,
    store_rows,
    tap,
)

__all__ = ["mixer_in_backward"]


@triton.jit
def _grad_rows(
    d,
    d2,
    keep,
    has_d2,
    D: tl.constexpr,
    BD: tl.constexpr,
    GROUP: tl.constexpr,
    SECOND: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Gradient of one head's rows: the sum over the `GROUP` heads that share it, and over both addends."""
    total = load_rows(d, keep, D, BD, MASKED)
    for j in tl.static_range(1, GROUP):
        total += load_rows(d + j * D, keep, D, BD, MASKED)
    if SECOND:
        for j in tl.static_range(0, GROUP):
            total += load_rows(d2 + j * D, keep & has_d2, D, BD, True)
    return total


@triton.jit
def _grad_pre(x0, x1, x2, x3, d, w0, w1, w2, w3, bias, eps, NORM: tl.constexpr):
    """Gradient before the SiLU, of rows whose inputs and output gradients are already masked."""
    pre = bias + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
    s = sigmoid(pre)
    y = pre * s
    if NORM:
        r = tl.rsqrt(tl.sum(y * y, axis=1, keep_dims=True) + eps)
        dot = tl.sum(y * d, axis=1, keep_dims=True)
        d = r * d - y * (r * r * r * dot)
    return d * (s + y * (1.0 - s))


@triton.jit
def _head(
    x,
    weight,
    bias,
    starts,
    d,
    d2,
    dx,
    sums,
    begin,
    total,
    has_d2,
    eps,
    C: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    X_STRIDE: tl.constexpr,
    D_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    SECOND: tl.constexpr,
    W: tl.constexpr,
    CHAINS: tl.constexpr,
    LENGTH: tl.constexpr,
    NORM: tl.constexpr,
    PACKED: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One head's columns: each chain walks its tokens from the last to the first.

    The gradient of row t needs those before the SiLU of rows t to t + 3: the three later ones stay in registers, and
    each chain first computes the three that follow its last token.
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

    # `ta`: first of the four rows of an iteration; the first iteration is the four rows after the chain.
    ta = begin + tl.arange(0, CHAINS)[:, None] * LENGTH + LENGTH
    px = row_pointers(x, ta, BD, X_STRIDE)
    q1 = row_pointers(d, ta, BD, D_STRIDE)
    q2 = row_pointers(d2, ta, BD, D_STRIDE)
    po = row_pointers(dx, ta, BD, X_STRIDE)
    xd = load_rows(px + 3 * X_STRIDE, ta + 3 < total, D, BD, MASKED)
    xc = load_rows(px + 2 * X_STRIDE, ta + 2 < total, D, BD, MASKED)
    xb = load_rows(px + X_STRIDE, ta + 1 < total, D, BD, MASKED)
    pe = tl.zeros([CHAINS, BD], tl.float32)
    pf = tl.zeros([CHAINS, BD], tl.float32)
    pg = tl.zeros([CHAINS, BD], tl.float32)
    fe = ta * 0
    ff = fe
    fg = fe
    dw0 = tl.zeros([CHAINS, BD], tl.float32)
    dw1 = tl.zeros([CHAINS, BD], tl.float32)
    dw2 = tl.zeros([CHAINS, BD], tl.float32)
    dw3 = tl.zeros([CHAINS, BD], tl.float32)
    db = tl.zeros([CHAINS, BD], tl.float32)
    for i in range(0, LENGTH + 4, 4):
        own = i > 0
        tb = ta + 1
        tc = ta + 2
        td = ta + 3
        xa = load_rows(px, ta < total, D, BD, MASKED)
        u1 = load_rows(px - X_STRIDE, (ta >= 1) & (ta - 1 < total), D, BD, MASKED)
        u2 = load_rows(px - 2 * X_STRIDE, (ta >= 2) & (ta - 2 < total), D, BD, MASKED)
        u3 = load_rows(px - 3 * X_STRIDE, (ta >= 3) & (ta - 3 < total), D, BD, MASKED)
        fa = row_starts(starts, ta, total, PACKED, MASKED)
        fb = row_starts(starts, tb, total, PACKED, MASKED)
        fc = row_starts(starts, tc, total, PACKED, MASKED)
        fd = row_starts(starts, td, total, PACKED, MASKED)

        # Two rows at a time: gradients of all four in flight, in up to four parts each, would spill registers.
        dd = _grad_rows(q1 + 3 * D_STRIDE, q2 + 3 * D_STRIDE, td >= fd, has_d2, D, BD, GROUP, SECOND, MASKED)
        dc = _grad_rows(q1 + 2 * D_STRIDE, q2 + 2 * D_STRIDE, tc >= fc, has_d2, D, BD, GROUP, SECOND, MASKED)
        x0 = seen(xd, td, fd, 0, MASKED)
        x1 = seen(xc, td, fd, 1, MASKED)
        x2 = seen(xb, td, fd, 2, MASKED)
        x3 = seen(xa, td, fd, 3, MASKED)
        pd = _grad_pre(x0, x1, x2, x3, dd, w0, w1, w2, w3, b, eps, NORM)
        dw0 += pd * x0
        dw1 += pd * x1
        dw2 += pd * x2
        dw3 += pd * x3
        out = w0 * pd + w1 * seen(pe, ta + 4, fe, 1, MASKED)
        out += w2 * seen(pf, ta + 5, ff, 2, MASKED) + w3 * seen(pg, ta + 6, fg, 3, MASKED)
        store_rows(po + 3 * X_STRIDE, out, own & (td < total), D, BD, True)

        x0 = seen(xc, tc, fc, 0, MASKED)
        x1 = seen(xb, tc, fc, 1, MASKED)
        x2 = seen(xa, tc, fc, 2, MASKED)
        x3 = seen(u1, tc, fc, 3, MASKED)
        pc = _grad_pre(x0, x1, x2, x3, dc, w0, w1, w2, w3, b, eps, NORM)
        dw0 += pc * x0
        dw1 += pc * x1
        dw2 += pc * x2
        dw3 += pc * x3
        out = w0 * pc + w1 * seen(pd, td, fd, 1, MASKED)
        out += w2 * seen(pe, ta + 4, fe, 2, MASKED) + w3 * seen(pf, ta + 5, ff, 3, MASKED)
        store_rows(po + 2 * X_STRIDE, out, own & (tc < total), D, BD, True)

        dbb = _grad_rows(q1 + D_STRIDE, q2 + D_STRIDE, tb >= fb, has_d2, D, BD, GROUP, SECOND, MASKED)
        da = _grad_rows(q1, q2, ta >= fa, has_d2, D, BD, GROUP, SECOND, MASKED)
        x0 = seen(xb, tb, fb, 0, MASKED)
        x1 = seen(xa, tb, fb, 1, MASKED)
        x2 = seen(u1, tb, fb, 2, MASKED)
        x3 = seen(u2, tb, fb, 3, MASKED)
        pb = _grad_pre(x0, x1, x2, x3, dbb, w0, w1, w2, w3, b, eps, NORM)
        dw0 += pb * x0
        dw1 += pb * x1
        dw2 += pb * x2
        dw3 += pb * x3
        out = w0 * pb + w1 * seen(pc, tc, fc, 1, MASKED)
        out += w2 * seen(pd, td, fd, 2, MASKED) + w3 * seen(pe, ta + 4, fe, 3, MASKED)
        store_rows(po + X_STRIDE, out, own & (tb < total), D, BD, True)

        x0 = seen(xa, ta, fa, 0, MASKED)
        x1 = seen(u1, ta, fa, 1, MASKED)
        x2 = seen(u2, ta, fa, 2, MASKED)
        x3 = seen(u3, ta, fa, 3, MASKED)
        pa = _grad_pre(x0, x1, x2, x3, da, w0, w1, w2, w3, b, eps, NORM)
        dw0 += pa * x0
        dw1 += pa * x1
        dw2 += pa * x2
        dw3 += pa * x3
        out = w0 * pa + w1 * seen(pb, tb, fb, 1, MASKED)
        out += w2 * seen(pc, tc, fc, 2, MASKED) + w3 * seen(pd, td, fd, 3, MASKED)
        store_rows(po, out, own & (ta < total), D, BD, True)

        if HAS_BIAS:
            db += pa + pb + pc + pd
        if not own:
            dw0 = tl.zeros([CHAINS, BD], tl.float32)
            dw1 = dw0
            dw2 = dw0
            dw3 = dw0
            db = dw0
        pe = pa
        pf = pb
        pg = pc
        fe = fa
        ff = fb
        fg = fc
        xd = u1
        xc = u2
        xb = u3
        ta -= 4
        px -= 4 * X_STRIDE
        po -= 4 * X_STRIDE
        q1 -= 4 * D_STRIDE
        q2 -= 4 * D_STRIDE

    inside = cols < D
    tl.store(sums + (W - 1) * C + cols, tl.sum(dw0, axis=0), mask=inside)
    if W > 1:
        tl.store(sums + (W - 2) * C + cols, tl.sum(dw1, axis=0), mask=inside)
    if W > 2:
        tl.store(sums + (W - 3) * C + cols, tl.sum(dw2, axis=0), mask=inside)
    if W > 3:
        tl.store(sums + (W - 4) * C + cols, tl.sum(dw3, axis=0), mask=inside)
    if HAS_BIAS:
        tl.store(sums + W * C + cols, tl.sum(db, axis=0), mask=inside)


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
    """Grid (2 H + HV + 1 slots, blocks of `TOKENS` rows, batch), as `mixer_in_forward`.

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
    slot = tl.program_id(0)
    begin = tl.program_id(1) * TOKENS
    batch = tl.program_id(2)
    x = proj + batch * P
    dx = dproj + batch * P
    row = batch.to(tl.int64) * total
    sums += (batch * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * CW
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
        # All rows that this block touches, three before and four after included, lie in one segment.
        interior = (begin >= 3) & (begin + TOKENS + 4 <= total)
        if PACKED:
            last = tl.load(starts + begin + TOKENS + 3, mask=begin + TOKENS + 4 <= total, other=NOWHERE)
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
                _head(
                    x, weight, bias, starts, d, d2, dx, sums, begin, total, is_k, eps, C, K, BK, X_STRIDE,
                    H * GROUP * K, GROUP, SECOND_K, W, CHAINS_K, TOKENS // CHAINS_K, L2NORM, PACKED, False, HAS_BIAS,
                )  # fmt: skip
            else:
                _head(
                    x, weight, bias, starts, d, d2, dx, sums, begin, total, is_k, eps, C, K, BK, X_STRIDE,
                    H * GROUP * K, GROUP, SECOND_K, W, CHAINS_K, TOKENS // CHAINS_K, L2NORM, PACKED, True, HAS_BIAS,
                )  # fmt: skip
        else:
            d = dv + row * (HV * V) + (slot - 2 * H) * V
            if interior:
                _head(
                    x, weight, bias, starts, d, d, dx, sums, begin, total, False, eps, C, V, BV, X_STRIDE,
                    HV * V, 1, False, W, CHAINS_V, TOKENS // CHAINS_V, False, PACKED, False, HAS_BIAS,
                )  # fmt: skip
            else:
                _head(
                    x, weight, bias, starts, d, d, dx, sums, begin, total, False, eps, C, V, BV, X_STRIDE,
                    HV * V, 1, False, W, CHAINS_V, TOKENS // CHAINS_V, False, PACKED, True, HAS_BIAS,
                )  # fmt: skip
