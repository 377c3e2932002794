"""Copies of FLA's host functions without their wrappers, so that calls go straight from our code to the kernels.

FLA wraps the functions that launch its kernels: `dispatch` looks for other backends on every call (FLA 0.5.0 and 0.5.1
search the file system each time, fla-org/flash-linear-attention#993), `tensor_cache` answers by object identity and so
returns stale results for an offsets buffer that is overwritten, and its queue is not thread-safe, `input_guard` enters
a device context per launch, `torch.compiler.disable` another frame. The copies share FLA's kernels and code and change
nothing in FLA's own modules. Delete this when FLA offers undecorated entry points that take `chunk_offsets`.
"""

from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any, Final

__all__ = ["WRAPPERS", "rebind", "unwrap"]

WRAPPERS: Final = ("dispatch", "BackendRegistry.dispatch", "tensor_cache", "input_guard", "DisableContext.__call__")
"""Qualified names of the decorators that are taken off; any other wrapper is kept."""


def rebind(function: Callable[..., Any], replacements: Mapping[str, Any]) -> Callable[..., Any]:
    """A copy of an FLA function in which it, and all FLA functions that it calls, have no wrappers.

    Args:
        function: defined in package `fla`.
        replacements: global names that the copies see otherwise than FLA's modules do.
    """
    return _copy(unwrap(function), replacements, {})


def unwrap(function: Any) -> Any:
    """A function without the wrappers of `WRAPPERS`."""
    while hasattr(function, "__wrapped__") and _decorator(function) in WRAPPERS:
        function = function.__wrapped__
    return function


def _decorator(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return code.co_qualname.partition(".<locals>")[0] if code is not None else ""


def _copy(
    function: FunctionType, replacements: Mapping[str, Any], done: dict[FunctionType, FunctionType]
) -> FunctionType:
    if function in done:
        return done[function]
    scope = dict(function.__globals__)
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    done[function] = copy
    for name in _global_names(function.__code__):
        if name in replacements:
            scope[name] = replacements[name]
            continue
        value = unwrap(scope.get(name))
        if isinstance(value, FunctionType) and value.__module__.partition(".")[0] == "fla":
            scope[name] = _copy(value, replacements, done)
    return copy


def _global_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)
