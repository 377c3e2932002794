"""Peak memory of the drafter against the number of anchors: a table, and the bound that it must keep."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from dflash.attention import Attention
from dflash.compiled import Compiled, Compiler
from dflash.drafter import drafter_loss
from dflash.pair import Pair
from dflash.sizes import Sizes
from fla_safe.errors import FlaSafeError
from fla_safe.gdn.backends import resolve

__all__ = ["MemoryBoundError", "Row", "check", "measure", "peak_bytes"]

_MIB = 1 << 20
_SLACK = 1.25
_EIGHTHS = (8, 4, 2, 1)


class MemoryBoundError(FlaSafeError, RuntimeError):
    """Peak memory grows faster than the number of anchors, as the scores of all queries and keys would."""


@dataclass(frozen=True, slots=True)
class Row:
    """One number of anchors; bytes.

    Attributes:
        anchors, queries, keys: A, A * B, C + A * B.
        peak: of mask, forward and backward pass of the drafter, beyond what was allocated before.
        bound: the straight line through the first two rows, and a quarter more.
        scores: of the matrix that is not held, all heads once, in the dtype of the activations.
        largest: tensor in the compiled graphs.
    """

    anchors: int
    queries: int
    keys: int
    peak: int
    bound: int
    scores: int
    largest: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"anchors {self.anchors:5d}  queries {self.queries:6d}  keys {self.keys:6d}  "
            f"peak {self.peak / _MIB:9.1f} MiB  bound {self.bound / _MIB:9.1f} MiB  "
            f"one score matrix {self.scores / _MIB:9.1f} MiB  largest tensor {list(self.largest)}"
        )


def measure(sizes: Sizes, device: torch.device, compiler: Compiler) -> list[Row]:
    """Peak memory at an eighth of the anchors, a quarter, a half, and all of them, with the same context.

    Raises:
        FlaSafeError: see `Compiled`.
    """
    rows: list[Row] = []
    context = sizes.step_budget.context
    attention: Attention = "flex" if device.type == "cuda" else "sdpa_by_anchor"
    for share in _EIGHTHS:
        anchors = max(1, sizes.anchors // share)
        some = replace(sizes, anchors=anchors, budget=context + anchors * sizes.block)
        compiled = Compiled(
            drafter_loss,
            compiler=compiler,
            fused="flex_attention" if attention == "flex" else "",
            limit=some.largest,
            variants=len(_EIGHTHS),
        )
        pair = Pair(0, (device, device), some, resolve("torch", device), attention, compiled)
        pair.rehearse_drafter()
        compiled.require()
        peak = peak_bytes(device, pair.rehearse_drafter)
        bound = int(_SLACK * _line(rows[:2], anchors, peak))
        scores = some.scores * some.dtype.itemsize
        rows.append(Row(anchors, anchors * some.block, some.budget, peak, bound, scores, compiled.largest.shape))
    return rows


def check(rows: Sequence[Row]) -> None:
    """Raise `MemoryBoundError` unless every peak is in its bound, and the last is smaller than one score matrix."""
    for row in rows:
        if row.peak > row.bound:
            raise MemoryBoundError(
                f"{row.peak / _MIB:.1f} MiB at {row.anchors} anchors",
                f"at most {row.bound / _MIB:.1f} MiB, on the line through the first two rows",
                "find the tensor in the profile: its size is queries x keys",
            )
    if rows[-1].peak >= rows[-1].scores:
        raise MemoryBoundError(
            f"{rows[-1].peak / _MIB:.1f} MiB at {rows[-1].anchors} anchors",
            f"less than one matrix of scores, {rows[-1].scores / _MIB:.1f} MiB",
            "measure with more anchors or a longer context, until the matrix would be the largest thing",
        )


def _line(first: Sequence[Row], anchors: int, otherwise: int) -> float:
    if len(first) < 2:
        return otherwise
    a, b = first
    return a.peak + (b.peak - a.peak) * (anchors - a.anchors) / (b.anchors - a.anchors)


def peak_bytes(device: torch.device, call: Callable[[], object]) -> int:
    """Most bytes that were allocated at once during a call, beyond those before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        held += change
        peak = max(peak, held)
    return peak
