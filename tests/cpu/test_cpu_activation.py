"""Activation of the stand-in: what it puts in place, and where it refuses."""

from pathlib import Path

from standin_package import run_python


def test_activation_serves_megatron_and_maps_devices_to_the_cpu() -> None:
    """One process, because importing torch and Megatron takes seconds."""
    done = run_python(
        """
import importlib.metadata
import torch
from fla_safe import cpu
cpu.activate()
assert cpu.is_active()
assert not torch.cuda.is_available()

import transformer_engine
assert transformer_engine.IS_FLA_SAFE_STANDIN
assert importlib.metadata.version("transformer-engine") == cpu.STANDIN_VERSION
from megatron.core.extensions import transformer_engine as extension
assert extension.HAVE_TE and extension.TEGroupedLinear is not None and extension.SplitAlongDim is not None
from megatron.core.utils import get_te_version, is_te_min_version
assert is_te_min_version("1.12.0") and not is_te_min_version("1.13.0"), get_te_version()

for device in ("cuda", "cuda:0", 0, torch.cuda.current_device(), torch.device("cuda", 0)):
    assert torch.zeros(2, device=device).device.type == "cpu"
    assert torch.zeros(2).to(device).device.type == "cpu"
    assert torch.nn.Linear(2, 2).to(device).weight.device.type == "cpu"
assert torch.zeros(2).new_empty(2, device="cuda").device.type == "cpu"
assert torch.zeros(2).to(torch.float64).dtype == torch.float64
assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
assert torch.zeros(2).type(torch.int64).dtype == torch.int64

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x
    @staticmethod
    def backward(ctx, grad):
        return 2 * grad + torch.zeros(2, device="cuda") + grad.new_zeros(2, device=0)
x = torch.ones(2, requires_grad=True)
Doubled.apply(x).sum().backward()
assert x.grad.tolist() == [2, 2]
assert torch.autograd.grad(Doubled.apply(x).sum(), x)[0].tolist() == [2, 2]

from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor() as pool:
    assert pool.submit(lambda: torch.zeros(2, device="cuda").to("cuda:0")).result().device.type == "cpu"

state = torch.cuda.get_rng_state()
first = torch.rand(3, device="cuda")
torch.cuda.set_rng_state(state)
assert torch.equal(first, torch.rand(3))

event = torch.cuda.Event(enable_timing=True)
with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
    event.record()
torch.cuda.current_stream().wait_event(event)
torch.cuda.synchronize()
assert torch.cuda.device_count() == 1 and torch.cuda.FloatTensor([1.5]).item() == 1.5
assert torch.compile(lambda t: t + 1)(torch.ones(1)).item() == 2
import torchvision.ops
cpu.activate()  # a second time does nothing
print("done")
"""
    )
    assert done.stdout.strip().endswith("done"), done.stdout + done.stderr


def test_the_notice_comes_once_and_from_rank_0_only() -> None:
    code = "import torch; from fla_safe import cpu; cpu.activate(); import transformer_engine; cpu.notice()"
    spoken = run_python(code, RANK="0")
    silent = run_python(code, RANK="1")
    assert spoken.stderr.count("It does not represent") == 1
    assert "FP8" in spoken.stderr
    assert silent.returncode == 0
    assert "represent" not in silent.stderr


def test_refused_where_cuda_is_available() -> None:
    done = run_python(
        "import torch; torch.cuda.is_available = lambda: True; from fla_safe import cpu; cpu.activate()",
    )
    assert done.returncode != 0
    assert "CpuModeError: FLA_SAFE_CPU=1 on a machine where CUDA is available" in done.stderr
    assert "To do: unset FLA_SAFE_CPU" in done.stderr


def test_refused_beside_a_real_transformer_engine(tmp_path: Path) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("")
    done = run_python("import torch; from fla_safe import cpu; cpu.activate()", PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert "CpuModeError: FLA_SAFE_CPU=1 beside an installed transformer_engine" in done.stderr
    assert str(tmp_path) in done.stderr


def test_without_activation_nothing_is_changed() -> None:
    done = run_python(
        """
import importlib.util, torch
from fla_safe import cpu
assert not cpu.is_active() and importlib.util.find_spec("transformer_engine") is None
assert torch.zeros(1).type() == "torch.FloatTensor"
print("done")
"""
    )
    # On a GPU machine the real TransformerEngine is installed, and this says nothing.
    assert "done" in done.stdout or "find_spec" in done.stderr
