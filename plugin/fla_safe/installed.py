"""Versions of installed packages, without importing any."""

from collections.abc import Iterable
from importlib import metadata
from typing import Final

__all__ = ["STACK", "installed", "installed_version"]

STACK: Final = (
    "torch",
    "triton",
    "fla-core",
    "megatron-core",
    "mcore-bridge",
    "ms-swift",
    "transformer-engine",
    "tilelang",
    "flash-qla",
    "fla-safe",
)
"""Packages whose versions belong beside a result."""


def installed_version(package: str) -> str | None:
    """Version of one package; None where it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed(packages: Iterable[str] = STACK) -> dict[str, str]:
    """Versions of those of the packages that are there."""
    return {name: version for name in packages if (version := installed_version(name)) is not None}
