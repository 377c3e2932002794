"""The convolution's gradient, part of `mixer_in_backward`: one head's columns of a block of rows."""

# Triton's conditional expression wants both sides of one type.
# ruff: noqa: SIM108

import triton
import triton.language as tl

from fla_safe.gdn.fused.rows import load_rows, row_pointers, row_starts, seen, sigmoid, store_rows, tap

__all__ = ["head_backward"]


@triton.jit
def _read_row(
    px,
    d,
    d2,
    starts,
    t,
    total,
    has_d2,
    D: tl.constexpr,
    BD: tl.constexpr,
    X_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    SECOND: tl.constexpr,
    PACKED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """What row `t` needs and has not been read: its segment's start, input row `t - 3`, its gradient in parts."""
    before = load_rows(px - 3 * X_STRIDE, (t >= 3) & (t - 3 < total), D, BD, MASKED)
    # Read ahead, the last rows of the first block are before all rows, and not used.
    row = (row_starts(starts, tl.maximum(t, 0), total, PACKED, MASKED), before)
    inside = (t >= 0) & (t < total)
    for j in tl.static_range(0, GROUP):
        row = row + (load_rows(d + j * D, inside, D, BD, MASKED),)
    if SECOND:
        for j in tl.static_range(0, GROUP):
            row = row + (load_rows(d2 + j * D, inside & has_d2, D, BD, True),)
    return row


@triton.jit
def _grad_row(row, PARTS: tl.constexpr):
    """Sum over the heads that share this one, and over both addends."""
    total = row[2].to(tl.float32)
    for j in tl.static_range(1, PARTS):
        total += row[2 + j].to(tl.float32)
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
def _row_grad(
    row,
    x0,
    x1,
    x2,
    t,
    w0,
    w1,
    w2,
    w3,
    bias,
    eps,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Of row `t`: its gradient before the SiLU, its inputs in its own segment, and input row `t - 3` as it is."""
    first = row[0]
    x3 = row[1].to(tl.float32)
    dy = seen(_grad_row(row, PARTS), t, first, 0, MASKED)
    s0 = seen(x0, t, first, 0, MASKED)
    s1 = seen(x1, t, first, 1, MASKED)
    s2 = seen(x2, t, first, 2, MASKED)
    s3 = seen(x3, t, first, 3, MASKED)
    return _grad_pre(s0, s1, s2, s3, dy, w0, w1, w2, w3, bias, eps, NORM), s0, s1, s2, s3, x3


@triton.jit
def head_backward(
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
    UNROLL: tl.constexpr,
    AHEAD: tl.constexpr,
    NORM: tl.constexpr,
    PACKED: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One head's columns: each chain walks its tokens from the last to the first.

    The gradient of row t needs those before the SiLU of rows t to t + 3: the three later ones stay in registers, and
    each chain first computes those of the rows that follow its last token. Rows are read `AHEAD` of their use, as
    in the forward kernel.
    """
    AFTER: tl.constexpr = 3
    PARTS: tl.constexpr = GROUP * (1 + SECOND)
    cols = tl.arange(0, BD)
    w0 = tap(weight, 0, D, BD, W)
    w1 = tap(weight, 1, D, BD, W)
    w2 = tap(weight, 2, D, BD, W)
    w3 = tap(weight, 3, D, BD, W)
    if HAS_BIAS:
        b = tl.load(bias + cols, mask=cols < D, other=0.0).to(tl.float32)[None, :]
    else:
        b = 0.0

    t = begin + tl.arange(0, CHAINS)[:, None] * LENGTH + (LENGTH + AFTER - 1)
    px = row_pointers(x, t, BD, X_STRIDE)
    q1 = row_pointers(d, t, BD, D_STRIDE)
    q2 = row_pointers(d2, t, BD, D_STRIDE)
    po = row_pointers(dx, t - AFTER, BD, X_STRIDE)
    x0 = load_rows(px, t < total, D, BD, MASKED).to(tl.float32)
    x1 = load_rows(px - X_STRIDE, t - 1 < total, D, BD, MASKED).to(tl.float32)
    x2 = load_rows(px - 2 * X_STRIDE, t - 2 < total, D, BD, MASKED).to(tl.float32)
    coming = ()
    for j in tl.static_range(0, AHEAD):
        row = _read_row(
            px - j * X_STRIDE, q1 - j * D_STRIDE, q2 - j * D_STRIDE, starts, t - j, total, has_d2,
            D, BD, X_STRIDE, GROUP, SECOND, PACKED, MASKED,
        )  # fmt: skip
        coming = coming + (row,)
    # Of the rows one, two and three later: gradients before the SiLU, and where their segments start.
    # A value each: Triton does not carry a loop variable that begins as another's alias and then takes its place. One
    # may stand for all when scripts/upstream/triton_aliased_loop_variables.py says that it is gone.
    p1 = tl.zeros([CHAINS, BD], tl.float32)
    p2 = tl.zeros([CHAINS, BD], tl.float32)
    p3 = tl.zeros([CHAINS, BD], tl.float32)
    f1 = t * 0
    f2 = t * 0
    f3 = t * 0
    for _ in tl.range(0, AFTER, loop_unroll_factor=1):
        row = _read_row(
            px - AHEAD * X_STRIDE, q1 - AHEAD * D_STRIDE, q2 - AHEAD * D_STRIDE, starts, t - AHEAD, total, has_d2,
            D, BD, X_STRIDE, GROUP, SECOND, PACKED, MASKED,
        )  # fmt: skip
        coming = coming + (row,)
        p0, _s0, _s1, _s2, _s3, x3 = _row_grad(coming[0], x0, x1, x2, t, w0, w1, w2, w3, b, eps, PARTS, NORM, MASKED)
        f0 = coming[0][0]
        coming = coming[1:]
        p3 = p2
        p2 = p1
        p1 = p0
        f3 = f2
        f2 = f1
        f1 = f0
        x0 = x1
        x1 = x2
        x2 = x3
        t -= 1
        px -= X_STRIDE
        q1 -= D_STRIDE
        q2 -= D_STRIDE
    dw0 = tl.zeros([CHAINS, BD], tl.float32)
    dw1 = tl.zeros([CHAINS, BD], tl.float32)
    dw2 = tl.zeros([CHAINS, BD], tl.float32)
    dw3 = tl.zeros([CHAINS, BD], tl.float32)
    db = tl.zeros([CHAINS, BD], tl.float32)
    for _ in tl.range(0, LENGTH, loop_unroll_factor=UNROLL):
        row = _read_row(
            px - AHEAD * X_STRIDE, q1 - AHEAD * D_STRIDE, q2 - AHEAD * D_STRIDE, starts, t - AHEAD, total, has_d2,
            D, BD, X_STRIDE, GROUP, SECOND, PACKED, MASKED,
        )  # fmt: skip
        coming = coming + (row,)
        p0, s0, s1, s2, s3, x3 = _row_grad(coming[0], x0, x1, x2, t, w0, w1, w2, w3, b, eps, PARTS, NORM, MASKED)
        f0 = coming[0][0]
        coming = coming[1:]
        out = w0 * p0 + w1 * seen(p1, t + 1, f1, 1, MASKED)
        out += w2 * seen(p2, t + 2, f2, 2, MASKED) + w3 * seen(p3, t + 3, f3, 3, MASKED)
        store_rows(po, out, t < total, D, BD, MASKED)
        dw0 += p0 * s0
        dw1 += p0 * s1
        dw2 += p0 * s2
        dw3 += p0 * s3
        if HAS_BIAS:
            db += p0
        p3 = p2
        p2 = p1
        p1 = p0
        f3 = f2
        f2 = f1
        f1 = f0
        x0 = x1
        x1 = x2
        x2 = x3
        t -= 1
        px -= X_STRIDE
        po -= X_STRIDE
        q1 -= D_STRIDE
        q2 -= D_STRIDE

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
