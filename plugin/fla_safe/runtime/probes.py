"""Optional backends of FLA: whether each is usable is found out once, and never asked again while a job trains.

FLA 0.5.0 and 0.5.1 execute `import tilelang` on every dispatched call, and a failing import is not remembered by
Python: the whole of `sys.path` is searched again, three times a layer and step. `FLA_TILELANG=0` does not help there.
Fixed upstream in 0.5.2 (flash-linear-attention pull requests 993 and 996); the pinning of `is_available` can go when
0.5.x is no longer supported. A half-installed TileLang (import fails with something else than ImportError) ends the
process with every version, 0.6.0 already at `import fla.ops`: such a package is declared absent.
"""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from fla_safe.runtime.seams import Seams

__all__ = ["PACKAGES", "Probes", "Verdict"]

PACKAGES = ("tilelang",)
"""Optional packages whose failing import would end or slow a job."""

_REGISTRY_MODULES = ("fla.ops.backends", "fla.backends")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """State of one optional package: `absent`, `broken` (installed, import fails: see `reason`) or `working`."""

    package: str
    state: Literal["absent", "broken", "working"]
    reason: str = ""


class Probes:
    """Decides once about packages (at activation) and about FLA's registered backends (whenever `settle` is called).

    Args:
        packages: optional packages to try.
    """

    def __init__(self, packages: Collection[str] = PACKAGES) -> None:
        self.packages = tuple(packages)
        self.verdicts: dict[str, Verdict] = {}
        self.backends: dict[str, bool] = {}
        self._settled: set[int] = set()

    def install(self, seams: Seams) -> None:
        """Try the packages. A broken one becomes absent by Python's own means: `sys.modules[name] = None`."""
        for package in self.packages:
            verdict = self.verdicts[package] = _try_import(package)
            if verdict.state == "broken":
                _log.warning("fla-safe: %s is installed but does not import (%s); not used", package, verdict.reason)
                _declare_absent(package, seams)

    def settle(self, seams: Seams) -> None:
        """Give every backend that FLA has registered a fixed answer to `is_available`, `is_enabled` and `can_use`."""
        for name, backend in list(_registered()):
            if id(backend) in self._settled:
                continue
            usable = self._usable(backend)
            for question in ("is_available", "is_enabled", "can_use"):
                seams.replace(backend, question, lambda answer=usable: answer)
            self._settled.add(id(backend))
            self.backends[name] = usable

    def report(self) -> dict[str, Any]:
        """For reports."""
        packages = {v.package: v.state + (f" ({v.reason})" if v.reason else "") for v in self.verdicts.values()}
        return {"packages": packages, "backends": dict(self.backends)}

    def _usable(self, backend: Any) -> bool:
        try:
            if not (backend.is_available() and backend.is_enabled()):
                return False
        except Exception as error:
            _log.warning(
                "fla-safe: backend %s cannot be asked (%s: %s); not used", backend, type(error).__name__, error
            )
            return False
        # Newer versions only look for the package's files; whether it imports shows at the first call, inside a step.
        package = backend.package_name
        verdict = self.verdicts.get(package) if package else None
        return verdict is None or verdict.state == "working"


def _registered() -> Iterator[tuple[str, Any]]:
    """Name and object of each backend in FLA's registries, of all supported versions, as far as they are loaded."""
    for module_name in _REGISTRY_MODULES:
        module = sys.modules.get(module_name)
        if module is None:
            continue
        registry_class = getattr(module, "BackendRegistry", None)
        loaded = getattr(registry_class, "ensure_initialized", None)
        if loaded is not None:  # up to 0.5.2 a registry is filled at the first call of its operation
            for operation in ("common", "modules", "gated_delta_rule"):
                if f"fla.ops.{operation}" in sys.modules or f"fla.{operation}" in sys.modules:
                    loaded(operation)
        tables = (
            getattr(registry_class, "_registries", {}),
            getattr(module, "_operation_registries", {}),
            getattr(module, "_function_registries", {}),
        )
        for table in tables:
            for registry in list(table.values()):
                for kind, backend in list(registry._backends.items()):
                    yield f"{registry.operation_name}:{kind}", backend


def _try_import(package: str) -> Verdict:
    if sys.modules.get(package) is not None:
        return Verdict(package, "working")
    try:
        found = importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        return Verdict(package, "absent")
    try:
        importlib.import_module(package)
    except Exception as error:
        return Verdict(package, "broken", f"{type(error).__name__}: {error}"[:300])
    return Verdict(package, "working")


def _declare_absent(package: str, seams: Seams) -> None:
    for name in [m for m in sys.modules if m == package or m.startswith(package + ".")]:
        del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]

    def undo() -> None:
        if sys.modules.get(package, package) is None:
            del sys.modules[package]

    seams.on_restore(undo)
