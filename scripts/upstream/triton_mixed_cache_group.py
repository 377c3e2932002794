"""Triton loads a cache entry whose binary belongs to another kernel: wrong code, and not a word.

Files of one entry carry no sums, so an entry that two writers mixed looks whole (a shared or copied cache: vLLM issue
52413 had NaN outputs from one on Lustre; https://github.com/triton-lang/triton/pull/11319 was closed). Here the binary
for 4 warps is put beside the metadata for 8, so that it would be launched with twice the threads that it was made for.
No GPU is needed: kernels are compiled for sm_80 and not launched.

    python triton_mixed_cache_group.py      exit status 0: shown, 1: gone, 2: cannot tell
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="mixed_cache_")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def kernel(x):
    tl.store(x + tl.arange(0, 1024), 1.0)


def compiled(num_warps):
    source = ASTSource(fn=kernel, signature={"x": "*fp32"}, constexprs={})
    return triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": num_warps})


def new_binary(known):
    return next(f for f in Path(os.environ["TRITON_CACHE_DIR"]).glob("*/kernel.cubin") if f not in known)


if __name__ == "__main__":
    print(f"triton {triton.__version__}")
    try:
        four = compiled(4)
        file_of_four = new_binary([])
        eight = compiled(8)
        file_of_eight = new_binary([file_of_four])
    except Exception as error:
        print(f"=> cannot tell: nothing compiles here ({type(error).__name__}: {error})")
        sys.exit(2)
    shutil.copy(file_of_four, file_of_eight)
    try:
        again = compiled(8)
    except Exception as error:
        print(f"the mixed entry was refused: {type(error).__name__}: {error}\n=> gone")
        sys.exit(1)
    if again.asm["cubin"] == eight.asm["cubin"]:
        print("the mixed entry was noticed and compiled again\n=> gone")
        sys.exit(1)
    print(f"loaded: metadata for {again.metadata.num_warps} warps with the binary for {four.metadata.num_warps}")
    print("=> present")
    sys.exit(0)
