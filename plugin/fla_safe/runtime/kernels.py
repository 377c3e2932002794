"""What the runtime needs to know of a Triton kernel before it calls it: its layers, and what its arguments decide.

A kernel is a `JITFunction` under any number of `Heuristics` and at most one `Autotuner`. Constexpr arguments that
nothing reads are *dead*: their value changes neither code nor result, only cache keys. FLA passes such (`NB`, a count
of blocks: flash-linear-attention issues 758 and 1147), and each new value costs a round of tuning and a compilation.
"""

import ast
import dis
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import CO_VARARGS, CO_VARKEYWORDS
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
    alive = read if tuner is None else read | _read_by_tuner(tuner, parameters)
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


def _read_by_tuner(tuner: Any, parameters: Collection[str]) -> set[str]:
    """Parameters that configs set, or that pruning or hooks may read."""
    hooks = [c.pre_hook for c in tuner.configs]
    hooks += [tuner.pre_hook] if tuner.user_defined_pre_hook else []
    hooks += [tuner.post_hook] if tuner.user_defined_post_hook else []
    functions = [f for f in (*hooks, tuner.perf_model) if f is not None]
    found = {name for c in tuner.configs for name in c.kwargs} | _mentioned(functions, parameters)
    if tuner.early_config_prune is not None:
        # Its first argument is the list of configs.
        found |= _mentioned([tuner.early_config_prune], parameters, first=1)
    return found & set(parameters)


def _mentioned(functions: Collection[Any], parameters: Collection[str], first: int = 0) -> set[str]:
    """Parameters that host functions may read from their argument mapping: all, where that cannot be seen."""
    found: set[str] = set()
    for function in functions:
        code = getattr(function, "__code__", None)
        if code is None or _passes_on(code, code.co_varnames[first : _arguments(code)], parameters):
            return set(parameters)
        found.update(_strings(code))
        found.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    return found & set(parameters)


def _passes_on(code: CodeType, arguments: Collection[str], parameters: Collection[str]) -> bool:
    """Whether a function does more with a mapping it was given than `mapping["name"]` and `mapping.get("name")`.

    A mapping that goes on to a helper, is copied or is asked for a computed name may be read for any parameter.
    Arguments named as parameters of the kernel are values, not mappings.
    """
    mappings = set(arguments) - set(parameters)
    if mappings & set(code.co_cellvars):
        return True
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    for n, step in enumerate(steps):
        loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)  # Python 3.13 loads two at once
        if not step.opname.startswith("LOAD_FAST") or mappings.isdisjoint(loaded):
            continue
        asked = [s for s in steps[n + 1 : n + 4] if s.opname != "PUSH_NULL"]
        item = asked[0].opname == "LOAD_CONST" and (asked[1].opname == "BINARY_SUBSCR" or asked[1].argrepr == "[]")
        get = asked[0].argval == "get" and asked[1].opname == "LOAD_CONST"
        if not (item or get):
            return True
    return False


def _arguments(code: CodeType) -> int:
    variadic = bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
    return code.co_argcount + code.co_kwonlyargcount + variadic


def _strings(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from (c for c in constant if isinstance(c, str))
        elif isinstance(constant, CodeType):
            yield from _strings(constant)
