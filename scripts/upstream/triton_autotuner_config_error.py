"""One config that cannot be launched ends the whole call in Triton's autotuner, though another config works.

Only OutOfResources, CompileTimeAssertionFailure and PTXASError make the autotuner skip a config. Drivers report more:
`RuntimeError: Triton Error [CUDA]: invalid argument`, or torch's OutOfMemoryError while a benchmark allocates.
No GPU is needed: the launch is plain Python here; only the autotuner is Triton's.

    python triton_autotuner_config_error.py      exit status 0: shown, 1: gone, 2: cannot tell
"""

import sys

import torch
import triton


def bench(call, quantiles):
    call()
    return [1.0, 1.0, 1.0]


@triton.autotune(configs=[triton.Config({}, num_warps=4), triton.Config({}, num_warps=32)], key=["n"], do_bench=bench)
@triton.jit
def kernel(x, n):
    pass


def launch(*args, num_warps, **kwargs):
    if num_warps == 32:
        raise RuntimeError("Triton Error [CUDA]: invalid argument")


if __name__ == "__main__":
    print(f"triton {triton.__version__}")
    kernel.fn.run = launch  # what would compile and launch
    try:
        kernel[(1,)](torch.ones(4), 4)
    except RuntimeError as error:
        print(f"num_warps=4 works, num_warps=32 does not, and the call ended with RuntimeError: {error}\n=> present")
        sys.exit(0)
    print(f"the config that works was taken: {kernel.best_config}\n=> gone")
    sys.exit(1)
