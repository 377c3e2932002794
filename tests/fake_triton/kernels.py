"""Small autotuned kernels of many kinds, for tests of tuning and launching. They are never executed."""

from typing import Any

import triton
import triton.language as tl

__all__ = ["add", "biased", "halving", "odd_heuristic", "plain", "scaled", "zeroing"]

CONFIGS = [triton.Config({"BLOCK": b}, num_warps=w) for b in (64, 128, 256) for w in (2, 4)]


@triton.autotune(configs=CONFIGS, key=["width"])
@triton.jit
def add(x, y, out, n, width, BLOCK: tl.constexpr):
    """Specialises on `n` (never in the key) and on `width` (in the key)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n) * width, mask=at < n)


@triton.heuristics({"HAS_BIAS": lambda args: args["bias"] is not None})
@triton.autotune(configs=CONFIGS, key=["HAS_BIAS", "NB"])
@triton.jit(do_not_specialize=["n"])
def biased(x, bias, out, scale, n, NB: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """An optional pointer, a float, and a constexpr `NB` that nothing reads."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n) * scale
    if HAS_BIAS:
        value += tl.load(bias + at, mask=at < n)
    tl.store(out + at, value, mask=at < n)


@triton.jit
def plain(x, out, n, BLOCK: tl.constexpr):
    """No autotuner."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.heuristics({"WIDE": lambda args: args["x"].stride(0) > 1})
@triton.jit
def odd_heuristic(x, out, n, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """A heuristic that looks into a tensor: its class does not decide the binary."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at * (2 if WIDE else 1), mask=at < n), mask=at < n)


@triton.autotune(configs=CONFIGS, key=["n"], reset_to_zero=["total"], restore_value=["state"])
@triton.jit
def zeroing(x, total, state, n, BLOCK: tl.constexpr):
    """Accumulates in place: tuning must leave `state` as it was and `total` zero."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(total, tl.sum(tl.load(x + at, mask=at < n)))
    tl.store(state + at, tl.load(state + at, mask=at < n) + 1, mask=at < n)


def _at_most_width(configs: list[Any], named: dict[str, Any], **kwargs: Any) -> list[Any]:
    width = {**named, **kwargs}["width"]
    return [c for c in configs if c.kwargs["BLOCK"] <= width]


@triton.autotune(configs=CONFIGS, key=["kind"], prune_configs_by={"early_config_prune": _at_most_width})
@triton.jit
def halving(x, out, width, kind, BLOCK: tl.constexpr):
    """Pruning depends on `width`, which is not in the key."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < width) * kind, mask=at < width)


@triton.jit
def scaled(x, out, n, factor, BLOCK: tl.constexpr):
    """A run-time integer and a number that may be a float or an integer."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


def _is_long(args: Any) -> bool:
    return args["n"] >= 1000


def _has_blocks(args: Any) -> bool:
    return args["NB"] > 4


@triton.heuristics({"LONG": lambda args: _is_long(args), "MANY": lambda args: _has_blocks(args)})
@triton.jit(do_not_specialize=["n"])
def helped(x, out, n, NB: tl.constexpr, LONG: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr):
    """Its heuristics ask a helper, and only that one reads `n` and `NB`."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + LONG + MANY, mask=at < n)


HOOKED: list[Any] = []
"""What the hook of `hooked`'s configs was given as FLAG."""


@triton.autotune(
    configs=[triton.Config({"BLOCK": b}, pre_hook=lambda named: HOOKED.append(named["FLAG"])) for b in (64, 128)],
    key=[],
)
@triton.jit
def hooked(x, out, n, FLAG: tl.constexpr, BLOCK: tl.constexpr):
    """Only a hook reads FLAG."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def defaulted(x, out, n, offset=32, BLOCK: tl.constexpr = 64):
    """Two defaults, one of them a run-time argument's."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at + offset, mask=at < n), mask=at < n)


@triton.jit
def paired(pair, out, BLOCK: tl.constexpr):
    """A pointer and a constant in a tuple."""
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(pair[0] + at) + pair[1])


def shift_by(amount: tl.constexpr) -> Any:
    """A function for `applied`; all have one name."""

    @triton.jit
    def shift(value):
        return value + amount

    return shift


@triton.jit
def applied(x, out, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    """A function is a constant."""
    at = tl.arange(0, BLOCK)
    tl.store(out + at, FUNCTION(tl.load(x + at)))


@triton.autotune(configs=CONFIGS, key=[])
@triton.autotune(configs=[triton.Config({"UNROLL": u}) for u in (1, 2, 4)], key=[])
@triton.jit
def tuned_twice(x, out, n, UNROLL: tl.constexpr, BLOCK: tl.constexpr):
    """One autotuner around another."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + UNROLL, mask=at < n)
