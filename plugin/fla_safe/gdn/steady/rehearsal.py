"""Runs every call that training will make of a mixer: long and awkward rows, plain and under recomputation."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

import torch
from torch.utils.checkpoint import checkpoint

from fla_safe.gdn.chunk import flash_qla, te
from fla_safe.gdn.segments import PackedSegments
from fla_safe.gdn.steady.golden import GoldenCheck
from fla_safe.gdn.variant import MixerVariant
from fla_safe.runtime.tuning.keys import TuningKey
from fla_safe.runtime.tuning.repeats import RepeatCheck
from fla_safe.runtime.tuning.tuning_child import Work

__all__ = ["AWKWARD_ROWS", "GUARDED", "Rows", "in_child", "packed_row", "rehearse", "repeats", "steps"]

GUARDED = ("fla", "fla_safe")
"""Only kernels of these packages are ours to answer for; others in the process keep Triton's own rules."""
AWKWARD_ROWS = (1, 63, 64, 65, 272)
"""Around a chunk of 64, and a multiple of 16 that is no multiple of a chunk."""
_SEGMENT_COUNTS = {"flash_qla": flash_qla.segment_counts, "te": te.segment_counts}
"""Kernels that are compiled anew for some numbers of segments -> those numbers, by value heads and multiprocessors."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that a job sends through its GDN layers.

    Attributes:
        tokens: longest row T, over all context-parallel ranks.
        batch: B; 1 when packed.
        packed: whether rows hold several segments.
    """

    tokens: int
    batch: int
    packed: bool

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The inverse of `as_dict`."""
        return cls(**data)


def steps(variant: MixerVariant, rows: Rows, device: torch.device | str) -> Iterator[Callable[[], None]]:
    """Forward and backward at the longest row first (which is where a kernel is tuned), then at awkward ones."""
    for tokens in dict.fromkeys((rows.tokens, *AWKWARD_ROWS)):
        if tokens > rows.tokens:
            continue
        for recompute in (False, True):
            yield partial(_step, variant, rows, device, tokens, recompute)
    counts = _SEGMENT_COUNTS.get(variant.backend.name)
    if counts is not None and rows.packed:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        for count in counts(variant.layout.value_heads, processors):
            for recompute in (False, True):
                yield partial(_step, variant, rows, device, max(rows.tokens, count), recompute, count)


def rehearse(variant: MixerVariant, rows: Rows, device: torch.device | str) -> None:
    """Take all `steps`."""
    for step in steps(variant, rows, device):
        step()


def packed_row(tokens: int, count: int, device: torch.device | str) -> PackedSegments:
    """A row of `count` segments of about equal length."""
    bounds = torch.linspace(0, tokens, min(count, tokens) + 1).round().to(device, torch.int32)
    return PackedSegments.prepare(bounds, tokens, device=device)


def _step(
    variant: MixerVariant,
    rows: Rows,
    device: torch.device | str,
    tokens: int,
    recompute: bool,
    count: int | None = None,
) -> None:
    segments = None
    if rows.packed and count is not None:
        segments = packed_row(tokens, count, device)
    elif rows.packed:
        bounds = sorted({0, 1, tokens // 3, tokens // 2, tokens})
        offsets = torch.tensor(bounds, dtype=torch.int32, device=device)
        segments = PackedSegments.prepare(offsets, tokens, device=device)
    leaves = variant.draw(tokens, 1 if rows.packed else rows.batch, device)
    proj = leaves.pop("proj")

    def forward(proj: torch.Tensor) -> torch.Tensor:
        return variant({"proj": proj, **leaves}, segments)

    out = checkpoint(forward, proj, use_reentrant=True) if recompute else forward(proj)  # type: ignore[arg-type]
    out.sum().backward()


def repeats(key: TuningKey, config: Any, launch: Callable[[], Any], named: dict[str, Any]) -> str | None:
    """Judge of winners of tuning: they repeat bit for bit at the job's own sizes (are they right, says `verify`)."""
    if not any(key.kernel.startswith(f"{package}.") for package in GUARDED):
        return None  # another library's kernel may be meant to add in any order
    return RepeatCheck()(key, config, launch, named)


def in_child(variants: list[dict[str, Any]], rows: dict[str, Any], device: int) -> Work:
    """Factory for `runtime.outside`: all steps of all variants, and the golden check's run, in another process."""
    torch.cuda.set_device(device)
    here, wanted = torch.device("cuda", device), Rows.from_dict(rows)
    made = [MixerVariant.from_dict(data, here) for data in variants]

    def every_step() -> Iterator[Callable[[], Any]]:
        for variant in made:
            yield from steps(variant, wanted, here)
            # Short segments and tails: a config that they kill is better killed here. The job looks at the results.
            yield partial(GoldenCheck(variant, here, packed=wanted.packed, batch=wanted.batch), repeats=0)

    return Work(every_step(), repeats)
