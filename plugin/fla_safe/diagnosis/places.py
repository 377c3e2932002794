"""From the position of a value in a GDN tensor to its row, segment, part and head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

from fla_safe.gdn.layout import ProjectionLayout, Section
from fla_safe.gdn.segments import PackedSegments

__all__ = ["Axes", "Place", "all_finite", "bad_values", "first_place", "inside"]

type Axes = Literal["rows", "projection", "mixed", "heads", "addends", "channels", "per_head", "plain"]
"""How a tensor is laid out.

`rows` `[T, B, C]`, `projection` `[T, B, proj_dim]`, `mixed` `[T, B, HV * V]`, `heads` `[B, T, heads, ...]`, `addends`
`[m, B, T, heads]`, `channels` `[conv_dim, ...]`, `per_head` `[HV]`, `plain`: anything.
"""

_ROWS: Final[dict[str, int]] = {"rows": 0, "projection": 0, "mixed": 0, "heads": 1, "addends": 2}
_BATCH: Final[dict[str, int]] = {"rows": 1, "projection": 1, "mixed": 1, "heads": 0, "addends": 1}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value lies; everything counts from 0, and is None where the tensor has no such thing.

    Attributes:
        row, batch: of the activations.
        segment: in the caller's numbering, None without packing.
        segment_rows: first row and end of the segment.
        part: q, k, v, z, b or a, in a projection or among convolution channels.
        head: of this rank; a key head for q and k, else a value head.
        index: position in the tensor.
    """

    row: int | None
    batch: int | None
    segment: int | None
    segment_rows: tuple[int, int] | None
    part: str | None
    head: int | None
    index: tuple[int, ...]

    def __str__(self) -> str:
        said = []
        if self.row is not None:
            said.append(f"row {self.row}")
        if self.segment_rows is not None:
            said.append(f"segment {self.segment} (rows {self.segment_rows[0]} to {self.segment_rows[1] - 1})")
        elif self.batch is not None:
            said.append(f"batch {self.batch}")
        if self.head is not None:
            kind = "key" if self.part in ("q", "k") else "value"
            said.append(f"{kind} head {self.head}{f' ({self.part})' if self.part else ''}")
        return ", ".join([*said, f"index {list(self.index)}"])


def all_finite(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Whether each tensor holds finite numbers only; waits for the device once, and makes no copy of a tensor."""
    ends = [torch.stack(torch.aminmax(x.detach())).isfinite().all() if x.numel() else None for x in tensors]
    some = [end for end in ends if end is not None]
    answers = iter(torch.stack([end.to(some[0].device) for end in some]).tolist() if some else ())
    return [end is None or next(answers) for end in ends]


def bad_values(x: torch.Tensor) -> torch.Tensor:
    """Where x is NaN or infinite."""
    return ~torch.isfinite(x.detach())


def inside(x: torch.Tensor, axes: Axes, segments: PackedSegments | None) -> torch.Tensor:
    """The rows that belong to a segment: what the rows of a tail hold is of no consequence."""
    if segments is None or axes not in _ROWS or x.shape[_ROWS[axes]] != segments.total:
        return x
    return x.narrow(_ROWS[axes], 0, segments.used)


def first_place(
    bad: torch.Tensor, axes: Axes, layout: ProjectionLayout, segments: PackedSegments | None, part: str | None = None
) -> Place | None:
    """The place of the first true value, the lowest row first; None if there is none.

    Args:
        bad: bool, laid out as `axes` says.
        part: q, k, v, ... where the tensor holds one part only.
    """
    dim = _ROWS.get(axes, 0)
    ordered = bad.movedim(dim, 0) if bad.dim() else bad[None]
    flat = ordered.flatten().to(torch.uint8)
    if not flat.numel() or not bool(flat.any()):
        return None
    at = [int(i) for i in torch.unravel_index(flat.argmax(), ordered.shape)]
    if bad.dim():
        at.insert(dim, at.pop(0))
    row = at[dim] if axes in _ROWS else None
    batch = at[_BATCH[axes]] if axes in _BATCH else None
    # A rank's part of the sequence has fewer rows than the pack, and no segments that a row could be looked up in.
    known = segments is not None and row is not None and (axes != "rows" or bad.shape[dim] >= segments.used)
    found = segments.locate(row) if known else None  # type: ignore[union-attr, arg-type]
    head: int | None = None
    match axes:
        case "projection":
            part, head = _part_of(at[-1], layout, layout.proj_sections)
        case "channels":
            part, head = _part_of(at[0], layout, layout.conv_sections)
        case "mixed":
            head = at[-1] // layout.value_dim
        case "heads":
            head = at[2]
        case "addends":
            head = at[3]
        case "per_head":
            head = at[0]
    return Place(row, batch, found and found[0], found and (found[1], found[2]), part, head, tuple(at))


def _part_of(column: int, layout: ProjectionLayout, sections: dict[str, Section]) -> tuple[str, int]:
    for name, section in sections.items():
        per_group = 1 if name in "qk" else layout.group
        for group in range(layout.key_heads):
            for j in range(per_group):
                start = section.start + group * section.group_stride + j * section.head_stride
                if start <= column < start + section.width:
                    return name, group * per_group + j
    raise AssertionError(f"column {column} of {layout}")
