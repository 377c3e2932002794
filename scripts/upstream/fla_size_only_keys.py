"""FLA tunes and compiles its norm kernels again whenever the number of tokens crosses a boundary, for nothing.

The count of blocks `NB` is a constexpr and stands in the autotune key, but no line of the kernels reads it: each new
value is a round of benchmarks (25 configs in l2norm) and a compilation of the same code, in the middle of training.
Known as https://github.com/fla-org/flash-linear-attention/issues/1147 (causal conv, mended in 0.6.0) and 758; the
norms are the subject of pull request 1247. No GPU is needed: nothing is launched.

    python fla_size_only_keys.py      exit status 0: shown, 1: gone, 2: cannot tell
"""

import ast
import importlib
import sys
import textwrap

MODULES = [f"fla.modules.{name}" for name in ("l2norm", "fused_norm_gate", "convolution", "conv.triton.ops")]


def autotuned(module):
    """Name, autotuner and JIT function of each autotuned kernel that a module defines."""
    for name, value in vars(module).items():
        tuner, node = None, value
        while hasattr(node, "fn") and not hasattr(node, "params"):
            tuner = node if hasattr(node, "configs") else tuner
            node = node.fn
        if tuner is not None and hasattr(node, "params"):
            yield name, tuner, node


def unread(jit):
    """Constexpr parameters that the kernel's body does not mention."""
    (function,) = ast.parse(textwrap.dedent(jit.src)).body
    read = {node.id for line in function.body for node in ast.walk(line) if isinstance(node, ast.Name)}
    return {parameter.name for parameter in jit.params if parameter.is_constexpr} - read


if __name__ == "__main__":
    import fla

    print(f"fla {fla.__version__}")
    seen, found = set(), False
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for kernel, tuner, jit in autotuned(module):
            if kernel in seen:
                continue
            seen.add(kernel)
            idle = sorted(unread(jit) & set(tuner.keys))
            if idle:
                found = True
                print(f"{kernel}: key {tuner.keys}, never read: {idle}; {len(tuner.configs)} configs for each value")
    print(f"{len(seen)} autotuned kernels looked at")
    if not seen:
        print("=> cannot tell: the kernels are not where they were")
        sys.exit(2)
    print("=> present" if found else "=> gone")
    sys.exit(0 if found else 1)
