"""A damaged file in Triton's cache ends the process, at every start, instead of being compiled or tuned again.

A disk that is full, a killed process on a network file system or a copied cache leave such files. Each case compiles
(or tunes) for real, damages one file in a fresh TRITON_CACHE_DIR, and asks again, as the next process would.
No GPU is needed: kernels are compiled for sm_80 and not launched.

    python triton_damaged_cache.py      exit status 0: at least one case is shown, 1: all gone, 2: cannot tell
"""

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="damaged_cache_")

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

TARGET = GPUTarget("cuda", 80, 32)


@triton.jit
def kernel(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), 1.0)


def compiled(size):
    source = ASTSource(fn=kernel, signature={"x": "*fp32", "SIZE": "constexpr"}, constexprs={"SIZE": size})
    triton.compile(source, target=TARGET)


def tuned(size):
    """Tuning with cache_results=True; benchmark and launch are plain Python."""
    tuner = triton.autotune(
        configs=[triton.Config({"SIZE": 16}), triton.Config({"SIZE": 32})],
        key=["n"],
        cache_results=True,
        do_bench=lambda call, quantiles: [1.0, 1.0, 1.0],
    )(kernel_of_n)
    kernel_of_n.run = lambda *args, **kwargs: None
    tuner[(1,)](torch.ones(1), size)


@triton.jit
def kernel_of_n(x, n, SIZE: tl.constexpr):
    pass


def shown(number, make, pattern, damage, what) -> bool:
    """Make, damage, make again. A size of its own gives each case a cache entry of its own."""
    size = 2 << number
    known = set(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*"))
    make(size)
    file = next(f for f in Path(os.environ["TRITON_CACHE_DIR"]).glob(f"*/{pattern}") if f not in known)
    damage(file)
    try:
        make(size)
    except Exception as error:
        print(f"{what}: {type(error).__name__}: {error}")
        return True
    print(f"{what}: made again")
    return False


def cut(file):
    file.write_bytes(file.read_bytes()[:20])


if __name__ == "__main__":
    print(f"triton {triton.__version__}")
    driver.set_active(SimpleNamespace(get_current_target=lambda: TARGET))
    try:
        compiled(1 << 12)
    except Exception as error:
        print(f"=> cannot tell: nothing compiles here ({type(error).__name__}: {error})")
        sys.exit(2)
    results = [
        shown(1, compiled, "__grp__kernel.json", cut, "group file cut off"),
        shown(2, compiled, "kernel.json", cut, "metadata file cut off"),
        shown(3, compiled, "kernel.cubin", os.remove, "binary missing"),
        shown(4, tuned, "kernel_of_n.autotune.json", cut, "tuning result cut off"),
    ]
    print("=> present" if any(results) else "=> gone")
    sys.exit(0 if any(results) else 1)
