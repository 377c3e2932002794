"""The ModuleSpec for plain megatron-core: on two ranks, TP, TP with sequence parallelism and CP equal the whole layer.

The whole layer runs on each rank in groups of one, from the same weights, and is itself compared with the oracle.
"""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="uses the CPU stand-in for TransformerEngine")

HIDDEN, H, HV, K, V = 16, 4, 8, 6, 5
OFFSETS = (0, 4, 4, 12, 24, 152)
TOTAL = OFFSETS[-1]
SECTIONS = (H * K, H * K, HV * V, HV * V, HV, HV)


def build(tp: Any, cp: Any, sequence_parallel: bool) -> torch.nn.Module:
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from fla_safe.megatron.spec import gated_delta_net_spec

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        params_dtype=torch.float64,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=K,
        linear_value_head_dim=V,
        linear_num_key_heads=H,
        linear_num_value_heads=HV,
        tensor_model_parallel_size=tp.size(),
        context_parallel_size=cp.size(),
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
    )
    groups = SimpleNamespace(tp=tp, cp=cp)
    return build_module(gated_delta_net_spec(config), config, layer_number=1, pg_collection=groups)


def rank_parts(name: str, weight: torch.Tensor, tp: Any) -> torch.Tensor:
    """A tensor-parallel rank's part of a whole parameter."""
    size, rank = tp.size(), tp.rank()
    if name == "in_proj.weight":
        return torch.cat([part.chunk(size)[rank] for part in weight.split(SECTIONS)])
    if name == "conv1d.weight":
        return torch.cat([part.chunk(size)[rank] for part in weight.split(SECTIONS[:3])])
    if name in ("A_log", "dt_bias"):
        return weight.chunk(size)[rank]
    if name == "out_proj.weight":
        return weight.chunk(size, dim=1)[rank]
    return weight


def compare(tensor: bool, sequence_parallel: bool) -> None:
    from megatron.core import parallel_state, tensor_parallel

    from fla_safe.megatron.context_parallel import token_order

    rank, size = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    solo = [dist.new_group([other]) for other in range(size)][rank]
    world = dist.group.WORLD
    tp, cp = (world, solo) if tensor else (solo, world)
    draw = torch.Generator().manual_seed(5)
    reference, layer = build(solo, solo, False), build(tp, cp, sequence_parallel)
    with torch.no_grad():
        for (name, whole), (_, part) in zip(reference.named_parameters(), layer.named_parameters(), strict=True):
            whole.copy_(torch.randn(whole.shape, generator=draw, dtype=torch.float64) * 0.5)
            part.copy_(rank_parts(name, whole, tp))

    held = torch.arange(TOTAL)
    if not tensor:
        held = token_order(OFFSETS, size, held.device).natural_to_held.view(size, -1)[rank]
    elif sequence_parallel:
        held = held.view(size, -1)[rank]
    x = torch.randn(TOTAL, 1, HIDDEN, generator=draw, dtype=torch.float64)
    weight = torch.randn(TOTAL, 1, HIDDEN, generator=draw, dtype=torch.float64)
    cu_seqlens = torch.tensor(OFFSETS, dtype=torch.int32)

    def run(module: torch.nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed = SimpleNamespace(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
        mine = x[rows].clone().requires_grad_()
        out, bias = module(mine, None, packed_seq_params=packed)
        assert bias is None
        (out * weight[rows]).sum().backward()
        return out.detach(), mine.grad

    expected, expected_grad = run(reference, torch.arange(TOTAL))
    out, grad = run(layer, held)
    torch.testing.assert_close(out, expected[held])
    torch.testing.assert_close(grad, expected_grad[held])

    for (name, whole), (_, part) in zip(reference.named_parameters(), layer.named_parameters(), strict=True):
        gradient = part.grad.clone()
        # What Megatron adds up after the backward pass: context ranks all, sequence ranks the parameters it marks.
        if not tensor or (sequence_parallel and getattr(part, "sequence_parallel", False)):
            dist.all_reduce(gradient)
        torch.testing.assert_close(gradient, rank_parts(name, whole.grad, tp), msg=lambda text: f"{name}: {text}")  # noqa: B023
    if rank == 0:
        print("equal", flush=True)


def tensor_parallel_ranks() -> None:
    compare(tensor=True, sequence_parallel=False)


def sequence_parallel_ranks() -> None:
    compare(tensor=True, sequence_parallel=True)


def context_parallel_ranks() -> None:
    compare(tensor=False, sequence_parallel=False)


@pytest.mark.parametrize("function", ["tensor_parallel_ranks", "sequence_parallel_ranks", "context_parallel_ranks"])
def test_two_ranks_equal_one(function: str) -> None:
    assert on_ranks(__file__, function, 2, FLA_SAFE_CPU="1")[-1] == "equal"


def whole_layer_against_oracle() -> None:
    from megatron.core import parallel_state, tensor_parallel

    from fla_safe.gdn.layout import ProjectionLayout
    from fla_safe.gdn.oracle import mixer

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    solo = dist.group.WORLD
    layer: Any = build(solo, solo, False)
    draw = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * 0.5)
    x = torch.randn(TOTAL, 2, HIDDEN, generator=draw, dtype=torch.float64)
    out, _ = layer(x, None)
    proj, _ = layer.in_proj(x)
    mixed = mixer(
        proj,
        layout=ProjectionLayout("sectioned", H, HV, K, V),
        conv_weight=layer.conv1d.weight.squeeze(1),
        conv_bias=None,
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        norm_weight=layer.out_norm.weight,
        norm_eps=layer.out_norm.eps,
        offsets=None,
    )
    torch.testing.assert_close(out, layer.out_proj(mixed)[0])

    # Megatron's own layer refuses packs in deterministic mode; ours takes them, on the plain-torch kernel.
    layer.config.deterministic_mode, layer._backend = True, None
    cu_seqlens = torch.tensor(OFFSETS, dtype=torch.int32)
    packed = SimpleNamespace(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    whole, _ = layer(x[:, :1], None, packed_seq_params=packed)
    assert layer.kernel_in_use == "torch"
    for start, end in pairwise(OFFSETS):
        if end > start:
            torch.testing.assert_close(whole[start:end], layer(x[start:end, :1], None)[0])
    print("equal", flush=True)


def test_an_unpacked_batch_equals_the_oracle() -> None:
    assert on_ranks(__file__, "whole_layer_against_oracle", 1, FLA_SAFE_CPU="1")[-1] == "equal"
