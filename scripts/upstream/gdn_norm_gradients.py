"""Megatron's GDN layer on two tensor-parallel ranks: gradients of its two norms against finite differences.

    python gdn_norm_gradients.py mcore_bridge sequence_parallel
        mcore-bridge 1.6.2 and later gathers the sequence before the input projection and switches sequence parallelism
        off for it. The layer norm in the projection then sees all tokens, so its gradient is complete on each rank; but
        its parameter is still marked `sequence_parallel`, and Megatron adds the ranks' gradients up: twice too large.
    python gdn_norm_gradients.py mcore_bridge tensor_parallel       (and: megatron_core tensor_parallel)
        Each rank's output norm sees the rank's own heads, so the gradient of its weight, which all ranks share, is the
        sum over ranks. Megatron sums it with sequence parallelism only; without, ranks train different weights.

The layer and the reduction of gradients are the packages' own. TransformerEngine's two projections are replaced by
plain PyTorch with Megatron's collectives, and the layer runs in deterministic mode: no GPU, no TransformerEngine and no
FLA kernel is needed. Right are ratios of 1 on both ranks; `megatron_core sequence_parallel` shows them.
Exit status 0: shown, 1: gone, 2: cannot tell.
"""

import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import types

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.ssm import gated_delta_net as core
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.transformer_config import TransformerConfig

RANKS, TOKENS, HIDDEN, STEP = 2, 32, 16, 1e-2
CASES = [(p, m) for p in ("mcore_bridge", "megatron_core") for m in ("sequence_parallel", "tensor_parallel")]


class NormColumnLinear(torch.nn.Module):
    """As TransformerEngine's LayerNormLinear: norm on what it is given, then gather (sequence parallel) or copy."""

    def __init__(self, inputs, outputs, *, config, tp_group, **rest):
        super().__init__()
        self.group, self.sequence_parallel = tp_group, config.sequence_parallel
        self.layer_norm_weight = torch.nn.Parameter(torch.rand(inputs) + 0.5)
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.randn(outputs // RANKS, inputs) * inputs**-0.5)

    def forward(self, x):
        x = F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, 1e-6)
        if self.sequence_parallel:
            x = mappings.gather_from_sequence_parallel_region(x, group=self.group)
        else:
            x = mappings.copy_to_tensor_model_parallel_region(x, group=self.group)
        return F.linear(x, self.weight), None


class RowLinear(torch.nn.Module):
    """As TransformerEngine's Linear in row-parallel mode."""

    def __init__(self, inputs, outputs, *, config, tp_group, **rest):
        super().__init__()
        self.group, self.sequence_parallel = tp_group, config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs // RANKS))

    def forward(self, x):
        x = F.linear(x, self.weight)
        if self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(x, group=self.group), None
        return mappings.reduce_from_tensor_model_parallel_region(x, group=self.group), None


class Norm(torch.nn.Module):
    def __init__(self, hidden_size, *, config, eps):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.rand(hidden_size) + 0.5)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def layer_class(package):
    if package == "megatron_core":
        return core.GatedDeltaNet
    if importlib.util.find_spec("transformer_engine") is None:
        # mcore-bridge as a whole needs TransformerEngine; this one file mentions it for FP8 only.
        sys.modules["transformer_engine"] = types.ModuleType("transformer_engine")
        bridge, config = types.ModuleType("mcore_bridge"), types.ModuleType("mcore_bridge.config")
        config.ModelConfig = TransformerConfig
        where = importlib.util.find_spec("mcore_bridge").submodule_search_locations[0]
        sys.modules.update({"mcore_bridge": bridge, "mcore_bridge.config": config})
        spec = importlib.util.spec_from_file_location("gdn", os.path.join(where, "model/modules/gated_delta_net.py"))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module("mcore_bridge.model.modules.gated_delta_net")
    return module.GatedDeltaNet


def build(package, sequence_parallel, group, alone):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        tensor_model_parallel_size=RANKS,
        sequence_parallel=sequence_parallel,
        deterministic_mode=True,
        perform_initialization=False,
        use_cpu_initialization=True,
    )
    config.linear_decoupled_in_proj = False  # mcore-bridge's own setting
    parts = core.GatedDeltaNetSubmodules(NormColumnLinear, Norm, RowLinear)
    groups = types.SimpleNamespace(tp=group, cp=alone)
    layer = layer_class(package)(config, parts, layer_number=1, use_qk_l2norm=False, pg_collection=groups)
    for parameter in (layer.conv1d.weight, layer.dt_bias, layer.A_log):
        torch.nn.init.normal_(parameter, std=0.3)  # small keys: they are not normalised here
    return layer


def rank_main(rank, package, mode, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    alone = [dist.new_group([other]) for other in range(RANKS)][rank]
    sequence_parallel = mode == "sequence_parallel"

    torch.manual_seed(rank)  # projections and heads differ between ranks
    layer = build(package, sequence_parallel, parallel_state.get_tensor_model_parallel_group(), alone)
    shared = {"in_proj.layer_norm_weight": layer.in_proj.layer_norm_weight, "out_norm.weight": layer.out_norm.weight}
    for parameter in shared.values():
        dist.broadcast(parameter.data, 0)
    torch.manual_seed(7)  # input and loss do not
    x, weight = torch.randn(2, TOKENS, 1, HIDDEN)
    if sequence_parallel:
        x, weight = x.chunk(RANKS)[rank], weight.chunk(RANKS)[rank]

    def loss():
        return (layer(x, None)[0] * weight).sum()

    def total_loss():
        """Of all tokens: without sequence parallelism every rank has all of them."""
        with torch.no_grad():
            total = loss()
        if sequence_parallel:
            dist.all_reduce(total)
        return total.item()

    loss().backward()
    layer.ddp_config = types.SimpleNamespace(use_megatron_fsdp=False)
    _allreduce_non_tensor_model_parallel_grads([layer], layer.config, layer.pg_collection.tp)

    wrong = False
    for name, parameter in shared.items():
        kept, slopes = parameter.data.clone(), []
        for sign in (1, -1):
            parameter.data = kept * (1 + sign * STEP)
            slopes.append(sign * total_loss())
        parameter.data = kept
        ratio = (parameter.grad * kept).sum() / (sum(slopes) / (2 * STEP))
        ratios = [torch.zeros_like(ratio) for _ in range(RANKS)]
        dist.all_gather(ratios, ratio)
        wrong |= any(abs(r - 1) > 0.05 for r in ratios)
        if rank == 0:
            print(f"{name:27s} gradient / finite difference, rank 0 and 1: {', '.join(f'{r:.3f}' for r in ratios)}")
    dist.destroy_process_group()
    if rank == 0:
        print("=> present" if wrong else "=> gone", flush=True)
    os._exit(0 if wrong else 1)


def main() -> int:
    if tuple(sys.argv[1:]) not in CASES:
        print(f"=> cannot tell: expected one of {', '.join(map(' '.join, CASES))}")
        return 2
    package, mode = sys.argv[1:]
    names = [package.replace("_", "-"), "megatron-core"]
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in dict.fromkeys(names)), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(RANKS):
            ranks.append(os.fork())
            if not ranks[-1]:
                try:
                    rank_main(rank, package, mode, os.path.join(folder, "store"))
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                    os._exit(3)
        ends = {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks}
    if len(ends) > 1 or not ends <= {0, 1}:
        print("=> cannot tell: a rank failed")
        return 2
    return ends.pop()


if __name__ == "__main__":
    sys.exit(main())
