"""Runs a recorded mixer call again and compares every tensor of it with float64.

The reference is the row-by-row oracle for what the mixer returns and for all gradients, where its memory is affordable;
else, and for tensors inside of the mixer, it is the composed mixer around the torch kernel in float64, which the tests
hold against the oracle.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from typing import Any, Final

import torch

from fla_safe.diagnosis.places import Axes, Place, all_finite, bad_values, first_place, inside
from fla_safe.diagnosis.record import PARAMETERS, Record
from fla_safe.diagnosis.tap import What, tapped
from fla_safe.gdn import oracle
from fla_safe.gdn.backends import Backend, resolve, supports
from fla_safe.gdn.mixer import mixer
from fla_safe.gdn.segments import PackedSegments
from fla_safe.gdn.steady.golden import tolerance

__all__ = ["ORACLE_BYTES", "Replay", "Row", "replay"]

ORACLE_BYTES: Final = 2**28
"""States that the row-by-row oracle may keep; about eight times as much is allocated for its gradients."""
_LARGEST: Final = 3.0
"""The largest error of a value, against the errors of whole tensors that `tolerance` allows."""
_CONDITION: Final = 8.0
"""A badly conditioned result may err this much more than plain torch does in the same dtype."""

_PARTS: Final = frozenset(f"gradient of {name}" for name in ("q", "k", "v", "g", "beta"))

type _Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of the call.

    Attributes:
        name: of the tensor.
        source: `recorded` in the file, or `computed` here.
        finite: whether all of it is, in the rows of segments.
        reference_finite: the same of the float64 reference; None if it has no such tensor.
        error: largest difference from the reference relative to its largest value, where that is finite; None without
            reference.
        limit: what is right for the dtype; None without reference.
        place: of the first value that is not finite, or else of the largest error beyond the limit.
    """

    name: str
    source: str
    finite: bool
    reference_finite: bool | None = None
    error: float | None = None
    limit: float | None = None
    place: Place | None = None

    @property
    def good(self) -> bool:
        """Finite and, as far as known, right."""
        return self.finite and (self.error is None or self.limit is None or self.error <= self.limit)


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay showed.

    Attributes:
        kernel, device: what ran.
        note: what was not as in the job.
        reference: the float64 computation of outputs and gradients.
        rows: in the order of the computation.
        verdict: one sentence.
    """

    kernel: str
    device: str
    note: str
    reference: str
    rows: tuple[Row, ...]
    verdict: str

    @property
    def reproduced(self) -> bool:
        """Whether anything is not finite or not right."""
        return not all(row.good for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable; an infinite error is None, for JSON has no infinity."""
        data = asdict(self)
        for row in data["rows"]:
            if row["error"] is not None and not isfinite(row["error"]):
                row["error"] = None
        return data | {"reproduced": self.reproduced}


def replay(record: Record, device: torch.device | str | None = None) -> Replay:
    """Run the call with its kernel, or with the torch kernel where that cannot run; None is a GPU if there is one.

    Raises:
        OffsetsError, LayoutError: the record does not fit together.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kernel, note = _kernel(record, device)
    segments = record.segments(device)
    ours = _run(record, device, segments, kernel)
    plain = resolve("torch", device)
    wide = _run(record, device, segments, plain, wide=True)
    # The same in the job's dtype: its distance is what can be asked for.
    usual = ours if kernel.name == "torch" else _run(record, device, segments, plain)
    exact = dict(wide)
    reference = "the torch kernel in float64"
    if _oracle_bytes(record) <= ORACLE_BYTES:
        exact |= _oracle(record)
        reference = "the row-by-row oracle in float64"
    rows = [_recorded(name, x, axes, record, segments) for name, x, axes in _inputs(record)]
    for name, x in ours.items():
        if kernel.mixer is not None and name in _PARTS:
            exact.pop(name, None)  # a fused mixer's kernel leaves them in parts
        rows.append(
            _computed(name, x, exact.get(name), (usual[name], wide[name]) if name in exact else None, record, segments)
        )
    return Replay(
        f"{kernel.name} {kernel.version}", str(device), note, reference, tuple(rows), _verdict(tuple(rows), record)
    )


def _kernel(record: Record, device: torch.device) -> tuple[Backend, str]:
    name, dtype = str(record.kernel["name"]), record.proj.dtype
    able, reason = supports(name, device, layout=record.layout, dtype=dtype)
    if not able:
        return resolve(
            "torch", device
        ), f"kernel {name!r} cannot run here ({reason}): the torch kernel ran in its place"
    kernel = resolve(name, device, layout=record.layout, dtype=dtype, fused=bool(record.kernel.get("fused")) or None)
    recorded = str(record.kernel.get("version"))
    return kernel, "" if kernel.version == recorded else f"the job ran {name} {recorded}, here is {kernel.version}"


def _leaves(record: Record, device: torch.device, wide: bool) -> dict[str, torch.Tensor | None]:
    named = {"proj": record.proj} | dict(record.parameters)
    leaves = {}
    for name, x in named.items():
        if x is not None:
            x = x.to(device, torch.float64 if wide else x.dtype, copy=True).requires_grad_()
        leaves[name] = x
    return leaves


def _run(
    record: Record, device: torch.device, segments: PackedSegments | None, kernel: Backend, *, wide: bool = False
) -> _Tensors:
    """In the order of computing: tensors inside of the mixer, its output, and, if the output's is known, gradients."""
    seen: _Tensors = {}

    def tap(what: What, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, x in tensors.items():
            seen[f"gradient of {name}" if "gradient" in what else name] = x.detach().clone()

    leaves = _leaves(record, device, wide)
    out = mixer(
        **leaves,  # type: ignore[arg-type]
        **record.options,
        layout=record.layout,
        segments=segments,
        kernel=tapped(kernel, tap),
    )
    seen["mixer output"] = out.detach()
    seen |= _gradients(record, out, leaves)
    return seen


def _gradients(record: Record, out: torch.Tensor, leaves: Mapping[str, torch.Tensor | None]) -> _Tensors:
    if record.output_gradient is None:
        return {}
    given = {name: x for name, x in leaves.items() if x is not None}
    grads = torch.autograd.grad(
        out,
        list(given.values()),
        record.output_gradient.to(out.device, out.dtype),
        allow_unused=True,
        materialize_grads=True,
    )
    return {f"gradient of {_shown(name)}": grad for name, grad in zip(given, grads, strict=True)}


def _oracle_bytes(record: Record) -> int:
    rows, batch, _ = record.proj.shape
    layout = record.layout
    return 8 * rows * batch * layout.value_heads * layout.key_dim * layout.value_dim


def _oracle(record: Record) -> _Tensors:
    leaves = _leaves(record, torch.device("cpu"), True)
    used = record.proj.shape[0] if record.offsets is None else record.offsets[-1]
    proj = leaves["proj"]
    assert proj is not None
    with torch.no_grad():
        proj[used:] = 0  # the mixer reads nothing there
    out = oracle.mixer(
        **leaves,  # type: ignore[arg-type]
        **record.options,
        layout=record.layout,
        offsets=record.offsets,
    )
    return {"mixer output": out.detach()} | (_gradients(record, out, leaves) if out.requires_grad else {})


def _shown(name: str) -> str:
    return "projection" if name == "proj" else name


def _inputs(record: Record) -> list[tuple[str, torch.Tensor, Axes]]:
    named: list[tuple[str, torch.Tensor, Axes]] = [(name, x, "rows") for name, x in record.around.items()]
    named.append(("projection", record.proj, "projection"))
    named += [(name, x, _axes(name, x)) for name in PARAMETERS if (x := record.parameters[name]) is not None]
    if record.output_gradient is not None:
        named.append(("gradient of mixer output", record.output_gradient, "mixed"))
    return named


def _axes(name: str, x: torch.Tensor) -> Axes:
    match name.removeprefix("gradient of "):
        case "projection":
            return "projection"
        case "mixer output":
            return "mixed"
        case "conv_weight" | "conv_bias":
            return "channels"
        case "A_log" | "dt_bias":
            return "per_head"
        case "norm_weight":
            return "plain"
    return "addends" if x.dim() == 4 and name.removeprefix("gradient of ").startswith("g") else "heads"


def _recorded(name: str, x: torch.Tensor, axes: Axes, record: Record, segments: PackedSegments | None) -> Row:
    x = inside(x, axes, segments)
    finite = all_finite([x])[0]
    place = None if finite else first_place(bad_values(x), axes, record.layout, segments)
    return Row(name, "recorded", finite, place=place)


def _computed(
    name: str,
    x: torch.Tensor,
    exact: torch.Tensor | None,
    asked: tuple[torch.Tensor, torch.Tensor] | None,
    record: Record,
    segments: PackedSegments | None,
) -> Row:
    axes = _axes(name, x)
    bare = name.removeprefix("gradient of ")
    part = bare[0] if axes == "heads" and bare[0] in "qk" and x.shape[2] == record.layout.key_heads else None
    cut = partial(inside, axes=axes, segments=segments)
    x = cut(x)
    at = partial(first_place, axes=axes, layout=record.layout, segments=segments, part=part)
    finite = all_finite([x])[0]
    place = None if finite else at(bad_values(x))
    if exact is None or cut(exact).shape != x.shape:
        return Row(name, "computed", finite, place=place)
    exact = cut(exact).to(x.device)
    known = torch.isfinite(exact)
    scale = exact[known].abs().max().clamp(min=torch.finfo(torch.float32).tiny) if known.any() else exact.new_ones(())
    differences = _differences(x, exact, known) / scale
    error = float(differences.max()) if differences.numel() else 0.0
    limit = _LARGEST * tolerance(name, record.proj.dtype)
    if asked is not None:
        usual, wide = map(cut, asked)
        best = _differences(usual, wide, torch.isfinite(wide) & torch.isfinite(usual)) / scale
        limit = max(limit, _CONDITION * float(best.max()) if best.numel() else 0.0)
    if finite and error > limit:
        place = at(differences == differences.max())
    return Row(name, "computed", finite, bool(known.all()), error, limit, place)


def _differences(x: torch.Tensor, exact: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Absolute differences, 0 where they do not count; infinite where only x is not finite."""
    differences = (x.double() - exact).abs().masked_fill(~where, 0)
    return differences.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _verdict(rows: tuple[Row, ...], record: Record) -> str:
    bad = next((row for row in rows if not row.good), None)
    if bad is None:
        return "all is finite and right here: the fault was not in this call, or does not repeat"
    if bad.source == "recorded":
        return f"{bad.name} was not finite in the job: {record.finding.get('cause', 'it came into the call like this')}"
    if bad.finite:
        return f"{bad.name} is finite but wrong: the error is {bad.error:.1e}, {bad.limit:.1e} would be right"
    if bad.reference_finite is None:
        return f"{bad.name} is not finite; there is nothing in float64 to compare it with"
    if bad.reference_finite:
        return f"{bad.name} is not finite, in float64 it is: the kernel, or numbers too large for its dtype"
    return f"{bad.name} is not finite, in float64 neither: these inputs have no finite result"
