"""Kernel that adds up the per-block sums of parameter gradients, always in the same order."""

import triton
import triton.language as tl

__all__ = ["add_sums"]


@triton.jit
def _column_sums(sums, first, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    cols = first + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for begin in range(0, rows, ROWS):
        n = begin + tl.arange(0, ROWS)
        ptrs = sums + n.to(tl.int64)[:, None] * WIDTH + cols[None, :]
        total += tl.load(ptrs, mask=(n < rows)[:, None] & (cols < WIDTH)[None, :], other=0.0)
    return cols, tl.sum(total, axis=0)


@triton.jit(
    do_not_specialize=["in_rows", "out_rows"],
    do_not_specialize_on_alignment=["dconv_weight", "dconv_bias", "da_log", "ddt_bias", "dnorm_weight", "out_sums"],
)
def add_sums(
    in_sums,
    out_sums,
    dconv_weight,
    dconv_bias,
    da_log,
    ddt_bias,
    dnorm_weight,
    in_rows,
    out_rows,
    C: tl.constexpr,
    W: tl.constexpr,
    HV: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    NORM_ROWS: tl.constexpr,
    NORM_COLS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Grid: a program per `NORM_COLS` columns of `out_sums` `[out_rows, V]`, then one per `COLS` columns of `in_sums`.

    `in_sums` `[in_rows, (W + HAS_BIAS) * C + 2 * HV]` as `mixer_in_backward` leaves it; `dconv_weight` `[C, W]`.
    """
    CW: tl.constexpr = (W + HAS_BIAS) * C + 2 * HV
    NORM_PROGRAMS: tl.constexpr = (V + NORM_COLS - 1) // NORM_COLS
    program = tl.program_id(0)
    if program < NORM_PROGRAMS:
        norm_cols, norm_total = _column_sums(out_sums, program * NORM_COLS, out_rows, V, NORM_ROWS, NORM_COLS)
        tl.store(dnorm_weight + norm_cols, norm_total.to(dnorm_weight.dtype.element_ty), mask=norm_cols < V)
    else:
        cols, total = _column_sums(in_sums, (program - NORM_PROGRAMS) * COLS, in_rows, CW, ROWS, COLS)
        target = (cols % C) * W + cols // C
        tl.store(dconv_weight + target, total.to(dconv_weight.dtype.element_ty), mask=cols < W * C)
        if HAS_BIAS:
            in_bias = (cols >= W * C) & (cols < (W + 1) * C)
            tl.store(dconv_bias + cols - W * C, total.to(dconv_bias.dtype.element_ty), mask=in_bias)
        head = cols - (W + HAS_BIAS) * C
        tl.store(da_log + head, total.to(da_log.dtype.element_ty), mask=(head >= 0) & (head < HV))
        tl.store(ddt_bias + head - HV, total.to(ddt_bias.dtype.element_ty), mask=(head >= HV) & (head < 2 * HV))
