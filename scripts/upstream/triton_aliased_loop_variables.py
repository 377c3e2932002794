"""A loop variable that begins as another's alias and later takes that one's place keeps its first value.

Triton decides which variables a loop carries by visiting its body once and looking which names hold another value
afterwards. `b = a` before the loop makes both names hold one value; `b = a` in the loop gives `b` what it held already,
in this first visit: `b` is not carried, and every iteration sees the value from before the loop. A shift register that
begins with zeros is written that way. Nothing is said; Triton's interpreter runs the same code as Python does.
No GPU is needed: the kernels are compiled for one, and their code is read.

    python triton_aliased_loop_variables.py      exit status 0: shown, 1: gone, 2: cannot tell
"""

import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def aliased(x, y, n):
    a = tl.load(x)
    b = a
    for i in range(n):
        tl.store(y + i, b)  # what `a` was one iteration ago
        b = a
        a = tl.load(x + i)


@triton.jit
def apart(x, y, n):
    a = tl.load(x)
    b = a + 0
    for i in range(n):
        tl.store(y + i, b)
        b = a
        a = tl.load(x + i)


def carried(kernel) -> int:
    """How many values the kernel's loop hands from one iteration to the next."""
    source = ASTSource(kernel, signature={"x": "*i32", "y": "*i32", "n": "i32"})
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
    arguments = re.search(r"iter_args\((.*?)\)", text)
    return arguments[1].count("=") if arguments else 0


if __name__ == "__main__":
    print(f"triton {triton.__version__}")
    counts = [carried(kernel) for kernel in (aliased, apart)]
    print(f"values carried by the loop: {counts[0]} where b begins as a's alias, {counts[1]} where it does not")
    if counts[1] != 2:
        print("=> cannot tell: the second should be 2")
        sys.exit(2)
    if counts[0] == 2:
        print("=> gone")
        sys.exit(1)
    print("=> present")
    sys.exit(0)
