"""Triton's interpreter fit for FLA's kernels: what it lacks without a GPU driver, patched in Triton and named."""

import builtins
import contextlib
import os
from typing import Any

from fla_safe.errors import FlaSafeError

__all__ = ["InterpreterModeError", "activate"]

_active = False


class InterpreterModeError(FlaSafeError, RuntimeError):
    """The interpreter cannot be switched on any more, or not here."""


def activate() -> None:
    """Let Triton kernels run in Triton's interpreter on the CPU; call it before Triton is imported.

    Sets `TRITON_INTERPRET=1` for this process and its children. Later calls do nothing.

    Raises:
        InterpreterModeError: Triton was imported before without `TRITON_INTERPRET=1`.
    """
    global _active
    if _active:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.language import cdiv
    from triton.runtime.interpreter import InterpretedFunction

    if not isinstance(cdiv, InterpretedFunction):
        raise InterpreterModeError(
            "Triton's interpreter switched on after `triton` was imported",
            "it switched on first: triton.jit decides when a function is defined",
            "set TRITON_INTERPRET=1 before Python starts",
        )
    _take_first_config()
    _keep_loop_indices_typed()
    _compute_in_bfloat16()
    _give_cpu_a_device_context()
    _active = True


def _take_first_config() -> None:
    """Autotuners need a driver to time candidates and to name their disk cache; there is none, so the first one wins.

    Delete when Triton's interpreter skips autotuning by itself.
    """
    from triton.runtime.autotuner import Autotuner

    def bench(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        return [float(self.configs.index(config)) if config in self.configs else float(len(self.configs))] * 3

    def check_disk_cache(self: Any, tuning_key: Any, configs: Any, bench_fn: Any) -> bool:
        bench_fn()
        return False

    Autotuner._bench = bench
    Autotuner.check_disk_cache = check_disk_cache


def _keep_loop_indices_typed() -> None:
    """In a compiled kernel the index of `for i in range(n)` is a tensor; in the interpreter it is a Python int.

    FLA's chunk_delta_h calls `i.to(tl.int64)` on it. Bounds are also read with `.item()`, because NumPy 2.4 refuses
    `int()` of the one-element arrays that Triton 3.6 holds. Delete when Triton's interpreter hands out tensors.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    class Index(int):
        def to(self, *args: Any, **kwargs: Any) -> "Index":
            return self

    def typed_range(*bounds: Any) -> Any:
        if not any(isinstance(bound, tl.core.tensor) for bound in bounds):
            return builtins.range(*bounds)
        return map(Index, builtins.range(*(b.handle.data.item() if hasattr(b, "handle") else int(b) for b in bounds)))

    patch_lang = interpreter._patch_lang

    def patch_lang_and_range(fn: Any) -> Any:
        fn.__globals__.setdefault("range", typed_range)
        return patch_lang(fn)

    interpreter._patch_lang = patch_lang_and_range


def _compute_in_bfloat16() -> None:
    """The interpreter keeps bfloat16 as uint16 bits and computes on the bits; it also truncates where GPUs round.

    Arithmetic on bfloat16 is done in float32 and rounded to nearest even, as is every conversion to it. Seen in Triton
    3.6 to 3.8; delete when `tl.dot` of two bfloat16 blocks is right in the interpreter.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def to_bits(data: Any) -> Any:
        bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.where(np.isnan(data), np.uint32(0x7FC0), rounded).astype(np.uint16)

    def to_float(data: Any) -> Any:
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)

    convert_float = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return to_bits(data)
        if source == tl.bfloat16 and target == tl.float32:
            return to_float(data)
        return convert_float(data, source, target, rounding_mode)

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(to_float(handle.data), tl.float32)

    builder = interpreter.InterpreterBuilder
    binary_op, unary_op, create_dot = builder.binary_op, builder.unary_op, builder.create_dot

    def narrow(handle: Any) -> Any:
        if handle.data.dtype != np.float32:  # a comparison
            return handle
        return interpreter.TensorHandle(to_bits(handle.data), tl.bfloat16)

    def binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar != tl.bfloat16:
            return binary_op(self, lhs, rhs, op)
        return narrow(binary_op(self, wide(lhs), wide(rhs), op))

    def unary(self: Any, arg: Any, op: Any) -> Any:
        return unary_op(self, arg, op) if arg.dtype.scalar != tl.bfloat16 else narrow(unary_op(self, wide(arg), op))

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return create_dot(self, wide(a), wide(b), d, *options)

    interpreter._convert_float = convert
    builder.binary_op, builder.unary_op, builder.create_dot = binary, unary, dot


def _give_cpu_a_device_context() -> None:
    """FLA 0.4.2 enters `torch.cpu.device(index)` around every launch. Delete with support for FLA 0.4.2."""
    import torch.cpu

    if not hasattr(torch.cpu, "device"):
        torch.cpu.device = lambda *args: contextlib.nullcontext()  # type: ignore[attr-defined]
