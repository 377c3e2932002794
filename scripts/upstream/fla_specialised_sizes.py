"""Some of FLA's kernels are compiled again when a size becomes divisible by 16, stops being it, or is 1.

Triton makes a binary of its own for each such class of an integer argument, unless it is named in `do_not_specialize`.
Most of FLA's kernels name `T`; these do not name all the sizes that change with the batch, so that a pack of an odd
length compiles in the middle of training. No GPU is needed: nothing is launched.

    python fla_specialised_sizes.py      exit status 0: shown, 1: gone, 2: cannot tell
"""

import fnmatch
import importlib
import sys

MODULES = [f"fla.modules.{name}" for name in ("l2norm", "fused_norm_gate", "convolution", "conv.triton.ops")]
SIZES = ("T", "BS", "stride_*_n")  # tokens, tokens for each block, and strides that grow with tokens


if __name__ == "__main__":
    import fla

    print(f"fla {fla.__version__}")
    seen, found = set(), False
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for kernel, jit in vars(module).items():
            while hasattr(jit, "fn") and not hasattr(jit, "params"):
                jit = jit.fn
            if kernel in seen or not hasattr(jit, "params"):
                continue
            seen.add(kernel)
            sizes = [
                p.name
                for p in jit.params
                if not (p.is_constexpr or p.do_not_specialize) and any(fnmatch.fnmatchcase(p.name, s) for s in SIZES)
            ]
            if sizes:
                found = True
                print(f"{kernel}: a binary for each class of {', '.join(sizes)}")
    print(f"{len(seen)} kernels looked at")
    if not seen:
        print("=> cannot tell: the kernels are not where they were")
        sys.exit(2)
    print("=> present" if found else "=> gone")
    sys.exit(0 if found else 1)
