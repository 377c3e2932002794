"""Three things that Triton's interpreter (TRITON_INTERPRET=1) does otherwise than the compiler, one for each argument.

autotune   an autotuned kernel needs a GPU driver, although nothing can be benchmarked in the interpreter
range      the index of `for i in range(n)` is a Python int, so `i.to(tl.int64)` fails; compiled it is a tensor
bfloat16   arithmetic on bfloat16 is done on the bits: 1.5 * 2.0 is not 3.0

python triton_interpreter.py autotune      exit status 0: shown, 1: gone, 2: cannot tell
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
import triton
import triton.language as tl


@triton.autotune(configs=[triton.Config({"SIZE": 2}), triton.Config({"SIZE": 4})], key=["n"])
@triton.jit
def tuned(x, n, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(x + i, 7.0, mask=i < n)


@triton.jit
def loop(x, n):
    for i in range(n):
        tl.store(x + i.to(tl.int64), 7.0)


@triton.jit
def product(x, y, z):
    tl.store(z, tl.load(x) * tl.load(y))


def autotune() -> bool:
    if torch.cuda.is_available():
        print("=> cannot tell: this machine has the GPU that the autotuner asks for")
        sys.exit(2)
    return fails_with("active driver", lambda: tuned[(1,)](torch.zeros(4), 4))


def range_() -> bool:
    return fails_with("no attribute 'to'", lambda: loop[(1,)](torch.zeros(4), 2))


def bfloat16() -> bool:
    x, y, z = (torch.full((1,), v, dtype=torch.bfloat16) for v in (1.5, 2.0, 0.0))
    product[(1,)](x, y, z)
    print(f"bfloat16: 1.5 * 2.0 = {z.item()}")
    return z.item() != 3.0


def fails_with(text, call) -> bool:
    try:
        call()
    except Exception as error:
        print(f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}")
        if text not in str(error):
            print("=> cannot tell: another error than the known one is in the way")
            sys.exit(2)
        return True
    print("works")
    return False


if __name__ == "__main__":
    print(f"triton {triton.__version__}")
    cases = {"autotune": autotune, "range": range_, "bfloat16": bfloat16}
    if sys.argv[1:] not in [[name] for name in cases]:
        print(f"=> cannot tell: expected one of {', '.join(cases)}")
        sys.exit(2)
    shown = cases[sys.argv[1]]()
    print("=> present" if shown else "=> gone")
    sys.exit(0 if shown else 1)
