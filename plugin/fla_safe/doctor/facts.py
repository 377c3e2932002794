"""What the doctor looks at, gathered in one place so that every check is a function of data."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path

from packaging.version import InvalidVersion, Version

from fla_safe.installed import installed
from fla_safe.runtime.stamp import Stamp

__all__ = ["Environment", "probe_import"]


@dataclass
class Environment:
    """Facts of this machine and process. Tests make their own.

    Attributes:
        environ: environment variables.
        versions: installed version of each package of interest; absent ones are missing.
        entry_points: names registered in group `torch.backends`.
        home: the user's home directory; `~` itself for a user who has none, as Triton has it.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    versions: Mapping[str, str] = field(default_factory=installed)
    entry_points: tuple[str, ...] = field(
        default_factory=lambda: tuple(e.name for e in metadata.entry_points(group="torch.backends"))
    )
    home: Path = field(default_factory=lambda: Path(os.path.expanduser("~")))

    def version(self, package: str) -> Version | None:
        """Parsed version, or None where the package is absent or its version cannot be parsed."""
        try:
            return Version(self.versions[package])
        except (KeyError, InvalidVersion):
            return None

    def on(self, variable: str, default: str = "0") -> bool:
        """Whether a variable has a value that usual parsers take for true."""
        return self.environ.get(variable, default).strip().lower() in {"1", "true", "yes", "y", "on"}

    @cached_property
    def stamp(self) -> Stamp:
        """GPU architecture and versions; imports torch and asks the driver."""
        return Stamp.current()

    @cached_property
    def tilelang(self) -> str:
        """`"absent"`, `"works"`, or what its import raises."""
        return probe_import("tilelang")

    @cached_property
    def flash_qla(self) -> str:
        """`"absent"`, `"works"`, or what its import raises."""
        return probe_import("flash_qla")

    @property
    def hopper(self) -> bool:
        """Whether the GPU is of architecture sm_90."""
        return self.stamp.arch == "sm_90"


def probe_import(module: str, seconds: float = 120.0) -> str:
    """Import a package in a process of its own, because a broken one may crash or leave half of itself behind."""
    try:
        if importlib.util.find_spec(module) is None:
            return "absent"
    except (ImportError, ValueError):
        return "absent"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=seconds, env=environ
        )
    except subprocess.TimeoutExpired:
        return f"its import takes longer than {seconds:g} s"
    if done.returncode == 0:
        return "works"
    lines = done.stderr.strip().splitlines()
    return lines[-1][:300] if lines else f"its import ends the process with status {done.returncode}"
