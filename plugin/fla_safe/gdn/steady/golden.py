"""Golden check of a whole mixer: forward and every gradient against float64, and the same bits each time.

The reference is the composed mixer around the torch kernel in float64 (itself tested against `gdn.oracle`), on the
device of the kernels under test, so that a check takes milliseconds and not minutes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import torch

from fla_safe.errors import FlaSafeError
from fla_safe.gdn.backends import resolve
from fla_safe.gdn.segments import PackedSegments
from fla_safe.gdn.variant import MixerVariant
from fla_safe.runtime.tuning.repeats import same_bits

__all__ = ["LENGTHS", "REPEATS", "TAIL", "TOLERANCES", "GoldenCheck", "Verdict", "tolerance"]

REPEATS: Final = 20
LENGTHS: Final = (1, 63, 64, 65, 130, 0)
"""Segments of the packed row: one row, around a chunk of 64, more than two chunks, an empty one."""
TAIL: Final = 9
"""Rows beyond the last offset; they hold NaN and must come out as zeros."""
ROWS: Final = 130
TOLERANCES: Final = {torch.bfloat16: 1e-2, torch.float16: 5e-3, torch.float32: 3e-3, torch.float64: 1e-9}
"""Largest relative error of a whole tensor by activation dtype (float32: FLA's products round to tf32)."""
_DECAY: Final = ("gradient of A_log", "gradient of dt_bias")
_DECAY_TOLERANCE: Final = 4e-2
"""Theirs in float32. FLA's kernels take the decay's gradient from a difference of larger sums, which leaves few digits
of tf32 products: 1.5e-2 was seen (FLA 0.6.0, Triton 3.8.0, H200, 2026-12-01)."""
_CONDITION: Final = 4.0
"""A badly conditioned result may err this much more than plain torch does in the same dtype."""

type _Results = dict[str, torch.Tensor]


def tolerance(name: str, dtype: torch.dtype) -> float:
    """Largest relative error allowed for the output or gradient `name` where activations are of `dtype`."""
    if dtype == torch.float32 and name in _DECAY:
        return _DECAY_TOLERANCE
    return TOLERANCES[dtype]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one check.

    Attributes:
        failure: None when everything is right, else which output or gradient is not, and how.
        errors: relative error by output, as far as they were computed.
        limits: largest errors allowed.
    """

    failure: str | None
    errors: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.failure is None


class GoldenCheck:
    """Checks one variant as often as asked; inputs and reference are made once.

    Args:
        variant: what is checked.
        device: where.
        packed: check one packed row of `LENGTHS` and `TAIL`; else `batch` sequences of `ROWS` rows.
        batch: B when not packed.
        repeats: runs that must give the bits of the first one.
    """

    def __init__(
        self,
        variant: MixerVariant,
        device: torch.device | str,
        *,
        packed: bool,
        batch: int = 1,
        repeats: int = REPEATS,
    ) -> None:
        self.variant = variant
        self.device = torch.device(device)
        self.repeats = repeats
        self.segments: PackedSegments | None = None
        rows = ROWS
        if packed:
            rows, batch = sum(LENGTHS) + TAIL, 1
            offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(self.device, torch.int32)
            self.segments = PackedSegments.prepare(offsets, rows, device=self.device)
        self._leaves = variant.draw(rows, batch, self.device, seed=1)
        source = torch.Generator(self.device).manual_seed(2)
        shape = (rows, batch, variant.layout.value_width)
        self._grad = torch.randn(shape, device=self.device, dtype=variant.dtype, generator=source)
        if self.segments is not None:
            proj = self._leaves["proj"]
            assert proj is not None
            proj.data[self.segments.used :] = torch.nan
            self._grad[self.segments.used :] = torch.nan

    def __call__(self, *, repeats: int | None = None) -> Verdict:
        """Run the kernels as they are now, `1 + repeats` times. An exception of theirs is a failed verdict."""
        errors: dict[str, float] = {}
        limits: dict[str, float] = {}
        try:
            first = self._run()
            self._compare(first, errors, limits)
            failure = _first_failure(errors, limits) or self._tail(first)
            for i in range(self.repeats if repeats is None else repeats):
                if failure is not None:
                    break
                for name, again in self._run().items():
                    if not same_bits(first[name], again):
                        failure = f"{name} has other bits in repeat {i + 1}"
                        break
        except FlaSafeError:
            raise
        except Exception as error:
            failure = f"it raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Verdict(failure, errors, limits)

    @cached_property
    def _reference(self) -> tuple[_Results, dict[str, float]]:
        """Results in float64, and the largest error allowed for each."""
        kernel = resolve("torch", self.device)
        exact = self._run(wide=True, kernel=kernel)
        with _rounded_like_kernels():
            plain = self._run(kernel=kernel)
        dtype = self.variant.dtype
        return exact, {n: max(tolerance(n, dtype), _CONDITION * _relative(plain[n], exact[n])) for n in exact}

    def _compare(self, ours: _Results, errors: dict[str, float], limits: dict[str, float]) -> None:
        exact, allowed = self._reference
        limits.update(allowed)
        errors.update({name: _relative(ours[name], exact[name]) for name in exact})

    def _tail(self, ours: _Results) -> str | None:
        if self.segments is None:
            return None
        for name in ("output", "gradient of proj"):
            if bool((ours[name][self.segments.used :] != 0).any()):
                return f"{name} is not zero beyond the last offset"
        return None

    def _run(self, *, wide: bool = False, kernel: object = None) -> _Results:
        leaves = self._leaves
        if wide:
            leaves = {n: None if x is None else x.detach().double().requires_grad_() for n, x in leaves.items()}
        out = self.variant(leaves, self.segments, kernel=kernel)  # type: ignore[arg-type]
        given = {name: x for name, x in leaves.items() if x is not None}
        grads = torch.autograd.grad(out, list(given.values()), self._grad.to(out.dtype))
        named = zip((f"gradient of {name}" for name in given), grads, strict=True)
        return {"output": out.detach(), **dict(named)}


@contextmanager
def _rounded_like_kernels() -> Iterator[None]:
    """Float32 products of plain torch round their factors to TF32 on CUDA, as those of Triton's `dot` do."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _relative(ours: torch.Tensor, exact: torch.Tensor) -> float:
    scale = exact.norm().clamp(min=torch.finfo(torch.float32).tiny)
    return float((ours.double() - exact.double()).norm() / scale)


def _first_failure(errors: Mapping[str, float], limits: Mapping[str, float]) -> str | None:
    for name, error in errors.items():
        if not error <= limits[name]:  # also when it is NaN
            return f"{name} has a relative error of {error:.1e}, allowed {limits[name]:.1e}"
    return None
