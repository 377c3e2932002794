"""Runs a function of a test module on several gloo ranks."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def on_ranks(module: str, function: str, ranks: int, *, timeout: float = 180, **environment: str) -> list[str]:
    """Call `module.function()` on each rank under torchrun; returns the lines it printed, all ranks together.

    Args:
        module: path of the file that has the function.
        environment: added to this process's.
    """
    code = (
        "import importlib.util, sys, torch, torch.distributed as dist\n"
        "spec = importlib.util.spec_from_file_location('test_module', sys.argv[1])\n"
        "test_module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['test_module'] = test_module\n"
        "spec.loader.exec_module(test_module)\n"
        "torch.set_num_threads(1)\n"
        "dist.init_process_group('gloo')\n"
        "getattr(test_module, sys.argv[2])()\n"
        "dist.destroy_process_group()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "--no-python"]
        + [sys.executable, "-W", "ignore", "-c", code, module, function],
        # Unbuffered output would let the lines of two ranks run into one.
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "", "PYTHONPATH": str(Path(__file__).parent)}
        | environment,
        text=True,
        capture_output=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout.splitlines()
