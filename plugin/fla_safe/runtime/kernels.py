"""What the runtime needs to know of a Triton kernel before it calls it: its layers, and what its arguments decide.

A kernel is a `JITFunction` under any number of `Heuristics` and at most one `Autotuner`. Constexpr arguments that
nothing reads are *dead*: their value changes neither code nor result, only cache keys. FLA passes such (`NB`, a count
of blocks: flash-linear-attention issues 758 and 1147), and each new value costs a round of tuning and a compilation.
"""

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import CodeType
from typing import Any

__all__ = ["PINNED", "Kernel", "describe", "without_specialisation"]

PINNED = 1
"""Value that every dead constexpr gets."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """Facts of one kernel.

    Attributes:
        name: `module.function`, as in decision tables.
        outer: the object that is called with `[grid]`.
        jit: the `JITFunction` inside.
        tuner: the `Autotuner`, or None.
        parameters: names in order.
        constexprs: names of constexpr parameters.
        dead: constexprs that nothing reads.
        exact: run-time arguments whose value picks a config or a heuristic's result.
    """

    name: str
    outer: Any
    jit: Any
    tuner: Any | None
    parameters: tuple[str, ...]
    constexprs: frozenset[str]
    dead: frozenset[str]
    exact: frozenset[str]


def describe(outer: Any) -> Kernel | None:
    """Facts of a kernel, or None for what is no plain Triton kernel (interpreted, Inductor's, two autotuners)."""
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    tuner, readers, node = None, [], outer
    while not isinstance(node, JITFunction):
        if isinstance(node, Heuristics):
            readers += node.values.values()
        elif isinstance(node, Autotuner) and tuner is None:
            tuner = node
        else:
            return None
        node = node.fn
    parameters = tuple(p.name for p in node.params)
    constexprs = frozenset(p.name for p in node.params if p.is_constexpr)
    read = _mentioned(readers, parameters)
    pruning = [tuner.early_config_prune, tuner.perf_model] if tuner is not None else []
    configured = {name for c in tuner.configs for name in c.kwargs} if tuner is not None else set()
    alive = read | _mentioned([f for f in pruning if f is not None], parameters) | configured
    return Kernel(
        name=f"{node.fn.__module__}.{node.fn.__qualname__}",
        outer=outer,
        jit=node,
        tuner=tuner,
        parameters=parameters,
        constexprs=constexprs,
        dead=frozenset(_unread_constexprs(node, constexprs) - alive),
        exact=frozenset((read | set(tuner.keys if tuner is not None else ())) - constexprs),
    )


def without_specialisation(kernel: Kernel, patterns: Collection[str]) -> list[Any]:
    """Parameters (Triton's objects) that match a pattern and on whose value Triton would still specialise.

    Arguments such as a number of tokens change from step to step; code that is special for multiples of 16 or for 1
    gains nothing there and costs a compilation at the first odd length.
    """
    return [
        p
        for p in kernel.jit.params
        if not p.is_constexpr and not p.do_not_specialize and any(fnmatchcase(p.name, x) for x in patterns)
    ]


def _unread_constexprs(jit: Any, constexprs: Collection[str]) -> set[str]:
    try:
        function = jit.parse().body[0]
    except (SyntaxError, AssertionError, AttributeError):
        return set()
    # Decorators, defaults and annotations are not part of the compiled body.
    names = {n.id for part in function.body for n in ast.walk(part) if isinstance(n, ast.Name)}
    return set(constexprs) - names


def _mentioned(functions: Collection[Any], parameters: Collection[str]) -> set[str]:
    """Parameters that host functions may read from their argument mapping: all, where the code cannot be seen."""
    found: set[str] = set()
    for function in functions:
        code = getattr(function, "__code__", None)
        if code is None:
            return set(parameters)
        found.update(_strings(code))
        found.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    return found & set(parameters)


def _strings(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from (c for c in constant if isinstance(c, str))
        elif isinstance(constant, CodeType):
            yield from _strings(constant)
