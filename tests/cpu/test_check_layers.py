"""`--gdn_check` on a real Megatron layer under Megatron's own recomputation, and on the fused mixer, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="uses the CPU stand-in for TransformerEngine")

SCRIPT = """
import dataclasses, json, sys
from pathlib import Path
from types import SimpleNamespace
import torch, torch.distributed as dist
from fla_safe.diagnosis.finding import NonFiniteError
from fla_safe.diagnosis.watch import Watch
from fla_safe.megatron.watching import rank_in_words, watch_layers

torch.set_num_threads(1)
folder, results = Path(sys.argv[1]), {}

def found(function):
    try:
        function()
    except NonFiniteError as error:
        finding = error.finding
        kept = ("number", "layer", "stage", "role", "tensor", "direction", "micro_batch", "where", "cause")
        place = {"segment": finding.place.segment, "head": finding.place.head}
        data = torch.load(error.file, weights_only=True)
        return {name: getattr(finding, name) for name in kept} | place | {"fused": data["kernel"]["fused"]}
"""

MEGATRON = """
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from fla_safe.megatron.spec import gated_delta_net_spec

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
tensor_parallel.model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=1, hidden_size=16, num_attention_heads=4, normalization="RMSNorm", gated_linear_unit=True,
    activation_func=torch.nn.functional.silu, add_bias_linear=False, experimental_attention_variant="gated_delta_net",
    linear_attention_freq=4, linear_conv_kernel_dim=4, linear_key_head_dim=6, linear_value_head_dim=5,
    linear_num_key_heads=2, linear_num_value_heads=4, use_cpu_initialization=True,
)
groups = SimpleNamespace(tp=dist.group.WORLD, cp=dist.group.WORLD)
offsets = torch.tensor([0, 3, 70, 75], dtype=torch.int32)
x = torch.randn(75, 1, 16)

class Block(torch.nn.Module):
    layer_number = 7

    def __init__(self):
        super().__init__()
        spec = gated_delta_net_spec(config, kernel="torch")
        self.self_attention = build_module(spec, config, layer_number=7, pg_collection=groups)

def job():
    block = Block()
    watch_layers([block], Watch("every", rank=0, where=rank_in_words(0), directory=folder))
    params = SimpleNamespace(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets)

    def whole(h):
        return block.self_attention(h, None, packed_seq_params=params)[0]

    def step(grads):
        outs = [tensor_parallel.checkpoint(whole, False, x.clone().requires_grad_()) for _ in grads]
        for out, grad in zip(outs, grads):
            out.backward(grad)
    return block.self_attention, step

def weight(name, index):
    layer, step = job()
    with torch.no_grad():
        dict(layer.named_parameters())[name][index] = float("nan")
    return found(lambda: step([torch.ones_like(x)]))

def gradient():
    layer, step = job()
    bad = torch.ones_like(x)
    bad[71, 0, 2] = float("inf")
    return found(lambda: step([torch.ones_like(x), torch.ones_like(x), bad]))

results["A_log"] = weight("A_log", 3)
results["input projection"] = weight("in_proj.weight", (0, 0))
results["layer norm"] = weight("in_proj.layer_norm_weight", 5)
results["gradient"] = gradient()
results["nothing"] = found(lambda: job()[1]([torch.ones_like(x)] * 2))
"""

FUSED = """
from checked_layers import Model, HIDDEN
from fla_safe.cpu import interpreter
interpreter.activate()
from fla_safe.gdn.backends import Backend, resolve
from fla_safe.gdn.fused.mixer import FusedMixer
from fused_cases import TorchKernel
from fused_interpreter import quicken
from unittest import mock
from fla_safe.gdn.fused import launch as fused_launch
quicken()
mock.patch.multiple(fused_launch, _IN_TOKENS=32, _GRAD_TOKENS=32).start()

class Kernel(TorchKernel):
    spoilt = None

    def forward(self, *arguments):
        o, saved = super().forward(*arguments)
        if self.spoilt == "o":
            o[0, 13, 2] = float("nan")
        return o, saved

    def backward(self, *arguments):
        grads = super().backward(*arguments)
        if self.spoilt == "v":
            grads.dv[0, 11, 3, 1] = float("inf")
        return grads

def fused(spoilt, decay=0.0):
    model = Model(1)
    layer = model.layers[0].self_attention
    kernel = Kernel()
    kernel.spoilt = spoilt
    rule = resolve("torch", "cpu").gated_delta_rule
    layer._backend = Backend("fla", "test", rule, FusedMixer(kernel))
    with torch.no_grad():
        layer.A_log[1] += decay
    watch_layers([model], Watch("every", rank=0, where="here", directory=folder))
    offsets = torch.tensor([0, 3, 3, 12, 16], dtype=torch.int32)
    params = SimpleNamespace(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
    x = torch.randn(18, 1, HIDDEN, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = layer(x, None, packed_seq_params=params)[0]
    out.sum().backward()

for name in ("o", "v"):
    results[name] = found(lambda: fused(name))
results["g"] = found(lambda: fused(None, decay=200.0))
results["no fault"] = found(lambda: fused(None))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a fresh interpreter with the stand-in found; one, because importing takes most of its time."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT + MEGATRON + FUSED + "\nprint(json.dumps(results))"]
        + [str(tmp_path_factory.mktemp("found"))],
        env=os.environ
        | {"FLA_SAFE_CPU": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        | {"PYTHONPATH": os.pathsep.join([*map(str, Path(__file__).parents[:2]), os.environ.get("PYTHONPATH", "")])},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def part(found: dict[str, Any], *names: str) -> list[Any]:
    return [found[name] for name in names]


def test_a_megatron_layer_under_megatrons_recomputation(results: dict[str, Any]) -> None:
    seen = results["A_log"]
    assert part(seen, "number", "layer", "stage", "tensor", "head") == [7, "self_attention", "parameters", "A_log", 3]
    assert part(seen, "direction", "micro_batch") == ["forward", 0]
    assert seen["where"] == "rank 0 (TP 0, PP 0, CP 0, DP 0)"
    seen = results["input projection"]
    assert part(seen, "stage", "role", "tensor") == ["input projection", "input", "q in the projection"]
    assert seen["cause"].startswith("weights are not finite: in_proj.weight,")
    assert results["layer norm"]["cause"].startswith("weights are not finite: in_proj.layer_norm_weight,")
    seen = results["gradient"]
    assert part(seen, "stage", "tensor", "segment") == ["layer output", "gradient of layer output", 2]
    assert part(seen, "direction", "micro_batch") == ["backward", 2]
    assert results["nothing"] is None


def test_the_kernel_inside_of_the_fused_mixer(results: dict[str, Any]) -> None:
    seen = results["o"]
    assert part(seen, "stage", "role", "tensor", "segment", "head") == ["chunk kernel", "output", "o", 3, 2]
    assert seen["fused"] is True
    seen = results["v"]
    assert part(seen, "stage", "tensor", "segment", "head") == ["chunk kernel", "gradient of v", 2, 3]
    assert seen["direction"] == "backward"
    assert part(results["g"], "stage", "tensor", "head") == ["convolution, l2norm and gates", "g", 1]
    assert results["no fault"] is None
