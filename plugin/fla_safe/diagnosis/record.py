"""The file of one mixer call: its inputs, what lay around it, and what was found; plain tensors and plain values."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TypeGuard

import torch

from fla_safe.errors import FlaSafeError
from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.segments import PackedSegments
from fla_safe.gdn.steady.golden import TOLERANCES

__all__ = ["PARAMETERS", "Record", "RecordError", "read", "write"]

FORMAT: Final = "fla-safe GDN call"
VERSION: Final = 1
PARAMETERS: Final = ("conv_weight", "conv_bias", "A_log", "dt_bias", "norm_weight")
"""Names of the mixer's parameters, as `gdn.mixer.mixer` calls them."""


class RecordError(FlaSafeError, ValueError):
    """The file is no record of a GDN call, is damaged, or was written by another version."""


@dataclass(frozen=True, slots=True)
class Record:
    """One call of `gdn.mixer.mixer`.

    Attributes:
        proj: `[T, B, proj_dim]`.
        parameters: by the names in `PARAMETERS`; None for a bias that is not there.
        output_gradient: `[T, B, HV * V]`, None if the backward pass had not come so far.
        around: tensors of the layer outside of the mixer, for the reader.
        layout: heads of the rank.
        offsets: `cu_seqlens` as the caller gave them, None for an unpacked batch.
        options: `norm_eps`, `use_qk_l2norm`, `zero_centered_norm`.
        kernel: name and version of the kernel, and whether its mixer was the fused one.
        finding: `Finding.as_dict()`.
        versions: of packages, and the device.
    """

    proj: torch.Tensor
    parameters: Mapping[str, torch.Tensor | None]
    output_gradient: torch.Tensor | None
    around: Mapping[str, torch.Tensor]
    layout: ProjectionLayout
    offsets: tuple[int, ...] | None
    options: Mapping[str, Any]
    kernel: Mapping[str, Any]
    finding: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def segments(self, device: torch.device) -> PackedSegments | None:
        """The segments of the packed row on a device.

        Raises:
            OffsetsError: the offsets do not describe `proj`.
        """
        if self.offsets is None:
            return None
        offsets = torch.tensor(self.offsets, dtype=torch.int32, device=device)
        return PackedSegments.prepare(offsets, self.proj.shape[0], batch=self.proj.shape[1])


def write(path: Path, record: Record) -> None:
    """Write a file that is whole or not there.

    Raises:
        OSError, RuntimeError: from the file system, or from torch when the device has failed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "format": FORMAT,
        "version": VERSION,
        "proj": _plain(record.proj),
        "parameters": {name: _plain(x) for name, x in record.parameters.items()},
        "output_gradient": _plain(record.output_gradient),
        "around": {name: _plain(x) for name, x in record.around.items()},
        "layout": asdict(record.layout),
        "offsets": None if record.offsets is None else list(record.offsets),
        "options": dict(record.options),
        "kernel": dict(record.kernel),
        "finding": dict(record.finding),
        "versions": dict(record.versions),
    }
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(data, unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _plain(x: torch.Tensor | None) -> torch.Tensor | None:
    # A view would take its whole storage along, a parameter its class and attributes.
    return None if x is None else x.detach().cpu().clone(memory_format=torch.contiguous_format)


def read(path: Path) -> Record:
    """Read a file that `write` made; nothing in it is executed.

    Raises:
        RecordError: it cannot be read, is something else, or does not fit together.
    """
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise _bad(path, "is not there") from None
    except Exception as error:  # torch's own text suggests to execute what is in the file
        raise _bad(path, f"cannot be read as plain tensors ({type(error).__name__})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise _bad(path, "is no record of a GDN call")
    if data.get("version") != VERSION:
        raise _bad(path, f"has format version {data.get('version')!r}, not {VERSION}")
    try:
        record = Record(
            data["proj"],
            data["parameters"],
            data["output_gradient"],
            data["around"],
            ProjectionLayout(**data["layout"]),
            None if data["offsets"] is None else tuple(map(int, data["offsets"])),
            data["options"],
            data["kernel"],
            data["finding"],
            data["versions"],
        )
        wrong = _misfit(record)
    except FlaSafeError as error:
        raise _bad(path, f"does not fit together: {error.seen}") from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise _bad(path, f"lacks a part ({type(error).__name__}: {error})") from error
    if wrong:
        raise _bad(path, f"does not fit together: {wrong}")
    return record


def _misfit(record: Record) -> str | None:
    """What is wrong with the shapes, or None. Raises what access to a missing or strange part raises."""
    layout, proj = record.layout, record.proj
    rows, batch, _ = proj.shape
    if not rows * batch:
        return f"proj is {_said(proj)}"
    for name, given in record.around.items():
        if not _dense(given) or given.dim() < 2:
            return f"{name} is {_said(given)}"
    window = record.parameters["conv_weight"].shape[-1]  # type: ignore[union-attr]
    values = (layout.value_heads,)
    wanted = {
        "proj": (proj, (rows, batch, layout.proj_dim)),
        "conv_weight": (record.parameters["conv_weight"], (layout.conv_dim, window)),
        "conv_bias": (record.parameters["conv_bias"], (layout.conv_dim,)),
        "A_log": (record.parameters["A_log"], values),
        "dt_bias": (record.parameters["dt_bias"], values),
        "norm_weight": (record.parameters["norm_weight"], (layout.value_dim,)),
        "output_gradient": (record.output_gradient, (rows, batch, layout.value_width)),
    }
    for name, (x, shape) in wanted.items():
        if x is None and name in ("conv_bias", "output_gradient"):
            continue
        if not _dense(x) or x.shape != torch.Size(shape):
            return f"{name} is {_said(x)}, not {list(shape)}"
    if proj.dtype not in TOLERANCES:
        return f"proj is {proj.dtype}"
    options = {name: type(value) for name, value in record.options.items()}
    if options != {"norm_eps": float, "use_qk_l2norm": bool, "zero_centered_norm": bool}:
        return f"options {dict(record.options)}"
    if set(record.parameters) != set(PARAMETERS) or not isinstance(record.kernel["name"], str):
        return "parameters or kernel"
    if not isinstance(record.finding, dict):
        return f"finding {record.finding!r}"
    record.segments(torch.device("cpu"))
    return None


def _dense(x: object) -> TypeGuard[torch.Tensor]:
    if not isinstance(x, torch.Tensor):
        return False
    return x.is_floating_point() and x.device.type == "cpu" and x.layout is torch.strided


def _said(x: object) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)[:60]


def _bad(path: Path, what: str) -> RecordError:
    return RecordError(
        f"{path} {what}", "a file that --gdn_check of this version wrote", "name that file, or copy it again"
    )
