"""What the check found: the first tensor that is not finite, where it arose, and the error that says so."""

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from fla_safe.diagnosis.places import Axes, Place, bad_values, first_place
from fla_safe.errors import FlaSafeError
from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.segments import PackedSegments

__all__ = ["Direction", "Finding", "NonFiniteError", "Seen", "Stage", "describe"]

type Direction = Literal["forward", "recomputation", "backward"]
type Stage = Literal[
    "layer input",
    "input projection",
    "parameters",
    "convolution, l2norm and gates",
    "chunk kernel",
    "gated norm",
    "output projection",
    "layer output",
]
"""Steps of a GDN layer in forward order. `layer input` and `layer output` stand for what lies around the layer."""


class NonFiniteError(FlaSafeError, RuntimeError):
    """`--gdn_check`: a tensor of a GDN layer holds NaN or infinity. `finding` says which, `file` holds the call."""

    def __init__(self, seen: str, expected: str, remedy: str) -> None:
        super().__init__(seen, expected, remedy)
        self.finding: Finding | None = None
        self.file: Path | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor under examination.

    Attributes:
        name: for the reader, as in "gradient of v".
        tensor: only looked at.
        axes: how it is laid out.
        part: q, k, v, ... where it holds one part only.
    """

    name: str
    tensor: torch.Tensor
    axes: Axes = "plain"
    part: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """The first tensor that is not finite.

    Attributes:
        layer, number: name in the model, and the layer's number in Megatron's count, from 1.
        where: the rank, as in "rank 3 (TP 1, PP 0, CP 0)".
        rank: in the job.
        step: from 1; None outside of training steps.
        micro_batch: of this step on this layer, from 0.
        direction: the pass; `recomputation` is a forward pass that is repeated for its backward pass.
        stage: the step of the layer that the tensor comes out of, or that it goes into.
        role: `output`: what went into the stage is finite and this is not, so the stage is to blame. `input`: it was
            not finite before the stage, which is not to blame.
        tensor: its name.
        place: of the first bad value.
        nans, infinities, values: how many there are in the tensor.
        cause: who is to blame, in words.
    """

    layer: str
    number: int
    where: str
    rank: int
    step: int | None
    micro_batch: int
    direction: Direction
    stage: Stage
    role: Literal["input", "output"]
    tensor: str
    place: Place
    nans: int
    infinities: int
    values: int
    cause: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for `torch.load(weights_only=True)`."""
        return asdict(self)

    def __str__(self) -> str:
        when = "outside of training steps" if self.step is None else f"step {self.step}"
        what = {
            "layer input": "it came into the layer",
            "layer output": "it came into the layer's backward pass",
            "parameters": "a parameter of the mixer",
        }.get(self.stage, f"out of the {self.stage}")
        return (
            f"{self.tensor} is not finite ({self.nans} NaN and {self.infinities} infinite of {self.values} values, "
            f"first at {self.place}): {what}, layer {self.number} ({self.layer}), "
            f"{self.direction} of micro-batch {self.micro_batch}, {when}, {self.where}; {self.cause}"
        )

    def error(self, file: Path | None, trouble: str | None) -> NonFiniteError:
        """The error for this finding; `trouble` says why there is no file."""
        if file is not None:
            remedy = f"fla-safe replay {shlex.quote(str(file))} runs this call again, beside float64"
        else:
            remedy = f"make room for the inputs of this call, which could not be written ({trouble})"
        error = NonFiniteError(str(self), "finite numbers", remedy)
        error.finding, error.file = self, file
        return error


def describe(
    seen: Seen, layout: ProjectionLayout, segments: PackedSegments | None
) -> tuple[str, Place, dict[str, int]] | None:
    """Name, place of the first bad value and counts; None if all that `seen` shows is finite."""
    bad = bad_values(seen.tensor)
    place = first_place(bad, seen.axes, layout, segments, seen.part)
    if place is None:
        return None
    nans = int(torch.isnan(seen.tensor).sum())
    counts = {"nans": nans, "infinities": int(bad.sum()) - nans, "values": bad.numel()}
    name = (
        seen.name.replace("projection", f"{place.part} in the projection") if seen.axes == "projection" else seen.name
    )
    return name, place, counts
