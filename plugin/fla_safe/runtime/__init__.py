"""Floor 1: Triton kernels that are tuned once, agreed between ranks, compiled before training and launched directly.

Knows nothing of Gated DeltaNet: `activate` hardens every autotuned Triton kernel of the process. Importing this package
imports neither torch nor Triton; activating it does.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fla_safe.runtime.guard import LateCompileError, LateTuneError, NoWorkingConfigError
    from fla_safe.runtime.lifecycle import Runtime, RuntimeSettings, activate, active

__all__ = [
    "LateCompileError",
    "LateTuneError",
    "NoWorkingConfigError",
    "Runtime",
    "RuntimeSettings",
    "activate",
    "active",
]

_WHERE = {"LateCompileError": "guard", "LateTuneError": "guard", "NoWorkingConfigError": "guard"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"fla_safe.runtime.{_WHERE.get(name, 'lifecycle')}"), name)
