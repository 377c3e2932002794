"""Arms the import callbacks through which this package reaches ms-swift; runs at the end of every `import torch`.

PyTorch calls the entry points of group `torch.backends` when it has been imported (its autoload mechanism for
out-of-tree extensions). Nothing else in Python lets an installed package add a flag to another package's command line
without a wrapper: see docs/architecture.md. Because every process pays for it, this module is standard library only,
costs microseconds, and cannot raise.
"""

import os
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["install"]

# Module that was just executed -> (our module, function that receives it).
CALLBACKS = {
    "swift.megatron.arguments.megatron_args": ("fla_safe.swift.arguments", "register"),
    "swift.megatron.model.utils": ("fla_safe.swift.model", "register"),
}


class _CallbackLoader(Loader):
    """Executes a module with its real loader, then hands it to our callback."""

    def __init__(self, real: Any, name: str) -> None:
        self._real = real
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._real
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        self._real.exec_module(module)
        _call_back(self._name, module)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._real, attribute)


class _CallbackFinder(MetaPathFinder):
    """First on `sys.meta_path`; answers for the modules of `CALLBACKS` alone and leaves other imports untouched."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in CALLBACKS:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _CallbackLoader(spec.loader, name)
                return spec
        return None


def _call_back(name: str, module: ModuleType) -> None:
    """Errors propagate when the flag was asked for; other users of ms-swift only see one line."""
    ours, function = CALLBACKS[name]
    try:
        getattr(import_module(ours), function)(module)
    except Exception as error:
        if _flag_is_wanted():
            raise
        _say(f"--gdn_impl is not available: {error}")


def _flag_is_wanted() -> bool:
    # argparse also takes `--gdn-impl`, `--gdn_impl=...` and abbreviations. ms-swift passes the arguments of Ray workers
    # in RAY_SWIFT_ARGS (a JSON list) instead of argv.
    given = f"{os.environ.get('RAY_SWIFT_ARGS', '')} {' '.join(getattr(sys, 'argv', []))}"
    return "--gdn" in given


def _say(text: str) -> None:
    # A process that was started with its standard error closed has none.
    if sys.stderr is not None:
        sys.stderr.write(f"fla_safe: {text}\n")


def _trace(directory: str) -> None:
    """Account for this process's file operations (`fla-safe trace`). A trace that fails is one line, and no trace."""
    try:
        kernels = os.environ.get("FLA_SAFE_TRACE_KERNELS", "chunk_gated_delta_rule_fwd").split(",")
        import_module("fla_safe.trace.record").start(directory, tuple(kernels))
        modules = import_module("fla_safe.trace.launches").MODULES
        CALLBACKS.update(dict.fromkeys(modules, ("fla_safe.trace.launches", "attach")))
    except Exception as error:
        _say(f"this process is not traced: {error}")


def install() -> None:
    """Entry point of group `torch.backends`: arm the callbacks, and the CPU stand-in if `FLA_SAFE_CPU=1` asks for it.

    Never raises: a package that raises here would break `import torch` for everybody. A stand-in that was asked for and
    refused is reported by the first module that needs it, not here.
    """
    try:
        if any(isinstance(finder, _CallbackFinder) for finder in sys.meta_path):
            return
        if directory := os.environ.get("FLA_SAFE_TRACE"):
            _trace(directory)
        sys.meta_path.insert(0, _CallbackFinder())
        for name in CALLBACKS:
            module = sys.modules.get(name)
            if module is not None:
                _call_back(name, module)
        if os.environ.get("FLA_SAFE_CPU") == "1":
            import_module("fla_safe.cpu").activate()
    except Exception as error:
        _say(f"autoload did not finish, --gdn_impl is not available: {error}")
        _refuse_the_flag(error)


def _refuse_the_flag(error: Exception) -> None:
    """A run that asks for `--gdn_impl` must not train on stock layers because we failed to register the flag."""
    if not _flag_is_wanted():
        return
    reason = f"fla_safe could not register --gdn_impl: {error}"

    class Refusal(MetaPathFinder):
        def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> None:
            if name == "swift.megatron.arguments.megatron_args":
                raise RuntimeError(reason)

    sys.meta_path.insert(0, Refusal())
