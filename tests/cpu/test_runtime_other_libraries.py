"""The runtime knows nothing of FLA: here it hardens Liger's dynamic-tanh kernels.

Needs liger-kernel, installed or in the directory named by `FLA_SAFE_TEST_LIGER`
(`pip install --no-deps --target DIR liger-kernel`).
"""

import importlib.util
import os
from typing import Any

import pytest

from fake_triton.isolated import child

LIGER = os.environ.get("FLA_SAFE_TEST_LIGER", "")
pytestmark = pytest.mark.skipif(
    not LIGER and importlib.util.find_spec("liger_kernel") is None,
    reason="liger-kernel is not installed and FLA_SAFE_TEST_LIGER is unset",
)


def frozen(gpu: Any) -> None:
    import torch
    from liger_kernel.ops import dyt

    from fla_safe.runtime import LateTuneError, RuntimeSettings, activate

    def step(rows: int, width: int = 512) -> list[Any]:
        x, weight = torch.zeros(rows, width), torch.zeros(width)
        gpu.launches.clear()
        dyt.liger_dyt_fwd(x, weight[:1], weight, weight)
        dyt.liger_dyt_bwd(x, x, weight[:1], weight, weight)
        return [(launch.kernel, launch.grid, launch.num_warps) for launch in gpu.launches]

    # `infer_device` asks torch.cuda, which the stand-in GPU does not claim to be.
    dyt.infer_device = lambda: "cuda"
    runtime = activate(RuntimeSettings(guard="strict", audit="process"))
    with runtime.warmup():
        step(48)
        before = step(48)
    runtime.freeze()
    assert step(48) == before
    for rows in (1, 2, 15, 16, 17, 1000, 1024):
        assert len(step(rows)) == 2
    counters = runtime.counters()
    assert (counters["late_tunes"], counters["late_compiles"], counters["file_ops"]) == (0, 0, 0)
    assert {name.rsplit(".", 1)[1] for name in runtime.report()["launches"]["planned"]} == {
        "_dyt_fwd_kernel",
        "_dyt_bwd_kernel",
    }
    with pytest.raises(LateTuneError, match="_dyt_fwd_kernel"):
        step(48, width=1024)


def test_ligers_kernels_run_frozen() -> None:
    child(frozen, {}, path=[LIGER] if LIGER else [])
