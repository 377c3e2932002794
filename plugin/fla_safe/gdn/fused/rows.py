"""Building blocks shared by the fused kernels: where a head's columns lie, which rows a token may see, row loads."""

# Triton's conditional expression wants both sides of one type.
# ruff: noqa: SIM108

import triton
import triton.language as tl

from fla_safe.gdn.segments import NO_SEGMENT

__all__ = [
    "NOWHERE",
    "columns_of_slot",
    "load_rows",
    "place",
    "row_pointers",
    "row_starts",
    "seen",
    "sigmoid",
    "store_rows",
    "tap",
    "z_columns",
]

_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)

NOWHERE = tl.constexpr(NO_SEGMENT)
"""Start of the segment of a row that belongs to nobody (the pack's tail), so that it sees no row."""


@triton.jit
def place(pid, H: tl.constexpr, HV: tl.constexpr):
    """Slot and block of rows of program `pid`: H q heads, H k heads, HV v heads and the gates, of each block."""
    slots: tl.constexpr = 2 * H + HV + 1
    return pid % slots, pid // slots


@triton.jit
def columns_of_slot(
    slot, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """First projection column and convolution channel of a slot: H q heads, then H k heads, then HV v heads."""
    R: tl.constexpr = HV // H
    if INTERLEAVED:
        # Products with a constant tell the compiler how far each head's columns are aligned.
        if slot < 2 * H:
            head = slot % H
            inner = (slot // H) * K
        else:
            head = (slot - 2 * H) // R
            inner = 2 * K + ((slot - 2 * H) % R) * V
        column = head * (2 * K + 2 * R * V + 2 * R) + inner
        channel = head * (2 * K + R * V) + inner
    else:
        if slot < 2 * H:
            column = slot * K
        else:
            column = 2 * H * K + (slot - 2 * H) * V
        channel = column
    return column, channel


@triton.jit
def z_columns(heads, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, INTERLEAVED: tl.constexpr):
    """First column of the output gate `z` of value heads `heads`."""
    R: tl.constexpr = HV // H
    if INTERLEAVED:
        columns = (heads // R) * (2 * K + 2 * R * V + 2 * R) + 2 * K + R * V + (heads % R) * V
    else:
        columns = 2 * H * K + HV * V + heads * V
    return columns


@triton.jit
def row_starts(starts, t, total, PACKED: tl.constexpr, MASKED: tl.constexpr):
    """First row of the segment of each row `t`; `NOWHERE` for rows of the tail and past the end."""
    if not MASKED:
        first = t * 0
    elif PACKED:
        first = tl.load(starts + t, mask=t < total, other=NOWHERE)
    else:
        first = tl.where(t < total, 0, NOWHERE)
    return first


@triton.jit
def seen(x, t, first, AGO: tl.constexpr, MASKED: tl.constexpr):
    """`x`, the row `AGO` before `t`, or zeros (also where `x` is NaN) if that row is outside the segment of `t`."""
    if MASKED:
        x = tl.where(t - AGO >= first, x, 0.0)
    return x


@triton.jit
def row_pointers(base, t, BD: tl.constexpr, STRIDE: tl.constexpr):
    """Pointers `[rows, BD]` to rows `t` `[rows, 1]` of a matrix with row stride `STRIDE`."""
    return base + t.to(tl.int64) * STRIDE + tl.arange(0, BD)[None, :]


@triton.jit
def load_rows(ptrs, keep, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """Rows of width `D` as they are stored, `[rows, BD]`; zeros where `keep` `[rows, 1]` is false, if `MASKED`."""
    if D == BD:
        if MASKED:
            x = tl.load(ptrs, mask=keep, other=0.0)
        else:
            x = tl.load(ptrs)
    else:
        inside = tl.arange(0, BD)[None, :] < D
        if MASKED:
            inside = inside & keep
        x = tl.load(ptrs, mask=inside, other=0.0)
    return x


@triton.jit
def store_rows(ptrs, value, keep, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """Write `value` `[rows, BD]` to rows of width `D`, in their dtype."""
    value = value.to(ptrs.dtype.element_ty)
    if D == BD:
        if MASKED:
            tl.store(ptrs, value, mask=keep)
        else:
            tl.store(ptrs, value)
    else:
        inside = tl.arange(0, BD)[None, :] < D
        if MASKED:
            inside = inside & keep
        tl.store(ptrs, value, mask=inside)


@triton.jit
def tap(weight, AGO: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, W: tl.constexpr):
    """Weight `[1, BD]` of the input `AGO` tokens ago; zeros where the window is shorter."""
    cols = tl.arange(0, BD)
    if AGO < W:
        taps = tl.load(weight + cols * W + (W - 1 - AGO), mask=cols < D, other=0.0).to(tl.float32)
    else:
        taps = tl.zeros([BD], tl.float32)
    return taps[None, :]


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), within a few float32 ulps, in four instructions (a general exp and division take a dozen)."""
    if _COMPILED:
        y = tl.inline_asm_elementwise(
            """
            {
            .reg .f32 e;
            mul.ftz.f32 e, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 e, e;
            add.ftz.f32 e, e, 0f3F800000;
            rcp.approx.ftz.f32 $0, e;
            }
            """,
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        y = tl.sigmoid(x)
    return y
