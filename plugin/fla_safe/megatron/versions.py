"""Which versions of the packages below this floor it was written for; everything else is refused by name."""

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fla_safe.errors import FlaSafeError
from fla_safe.installed import installed_version

__all__ = ["SUPPORTED", "UnsupportedVersionError", "check_versions"]

SUPPORTED = {
    "megatron-core": SpecifierSet(">=0.18,<0.20", prereleases=True),
    "mcore-bridge": SpecifierSet(">=1.6,<1.7", prereleases=True),
    "fla-core": SpecifierSet(">=0.4.2,<0.7", prereleases=True),
}


class UnsupportedVersionError(FlaSafeError, RuntimeError):
    """A package is missing, or its version is outside `SUPPORTED`."""


def check_versions(*names: str) -> dict[str, str]:
    """Return the installed version of each package.

    Raises:
        UnsupportedVersionError: one is missing or unsupported; the message has the pip command.
    """
    found: dict[str, str] = {}
    for name in names:
        supported = SUPPORTED[name]
        remedy = f"pip install '{name}{supported}'"
        version = installed_version(name)
        if version is None:
            raise UnsupportedVersionError(f"{name} is not installed", f"{name}{supported}", remedy)
        # The local part (0.19.2+cu130) says how it was built, not what it is.
        if Version(version).public not in supported:
            raise UnsupportedVersionError(f"{name} {version}", f"{name}{supported}", remedy)
        found[name] = version
    return found
