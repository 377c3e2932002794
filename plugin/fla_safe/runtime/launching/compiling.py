"""A replacement for `JITFunction._do_compile`: one compilation for each binary, counted, and none after the freeze.

For every planned call two binaries exist: one for its own class of arguments (pointers on 16-byte boundaries, integers
divisible by 16 or equal to 1), and a *general* one that assumes nothing and is right for all classes. After the freeze
a call whose class has no binary of its own gets the general one instead of a compilation.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fla_safe.runtime.artifacts import triton_cache
from fla_safe.runtime.guard import Guard
from fla_safe.runtime.seams import Seams

__all__ = ["Compiling"]


class Compiling:
    """Owns the seam and the general binaries.

    Args:
        guard: says whether a compilation is late.
        answers_for: whether a kernel, by name, is one whose late compilations count.

    Attributes:
        compiled: number of compilations (from source or from a warm cache directory) since activation.
        served_general: calls of a new class after the freeze that were answered with a general binary.
    """

    def __init__(self, guard: Guard, answers_for: Callable[[str], bool] = lambda kernel: True) -> None:
        self.guard = guard
        self.answers_for = answers_for
        self.compiled = 0
        self.served_general = 0
        self._general: dict[tuple[Any, ...], Any] = {}
        self._locks: dict[tuple[Any, ...], threading.Lock] = {}
        self._jits: dict[int, Any] = {}

    def install(self, seams: Seams) -> None:
        """Exchange `JITFunction._do_compile` and `CompiledKernel._init_handles`."""
        from triton.compiler.compiler import CompiledKernel
        from triton.runtime.jit import JITFunction

        owner = self

        def _do_compile(
            jit: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, warmup: Any
        ) -> Any:
            return owner._compile(stock, jit, key, signature, device, constexprs, options, attrs, warmup)

        def _init_handles(compiled: Any) -> None:
            if compiled.module is None:  # up to 3.6 this builds or reads the C launcher, through Triton's cache
                with owner._store_scope(getattr(compiled.src, "fn", None)):
                    stock_init(compiled)

        # A general binary that stands in for others would stay in Triton's memory, and the next runtime not know it.
        seams.on_restore(self._forget)
        stock = seams.replace(JITFunction, "_do_compile", _do_compile)
        stock_init = seams.replace(CompiledKernel, "_init_handles", _init_handles)

    def _forget(self) -> None:
        for jit in self._jits.values():
            jit.device_caches.clear()

    def _store_scope(self, jit: Any) -> AbstractContextManager[None]:
        """Where artifacts of this kernel are kept: in the rank's store, if there is one and the kernel is ours."""
        # Inductor takes the Python function from its kernels before they are loaded (`prepare_for_pickle`).
        named = jit is not None and jit.fn is not None
        return triton_cache.scope() if named and self.answers_for(_name(jit)) else nullcontext()

    def _compile(
        self,
        stock: Any,
        jit: Any,
        key: Any,
        signature: Mapping[str, Any],
        device: int,
        constexprs: Mapping[Any, Any],
        options: Any,
        attrs: Mapping[Any, Any],
        warmup: bool,
    ) -> Any:
        binaries = jit.device_caches[device][0]
        form, is_general = _general_form(jit, signature, constexprs, attrs)
        where = (id(jit), device, form, str(sorted(options.__dict__.items(), key=lambda item: item[0])))
        if self.guard.frozen and self.answers_for(_name(jit)):
            general = self._general.get(where)
            if general is not None:
                self.served_general += 1
                binaries[key] = general
                return general
            self.guard.late_compile(_name(jit), _text(jit, signature, device))
        # Two threads that need one binary compile it once; different binaries do not wait for each other.
        with self._locks.setdefault((id(jit), device, key), threading.Lock()):
            binary = binaries.get(key)
            if binary is not None:
                return binary
            self.compiled += 1
            self._jits[id(jit)] = jit
            with self._store_scope(jit):
                binary = stock(jit, key, signature, device, constexprs, options, attrs, warmup)
        if is_general and binary is not None:
            self._general[where] = binary
        return binary


def _general_form(jit: Any, signature: Any, constexprs: Any, attrs: Any) -> tuple[tuple[Any, ...], bool]:
    """What remains of a specialisation when classes of values are dropped, and whether there were none."""
    types: list[Any] = []
    constants: list[tuple[int, str]] = []
    is_general = not any(attrs.values())
    for i, (parameter, kind) in enumerate(zip(jit.params, signature.values(), strict=False)):
        value = constexprs.get((i,))
        if kind == "constexpr" and not parameter.is_constexpr and type(value) is int:
            kind, is_general = "i32", False  # Triton folds a run-time integer that equals 1 into the code
        elif kind == "constexpr":
            # Functions made by one factory have one name and different code.
            constants.append((i, str(getattr(value, "cache_key", None) or repr(value))))
        types.append(kind)
    # A binary with constants inside tuples stands in for no other.
    inside = tuple((path, repr(value)) for path, value in constexprs.items() if len(path) > 1)
    return (tuple(types), tuple(constants), inside), is_general and not inside


def _name(jit: Any) -> str:
    return f"{jit.fn.__module__}.{jit.fn.__qualname__}"


def _text(jit: Any, signature: Mapping[str, Any], device: int) -> str:
    live = ", ".join(f"{name}: {kind}" for name, kind in signature.items() if kind != "constexpr")
    return f"({live}) on device {device}"
