"""Kernels of the gated RMSNorm, reading the gate from the projection and writing what the output projection reads."""

import triton
import triton.language as tl

from fla_safe.gdn.fused.rows import sigmoid, z_columns

__all__ = ["gate_backward", "mixer_out_backward", "mixer_out_forward"]


@triton.jit
def _locate(
    first,
    batch,
    total,
    used,
    BATCH: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Where `ROWS` (token, head) pairs `n` = t * HV + head from `first` on lie, `[ROWS, BV]` each.

    Offsets in `o`, in the output, and of z in `proj`; which elements exist, and which of them lie before row `used`.
    """
    P: tl.constexpr = 2 * H * K + 2 * HV * V + 2 * HV
    n = (first + tl.arange(0, ROWS))[:, None]
    t = n // HV
    head = n % HV
    cols = tl.arange(0, BV)[None, :]
    far = t.to(tl.int64)
    in_o = (batch.to(tl.int64) * total * HV + n) * V + cols
    in_out = ((far * BATCH + batch) * HV + head) * V + cols
    in_z = (far * BATCH + batch) * P + z_columns(head, H, HV, K, V, INTERLEAVED) + cols
    inside = t < total
    valid = t < used
    if V != BV:
        inside = inside & (cols < V)
        valid = valid & (cols < V)
    return in_o, in_out, in_z, inside, valid


@triton.jit
def _load_weight(norm_weight, V: tl.constexpr, BV: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """The norm's factor `[1, BV]`."""
    cols = tl.arange(0, BV)[None, :]
    weight = tl.load(norm_weight + cols, mask=cols < V, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    return weight


@triton.jit
def _normalise(x, eps, V: tl.constexpr):
    """`x` over its root mean square, and one over that."""
    r = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) * (1.0 / V) + eps)
    return x * r, r


@triton.jit(do_not_specialize=["total", "used"], do_not_specialize_on_alignment=["norm_weight"])
def mixer_out_forward(
    o,
    proj,
    norm_weight,
    out,
    total,
    used,
    eps: tl.constexpr,
    BATCH: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    """Grid (blocks of `ROWS` (token, head) pairs, batch): RMSNorm(o) * weight * silu(z), zeros from row `used` on.

    `o` `[BATCH, total, HV, V]`, `proj` `[total, BATCH, P]`, `out` `[total, BATCH, HV * V]`.
    """
    in_o, in_out, in_z, inside, valid = _locate(
        tl.program_id(0) * ROWS, tl.program_id(1), total, used, BATCH, H, HV, K, V, BV, ROWS, INTERLEAVED
    )
    x = tl.load(o + in_o, mask=valid, other=0.0).to(tl.float32)
    z = tl.load(proj + in_z, mask=valid, other=0.0).to(tl.float32)
    x, _ = _normalise(x, eps, V)
    y = x * _load_weight(norm_weight, V, BV, ZERO_CENTERED) * (z * sigmoid(z))
    tl.store(out + in_out, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["total", "used"], do_not_specialize_on_alignment=["norm_weight"])
def mixer_out_backward(
    o,
    proj,
    norm_weight,
    dout,
    do,
    sums,
    total,
    used,
    eps: tl.constexpr,
    BATCH: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    """Grid (blocks of `ROWS * STEPS` pairs, batch): gradient of o, and a row of `sums` `[*, V]` for the norm's weight.

    Shapes as in `mixer_out_forward`; `do` as `o`, `dout` as `out`.
    """
    batch = tl.program_id(1)
    weight = _load_weight(norm_weight, V, BV, ZERO_CENTERED)
    dweight = tl.zeros([ROWS, BV], tl.float32)
    begin = tl.program_id(0) * (ROWS * STEPS)
    for i in range(0, STEPS):
        in_o, in_out, in_z, inside, valid = _locate(
            begin + i * ROWS, batch, total, used, BATCH, H, HV, K, V, BV, ROWS, INTERLEAVED
        )
        x = tl.load(o + in_o, mask=valid, other=0.0).to(tl.float32)
        z = tl.load(proj + in_z, mask=valid, other=0.0).to(tl.float32)
        dy = tl.load(dout + in_out, mask=valid, other=0.0).to(tl.float32)
        x, r = _normalise(x, eps, V)
        dy = dy * (z * sigmoid(z))
        dweight += dy * x
        dx = dy * weight
        dx = r * (dx - x * (tl.sum(dx * x, axis=1, keep_dims=True) * (1.0 / V)))
        tl.store(do + in_o, dx.to(do.dtype.element_ty), mask=inside)
    row = (batch * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    cols = tl.arange(0, BV)
    tl.store(sums + row * V + cols, tl.sum(dweight, axis=0), mask=cols < V)


@triton.jit(do_not_specialize=["total", "used"], do_not_specialize_on_alignment=["norm_weight"])
def gate_backward(
    o,
    proj,
    norm_weight,
    dout,
    dproj,
    total,
    used,
    eps: tl.constexpr,
    BATCH: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    """Gradient of z into `dproj`, which is shaped as `proj`; grid and all else as in `mixer_out_forward`.

    Apart from `mixer_out_backward`, though both read the same: so `dproj`, the largest tensor of the backward pass,
    need not be there while the chunk kernel holds its intermediates.
    """
    in_o, in_out, in_z, inside, valid = _locate(
        tl.program_id(0) * ROWS, tl.program_id(1), total, used, BATCH, H, HV, K, V, BV, ROWS, INTERLEAVED
    )
    x = tl.load(o + in_o, mask=valid, other=0.0).to(tl.float32)
    z = tl.load(proj + in_z, mask=valid, other=0.0).to(tl.float32)
    dy = tl.load(dout + in_out, mask=valid, other=0.0).to(tl.float32)
    x, _ = _normalise(x, eps, V)
    s = sigmoid(z)
    dz = dy * x * _load_weight(norm_weight, V, BV, ZERO_CENTERED) * (s + z * s * (1.0 - s))
    tl.store(dproj + in_z, dz.to(dproj.dtype.element_ty), mask=inside)
