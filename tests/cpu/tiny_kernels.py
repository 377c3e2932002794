"""Two small Triton kernels and their compilation for a GPU that need not be there (the real compiler, no driver)."""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = ["add_kernel", "compile_for_hopper", "scale_kernel"]


@triton.jit
def add_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


@triton.jit
def scale_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


def compile_for_hopper(kernel=add_kernel, block=128, capability=90):
    """Compile through Triton's cache and return the `CompiledKernel`."""
    signature = {"x": "*fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    source = ASTSource(kernel, signature, {"BLOCK": block})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))
