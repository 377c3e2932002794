"""Which chunk kernel is faster for a mixer: measured at a job's rows, among kernels whose results are right."""

import logging
import statistics
from dataclasses import replace

import torch

from fla_safe.errors import FlaSafeError
from fla_safe.gdn.backends import resolve, supports
from fla_safe.gdn.steady.golden import GoldenCheck
from fla_safe.gdn.steady.rehearsal import Rows, packed_row
from fla_safe.gdn.variant import MixerVariant

__all__ = ["milliseconds", "rival"]

_log = logging.getLogger("fla_safe")

_FEW, _MANY = 4, 32
"""Segments of the rows that are timed: long ones favour FLA's kernels, many favour FlashQLA's."""
_CALLS = 10


def rival(variant: MixerVariant, rows: Rows, device: torch.device) -> MixerVariant | None:
    """The same mixer on FlashQLA's kernels, if they can run it here and pass the golden check; says why not."""
    able, reason = supports("flash_qla", device, layout=variant.layout, dtype=variant.dtype)
    if not able:
        _log.info("fla-safe: FlashQLA is not tried: %s", reason)
        return None
    try:
        other = replace(variant, backend=resolve("flash_qla", device, layout=variant.layout, dtype=variant.dtype))
        verdict = GoldenCheck(other, device, packed=rows.packed, batch=rows.batch)()
    except FlaSafeError as error:
        _log.warning("fla-safe: FlashQLA is not tried: %s", error)
        return None
    if not verdict:
        _log.warning("fla-safe: FlashQLA is not used for %s: %s", other, verdict.failure)
        return None
    return other


def milliseconds(variant: MixerVariant, rows: Rows, device: torch.device) -> float:
    """Median wall time of a forward and a backward pass, summed over few and many segments when rows are packed."""
    return sum(_median(variant, rows, device, count) for count in ((_FEW, _MANY) if rows.packed else (1,)))


def _median(variant: MixerVariant, rows: Rows, device: torch.device, count: int) -> float:
    segments = packed_row(rows.tokens, count, device) if rows.packed else None
    leaves = variant.draw(rows.tokens, rows.batch, device)
    times = []
    for i in range(3 + _CALLS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        variant(leaves, segments).sum().backward()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)
