"""What a decision or a compiled kernel depends on: GPU architecture, Triton, FLA and driver versions."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from fla_safe.errors import FlaSafeError
from fla_safe.installed import installed_version

__all__ = ["UNKNOWN", "Mismatch", "Stamp", "StampMismatchError"]

UNKNOWN = "unknown"
"""Value of a field that could not be read. It equals nothing, itself included, in a comparison that refuses."""

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
# A difference in one of these makes decisions or binaries wrong or unloadable; a difference in the others is only told.
_REFUSING = ("arch", "triton", "fla")


class StampMismatchError(FlaSafeError, ValueError):
    """A table, bundle or artifact was made for another GPU architecture, Triton or FLA than the running one."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One field in which two stamps differ; `severity` says whether that alone is a reason to refuse."""

    field: str
    found: str
    wanted: str
    severity: Literal["refuse", "note"]

    def __str__(self) -> str:
        return f"{self.field} {self.found} where {self.wanted} runs"


@dataclass(frozen=True, slots=True)
class Stamp:
    """Versions under which something was tuned or compiled.

    Args:
        arch: GPU architecture as Triton names it, `"sm_90"`, `"gfx942"`; `"cpu"` where there is no GPU.
        triton: Triton's version.
        fla: version of fla-core (or `"none"` for a table of another library's kernels).
        driver: version of the kernel driver, `"580.159"`; informative, because `ptxas` comes with Triton.
        device: marketing name of the GPU, `"NVIDIA H200"`; informative.
    """

    arch: str
    triton: str
    fla: str
    driver: str = UNKNOWN
    device: str = UNKNOWN

    @classmethod
    def current(cls, device: int | None = None) -> "Stamp":
        """Stamp of this process. Touches the GPU driver: call it after the rank has chosen its device."""
        arch, name = _gpu(device)
        return cls(
            arch=arch,
            triton=_version("triton"),
            fla=_version("fla-core", missing="none"),
            driver=_driver_version(),
            device=name,
        )

    @classmethod
    def from_mapping(cls, data: Mapping[str, object]) -> "Stamp":
        """Build from parsed JSON; `ValueError` with the reason when a field is missing, unknown or not text."""
        names = {f.name for f in fields(cls)}
        if unknown := sorted(set(map(str, data)) - names):
            raise ValueError(f"unknown stamp field {unknown[0]!r}")
        for name in ("arch", "triton", "fla"):
            if name not in data:
                raise ValueError(f"stamp field {name!r} is missing")
        for name, value in data.items():
            if not isinstance(value, str) or not value or len(value) > 200:
                raise ValueError(f"stamp field {name!r} is not a short text: {value!r:.80}")
        return cls(**{k: str(v) for k, v in data.items()})

    def as_dict(self) -> dict[str, str]:
        """Plain mapping for JSON, in declaration order."""
        return asdict(self)

    def mismatches(self, running: "Stamp") -> tuple[Mismatch, ...]:
        """Fields of this stamp that differ from those of `running`."""
        found: list[Mismatch] = []
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(running, f.name)
            refuses = f.name in _REFUSING
            if mine != theirs or (refuses and mine == UNKNOWN):
                found.append(Mismatch(f.name, mine, theirs, "refuse" if refuses else "note"))
        return tuple(found)

    def require(self, running: "Stamp", what: str, remedy: str) -> tuple[Mismatch, ...]:
        """Return the informative differences to `running`.

        Raises:
            StampMismatchError: the architecture, Triton or FLA differs; `what` names the thing that carries this stamp.
        """
        differences = self.mismatches(running)
        if refusing := [m for m in differences if m.severity == "refuse"]:
            raise StampMismatchError(
                f"{what} was made for {'; '.join(map(str, refusing))}",
                f"the same {', '.join(m.field for m in refusing)} as the running process",
                remedy,
            )
        return differences


def _version(distribution: str, missing: str = UNKNOWN) -> str:
    """Installed version; `missing` where the distribution is absent."""
    if distribution == "triton":
        # A Triton put first on PYTHONPATH may have no metadata of its own: the imported module tells the truth.
        try:
            import triton

            return str(triton.__version__)
        except Exception:
            return missing
    return installed_version(distribution) or missing


def _gpu(device: int | None) -> tuple[str, str]:
    import torch

    if not torch.cuda.is_available():
        return "cpu", "cpu"
    try:
        props = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
    except Exception:
        return UNKNOWN, UNKNOWN
    # ROCm builds of torch name the architecture, with feature suffixes that Triton's own name does not carry.
    gcn = getattr(props, "gcnArchName", "") if torch.version.hip else ""
    return (gcn.split(":")[0] if gcn else f"sm_{props.major}{props.minor}"), str(props.name)


def _driver_version() -> str:
    try:
        text = _DRIVER_FILE.read_text(errors="replace")
    except OSError:
        return UNKNOWN
    # First line of the file names module, "x86_64" and then the version ("580.159" or "580.159.04").
    match = re.search(r"\b(\d{3,4}\.\d+(?:\.\d+)?)\b", text)
    return match.group(1) if match else UNKNOWN
