"""The gates beta and g and their gradients, parts of `mixer_in_forward` and `mixer_in_backward`."""

import triton
import triton.language as tl

from fla_safe.gdn.fused.rows import row_starts, sigmoid

__all__ = ["gates_backward", "gates_forward"]


@triton.jit
def _columns(heads, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Columns of the raw beta and of the raw decay (`b`, `a`) of value heads `heads`."""
    R: tl.constexpr = HV // H
    if INTERLEAVED:
        b = (heads // R) * (2 * K + 2 * R * V + 2 * R) + 2 * K + 2 * R * V + heads % R
        a = b + R
    else:
        b = 2 * H * K + 2 * HV * V + heads
        a = b + HV
    return b, a


@triton.jit
def _log1p(y):
    """log(1 + y) for y in [0, 1], relative error below 2e-5 where log(1 + y) itself cancels."""
    series = y * (1.0 - y * (0.5 - y * (0.33333333 - y * 0.25)))
    return tl.where(y < 0.02, series, tl.log(1.0 + y))


@triton.jit
def _of_heads(
    a_log,
    dt_bias,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Of value heads `[BH]`: which exist, the columns of `b` and `a`, and the rate and shift of the decay."""
    heads = tl.arange(0, BH)
    in_heads = heads < HV
    column_b, column_a = _columns(heads, H, HV, K, V, INTERLEAVED)
    rate = tl.exp(tl.load(a_log + heads, mask=in_heads, other=0.0).to(tl.float32))
    shift = tl.load(dt_bias + heads, mask=in_heads, other=0.0).to(tl.float32)
    return heads, in_heads, column_b, column_a, rate, shift


@triton.jit
def _decay(a, rate):
    """-exp(A_log) softplus(a), of `a` with its shift."""
    return -rate[None, :] * (tl.maximum(a, 0.0) + _log1p(tl.exp(-tl.abs(a))))


@triton.jit
def gates_forward(
    x,
    a_log,
    dt_bias,
    starts,
    g,
    beta,
    begin,
    total,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    X_STRIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    BH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PACKED: tl.constexpr,
):
    """g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b) of `TOKENS` tokens, all heads."""
    heads, in_heads, column_b, column_a, rate, shift = _of_heads(a_log, dt_bias, H, HV, K, V, BH, INTERLEAVED)
    t = begin + tl.arange(0, TOKENS)
    valid = (t >= row_starts(starts, t, total, PACKED, True))[:, None] & in_heads[None, :]
    row = x + (t.to(tl.int64) * X_STRIDE)[:, None]
    a = tl.load(row + column_a[None, :], mask=valid, other=0.0).to(tl.float32) + shift[None, :]
    b = tl.load(row + column_b[None, :], mask=valid, other=0.0).to(tl.float32)
    decay = _decay(a, rate)
    target = t.to(tl.int64)[:, None] * HV + heads[None, :]
    inside = (t < total)[:, None] & in_heads[None, :]
    tl.store(g + target, tl.where(valid, decay, 0.0), mask=inside)
    tl.store(beta + target, tl.where(valid, sigmoid(b), 0.0).to(beta.dtype.element_ty), mask=inside)


@triton.jit
def _load_decay_grad(
    dg,
    dg2,
    source,
    valid,
    stride,
    PARTS_G: tl.constexpr,
    SECOND_G: tl.constexpr,
):
    grad = tl.load(dg + source, mask=valid, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS_G):
        grad += tl.load(dg + part * stride + source, mask=valid, other=0.0).to(tl.float32)
    if SECOND_G:
        grad += tl.load(dg2 + source, mask=valid, other=0.0).to(tl.float32)
    return grad


@triton.jit
def gates_backward(
    x,
    a_log,
    dt_bias,
    starts,
    dg,
    dg2,
    dbeta,
    dx,
    sums,
    begin,
    total,
    stride,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    X_STRIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
    BH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PACKED: tl.constexpr,
    SECOND_G: tl.constexpr,
    PARTS_G: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Gradients of the raw gates of `TOKENS` tokens, and their sums for A_log and dt_bias.

    With `CHUNK`, a row's gradient is summed from that row to its chunk's last: steps go from the last row to the first
    and carry the sum, starting with the rows after the block that its last chunk may reach.
    """
    heads, in_heads, column_b, column_a, rate, shift = _of_heads(a_log, dt_bias, H, HV, K, V, BH, INTERLEAVED)
    sum_a = tl.zeros([STEP, BH], tl.float32)
    sum_dt = tl.zeros([STEP, BH], tl.float32)
    rows = tl.arange(0, STEP)
    carry = tl.zeros([BH], tl.float32)
    carried = begin - 1  # first row of the chunk that the carry belongs to; none yet
    for i in range(0, TOKENS + CHUNK, STEP):
        first = begin + (TOKENS + CHUNK - STEP) - i
        t = first + rows
        start = row_starts(starts, t, total, PACKED, True)
        valid = (t >= start)[:, None] & in_heads[None, :]
        source = t.to(tl.int64)[:, None] * HV + heads[None, :]
        grad = _load_decay_grad(dg, dg2, source, valid, stride, PARTS_G, SECOND_G)
        if CHUNK > 0:
            # Rows of nobody have a gradient of zero, whatever chunk this gives them.
            chunk = t - (t - start) % CHUNK
            later = (rows[None, :] >= rows[:, None]) & (chunk[None, :] == chunk[:, None])
            grad = tl.sum(tl.where(later[:, :, None], grad[None, :, :], 0.0), axis=1)
            grad += tl.where((chunk == carried)[:, None], carry[None, :], 0.0)
            carry = tl.sum(tl.where((rows == 0)[:, None], grad, 0.0), axis=0)
            carried = tl.sum(tl.where(rows == 0, chunk, 0), axis=0)
        own = valid & (first < begin + TOKENS)
        inside = (t < total)[:, None] & in_heads[None, :] & (first < begin + TOKENS)
        row = (t.to(tl.int64) * X_STRIDE)[:, None]
        a = tl.load(x + row + column_a[None, :], mask=own, other=0.0).to(tl.float32) + shift[None, :]
        b = tl.load(x + row + column_b[None, :], mask=own, other=0.0).to(tl.float32)
        grad = tl.where(own, grad, 0.0)
        decay = _decay(a, rate)
        sum_a += grad * decay
        da = grad * -rate[None, :] * sigmoid(a)
        sum_dt += da
        s = sigmoid(b)
        db = tl.load(dbeta + source, mask=own, other=0.0).to(tl.float32) * s * (1.0 - s)
        tl.store(dx + row + column_a[None, :], da.to(dx.dtype.element_ty), mask=inside)
        tl.store(dx + row + column_b[None, :], db.to(dx.dtype.element_ty), mask=inside)
    tl.store(sums + heads, tl.sum(sum_a, axis=0), mask=in_heads)
    tl.store(sums + HV + heads, tl.sum(sum_dt, axis=0), mask=in_heads)
