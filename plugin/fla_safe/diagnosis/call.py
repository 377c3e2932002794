"""One pass of a checked layer, forward and backward: looks at each tensor, and says whose fault a bad one is."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch

from fla_safe.diagnosis.finding import Direction, Finding, Seen, Stage, describe
from fla_safe.diagnosis.places import Axes, all_finite, bad_values, inside
from fla_safe.diagnosis.record import PARAMETERS, Record, write
from fla_safe.diagnosis.tap import What, followed, tapped
from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.segments import PackedSegments
from fla_safe.installed import installed

__all__ = ["FILE_NAME", "CheckedCall"]

FILE_NAME: Final = "gdn_check_rank{rank}.pt"
"""In the directory of the watch; a later finding of the same rank replaces it."""

_AXES: Final[dict[str, Axes]] = {
    "conv_weight": "channels",
    "conv_bias": "channels",
    "A_log": "per_head",
    "dt_bias": "per_head",
}
_IN: Final[Stage] = "convolution, l2norm and gates"


class Checked(Protocol):
    """A layer under the check, as `watch.LayerWatch` is: its site says what lies around it, its watch where it runs."""

    layer: Any
    site: Any
    watch: Any
    mixer_before: Callable[..., torch.Tensor]


class CheckedCall:
    """One pass of one layer, and the backward pass that belongs to it."""

    def __init__(self, owner: Checked, direction: Direction, micro_batch: int) -> None:
        self.owner = owner
        self.direction = direction
        self.micro_batch = micro_batch
        self.hidden: torch.Tensor | None = None
        self.out: torch.Tensor | None = None
        self.out_gradient: torch.Tensor | None = None
        self.mixed_gradient: torch.Tensor | None = None
        self.proj: torch.Tensor | None = None
        self.arguments: dict[str, Any] = {}

    # Forward, in this order.

    def mix(self, proj: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        self.proj = proj.detach()
        self.arguments = {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
        given = {name: x for name in PARAMETERS if (x := arguments.get(name)) is not None}
        self._look("input projection", [Seen("projection", proj, "projection")])
        self._look("parameters", [Seen(n, x, _AXES.get(n, "plain")) for n, x in given.items()])
        follow = {name: followed(x, self._gradient_of(name)) for name, x in given.items()}
        kernel = tapped(arguments["kernel"], self._tap)
        out = self.owner.mixer_before(
            followed(proj, self._gradient_of("projection")), **(arguments | follow | {"kernel": kernel})
        )
        self._look("gated norm", [Seen("mixer output", out, "mixed")])
        return followed(out, self.see_mixed_gradient)

    def _tap(self, what: What, tensors: Mapping[str, torch.Tensor]) -> None:
        backward = "gradient" in what
        stage: Stage = {
            "inputs": _IN,
            "output": "chunk kernel",
            "output gradient": "gated norm",
            "input gradients": "chunk kernel",
        }[what]
        seen = []
        for name, x in tensors.items():
            part = name[0] if name[0] in "qk" and x.shape[2] == self.layout.key_heads else None
            axes: Axes = "addends" if name[0] == "g" and x.dim() == 4 else "heads"
            seen.append(Seen(f"gradient of {name}" if backward else name, x, axes, part))
        self._look(stage, seen, backward=backward)

    def see_output(self, out: torch.Tensor) -> None:
        self.out = out.detach()
        self._look("output projection", [Seen("layer output", out, "rows")])
        self.out = None
        if out.requires_grad and torch.is_grad_enabled():
            out.register_hook(self._keep_out_gradient)

    # Backward, in this order.

    def _keep_out_gradient(self, grad: torch.Tensor) -> None:
        self.out_gradient = grad.detach()

    def see_mixed_gradient(self, grad: torch.Tensor) -> None:
        self.mixed_gradient = grad.detach()
        self._look("output projection", [Seen("gradient of mixer output", grad, "mixed")], backward=True)
        self.out_gradient = None

    def _gradient_of(self, name: str) -> Callable[[torch.Tensor], None]:
        axes = _AXES.get(name, "projection" if name == "projection" else "plain")

        def see(grad: torch.Tensor) -> None:
            stage: Stage = "gated norm" if name == "norm_weight" else _IN
            self._look(stage, [Seen(f"gradient of {name}", grad, axes)], backward=True)

        return see

    def see_hidden_gradient(self, grad: torch.Tensor) -> None:
        assert self.hidden is not None
        if all(self._asked([grad])):
            return
        # A row that came in with NaN, as one of a tail may, has a gradient of NaN by itself.
        bad_rows = bad_values(self.hidden).any(-1, keepdim=True)
        rest = grad.detach().masked_fill(bad_rows, 0)
        self._look("input projection", [Seen("gradient of hidden_states", rest, "rows")], backward=True)

    # What is done about it.

    @property
    def layout(self) -> ProjectionLayout:
        return self.arguments["layout"]  # type: ignore[no-any-return]

    @property
    def segments(self) -> PackedSegments | None:
        return self.arguments.get("segments")

    def _asked(self, tensors: list[torch.Tensor]) -> list[bool]:
        with _apart(self.owner.layer), torch.no_grad():
            return all_finite(tensors)

    def _look(self, stage: Stage, seen: list[Seen], *, backward: bool = False) -> None:
        seen = [_within(s, self.segments) for s in seen]
        answers = self._asked([s.tensor for s in seen])
        if all(answers):
            return
        with _apart(self.owner.layer), torch.no_grad():
            self._report(stage, seen[answers.index(False)], backward)

    def _report(self, stage: Stage, seen: Seen, backward: bool) -> None:
        described = describe(seen, self.layout, self.segments)
        if described is None:
            return
        tensor, place, counts = described
        role: Literal["input", "output"] = "input" if stage == "parameters" else "output"
        direction: Direction = "backward" if backward else self.direction
        if backward and seen.axes == "projection" and place.part == "z":
            stage = "gated norm"
        dtype = str(seen.tensor.dtype).removeprefix("torch.")
        cause = f"what went into it is finite: a wrong kernel, or numbers too large for {dtype}"
        site = self.owner.site
        if stage == "parameters":
            cause = "it was so before this call, by the last optimizer step or from the checkpoint"
        elif stage in ("input projection", "output projection"):
            source = self._source(stage, backward)
            if source is not None:
                outer, cause = source
                found = describe(outer, self.layout, self.segments)
                assert found is not None
                tensor, place, counts = found
                stage, role = ("layer output" if backward else "layer input"), "input"
            else:
                role, cause = self._blame_weights("in_proj" if stage == "input projection" else "out_proj")
        watch = self.owner.watch
        finding = Finding(
            site.name,
            site.number,
            watch.where,
            watch.rank,
            watch.step,
            self.micro_batch,
            direction,
            stage,
            role,
            tensor,
            place,
            **counts,
            cause=cause,
        )
        path: Path | None = watch.directory / FILE_NAME.format(rank=watch.rank)
        trouble = None
        try:
            write(path, self._record(finding))  # type: ignore[arg-type]
        except (OSError, RuntimeError) as error:
            path, trouble = None, str(error)
        raise finding.error(path, trouble)

    def _source(self, stage: Stage, backward: bool) -> tuple[Seen, str] | None:
        """The bad tensor on the other side of a projection, and who made it; None if that side is finite."""
        site = self.owner.site
        if (stage, backward) == ("input projection", False):
            tensor, name, neighbour = self.hidden, "hidden_states", site.before
        elif (stage, backward) == ("output projection", True):
            tensor, name, neighbour = self.out_gradient, "gradient of layer output", site.after
        else:
            return None
        if tensor is None or all_finite([inside(tensor, "rows", self.segments)])[0]:
            return None
        return Seen(name, inside(tensor, "rows", self.segments), "rows"), f"it comes from {neighbour}"

    def _blame_weights(self, projection: str) -> tuple[Literal["input", "output"], str]:
        bad = [
            name
            for name, parameter in self.owner.layer.named_parameters()
            if name.startswith(projection) and not _finite(parameter)
        ]
        if bad:
            return (
                "input",
                f"weights are not finite: {', '.join(bad)}, by the last optimizer step or from the checkpoint",
            )
        ours = "what it read and its weights are finite"
        if self.owner.site.split:
            return "output", f"{ours} on this rank; the row may be another's of its tensor- or context-parallel group"
        return "output", f"{ours}: numbers too large for this dtype, or a wrong matrix multiplication"

    def _record(self, finding: Finding) -> Record:
        arguments, kernel = self.arguments, self.arguments["kernel"]
        assert self.proj is not None
        parameters = {name: arguments[name] for name in PARAMETERS}
        parameters["conv_weight"] = parameters["conv_weight"].reshape(self.layout.conv_dim, -1)
        around = {
            "hidden_states": self.hidden,
            "layer output": self.out,
            "gradient of layer output": self.out_gradient,
        }
        segments = self.segments
        return Record(
            self.proj,
            parameters,
            self.mixed_gradient,
            {name: x for name, x in around.items() if x is not None},
            self.layout,
            None if segments is None else segments.caller_offsets,
            {
                "norm_eps": float(arguments["norm_eps"]),
                "use_qk_l2norm": bool(arguments["use_qk_l2norm"]),
                "zero_centered_norm": bool(arguments["zero_centered_norm"]),
            },
            {"name": kernel.name, "version": str(kernel.version), "fused": kernel.mixer is not None},
            finding.as_dict(),
            {"device": _device(self.proj.device)} | installed(),
        )


def _within(seen: Seen, segments: PackedSegments | None) -> Seen:
    return replace(seen, tensor=inside(seen.tensor, seen.axes, segments))


@contextmanager
def _apart(layer: Any) -> Iterator[None]:
    """Outside of the guarded section: syncs and files of the check are not the layer's, and are not counted as such."""
    section = layer.section
    if not getattr(section, "inside", False):
        yield
        return
    section.__exit__(None, None, None)
    try:
        yield
    finally:
        section.__enter__()


def _finite(parameter: torch.Tensor) -> bool:
    try:
        return all_finite([parameter])[0]
    except (RuntimeError, TypeError, NotImplementedError):  # a quantised weight that cannot be asked
        return True


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
