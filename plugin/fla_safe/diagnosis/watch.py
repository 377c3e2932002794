"""The check of one GDN layer while it trains: every tensor in the order in which it arises, until one is not finite.

It stands in the layer's place by name (`forward` and `run_mixer` in the instance's own dictionary), so a layer without
it is exactly what it was. A layer under it waits for the device at every stage.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from fla_safe.diagnosis.call import CheckedCall
from fla_safe.diagnosis.finding import Direction
from fla_safe.diagnosis.tap import followed
from fla_safe.gdn.recomputation import recomputing

__all__ = ["LayerSite", "LayerWatch", "Watch"]


@dataclass(frozen=True, slots=True)
class LayerSite:
    """What a layer is called, and what lies around it.

    Attributes:
        name: in the model.
        number: Megatron's `layer_number`, from 1.
        before, after: what makes the layer's input and what reads its output, in words.
        split: whether other ranks hold rows of what this rank's projections read (tensor or context parallelism).
    """

    name: str
    number: int
    before: str
    after: str
    split: bool = False


class Watch:
    """The check of all layers of a rank.

    Args:
        mode: `first` ends with the first step, `every` with the job.
        rank: in the job.
        where: the rank in words.
        directory: for the file of a finding.
    """

    def __init__(self, mode: Literal["first", "every"], *, rank: int, where: str, directory: Path) -> None:
        self.mode = mode
        self.rank = rank
        self.where = where
        self.directory = directory
        self.step: int | None = None
        self.period = 0
        self.over = False
        self.layers: list[LayerWatch] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "Watch":
        # Layers are copied with their watch; the job they belong to stays one.
        return self

    def step_begins(self, step: int) -> None:
        """Micro-batches count from 0 again; `step` counts from 1."""
        self.step, self.period = step, self.period + 1

    def step_ends(self) -> None:
        """What follows belongs to no training step. With `first`, every layer is again what it was before."""
        self.step, self.period = None, self.period + 1
        if self.mode == "first":
            self.over = True
            for layer in self.layers:
                layer.remove()
            self.layers.clear()


class LayerWatch:
    """Stands in for `forward` and `run_mixer` of one layer.

    Args:
        layer: a `megatron.layer.SafeForward`.
        site: its name and neighbours.
        watch: of the rank.
    """

    def __init__(self, layer: Any, site: LayerSite, watch: Watch) -> None:
        self.layer = layer
        self.site = site
        self.watch = watch
        self.forward_before, self.mixer_before = layer.forward, layer.run_mixer
        self.call: CheckedCall | None = None
        self._period = -1
        self._passes = {False: 0, True: 0}
        layer.forward, layer.run_mixer = self.forward, self.run_mixer
        watch.layers.append(self)

    def remove(self) -> None:
        """The class's own methods are the layer's again."""
        vars(self.layer).pop("forward", None)
        vars(self.layer).pop("run_mixer", None)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The layer's forward pass under the check.

        Raises:
            NonFiniteError: something in it is not finite.
        """
        if self.watch.over:  # a copy of a layer, made while the check was on
            self.remove()
            return self.layer.forward(hidden_states, *args, **kwargs)
        call = self.call = CheckedCall(self, *self._count())
        call.hidden = hidden_states.detach()
        try:
            result = self.forward_before(followed(hidden_states, call.see_hidden_gradient), *args, **kwargs)
        finally:
            self.call = None
        out = result[0] if isinstance(result, tuple) else result
        call.see_output(out)
        return result

    def run_mixer(self, proj: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """`gdn.mixer.mixer` under the check."""
        return (self.call or CheckedCall(self, *self._count())).mix(proj, arguments)

    def _count(self) -> tuple[Direction, int]:
        """Direction and number of a pass. Recomputation repeats micro-batches in the order of their first passes."""
        if self._period != self.watch.period:
            self._period, self._passes = self.watch.period, {False: 0, True: 0}
        again = recomputing()
        number = self._passes[again]
        self._passes[again] += 1
        return "recomputation" if again else "forward", number
