"""torch.compile's first Triton kernel sets TRITON_CACHE_DIR for the whole process, and so moves everybody's cache.

Kernels of other libraries that were compiled before are looked up in another directory after it (and in the next
process, depending on which comes first), and children inherit the variable. No GPU is needed: the object that holds one
compiled kernel is made, nothing is compiled.

    python inductor_triton_cache_dir.py      exit status 0: shown, 1: gone, 2: cannot tell
"""

import os
import sys

os.environ.pop("TRITON_CACHE_DIR", None)

import torch
import triton
from torch._inductor.runtime.hints import DeviceProperties, HeuristicType
from torch._inductor.runtime.triton_heuristics import CachingAutotuner


@triton.jit
def kernel(x):
    pass


if __name__ == "__main__":
    print(f"torch {torch.__version__}, triton {triton.__version__}")
    before = triton.knobs.cache.dir
    device = DeviceProperties("cuda", 0, 132, "90", major=9)
    CachingAutotuner(
        kernel,
        triton_meta={"device": device, "signature": {"x": "*fp32"}, "constants": {}},
        configs=[triton.Config({})],
        save_cache_hook=None,
        mutated_arg_names=[],
        optimize_mem=False,
        heuristic_type=HeuristicType.POINTWISE,
    )
    print(f"Triton's cache before: {before}\n               after: {triton.knobs.cache.dir}")
    shown = triton.knobs.cache.dir != before
    print("=> present" if shown else "=> gone")
    sys.exit(0 if shown else 1)
