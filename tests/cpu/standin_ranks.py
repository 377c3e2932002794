"""What each rank of test_cpu_parallel.py checks: a layer split over ranks against the same layer whole, in float64."""

import sys
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from standin_package import load

__all__: list[str] = []

torch.set_num_threads(1)
S, B, C, OUT = 6, 2, 8, 12


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """The same random tensors on every rank."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def part(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_()


def equal(seen: Any, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(seen, expected, rtol=1e-12, atol=1e-12, msg=lambda m: f"{what}: {m}")


def _norm_linear(te: Any, sequence_parallel: bool, **kwargs: Any) -> Any:
    return te.pytorch.LayerNormLinear(
        C,
        OUT,
        eps=1e-6,
        bias=False,
        normalization="RMSNorm",
        parallel_mode="column",
        sequence_parallel=sequence_parallel,
        tp_group=dist.group.WORLD,
        tp_size=dist.get_world_size(),
        params_dtype=torch.float64,
        **kwargs,
    )


def _whole(x: torch.Tensor, gamma: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gamma
    return normed @ weight.T, normed


def column(sequence_parallel: bool) -> None:
    te = load()
    x, gamma, weight, direction = tensors((S, B, C), (C,), (OUT, C), (S, B, OUT))
    layer = _norm_linear(te, sequence_parallel)
    with torch.no_grad():
        layer.layer_norm_weight.copy_(gamma)
        layer.weight.copy_(part(weight))
    mine = leaf(part(x) if sequence_parallel else x)
    out = layer(mine)
    (out * part(direction, -1)).sum().backward()

    x_, gamma_, weight_ = leaf(x), leaf(gamma), leaf(weight)
    expected, normed = _whole(x_, gamma_, weight_)
    normed.retain_grad()
    (expected * direction).sum().backward()
    equal(out, part(expected, -1), "output")
    equal(layer.weight.grad, part(weight_.grad), "weight gradient")
    equal(mine.grad, part(x_.grad) if sequence_parallel else x_.grad, "input gradient")
    assert layer.layer_norm_weight.sequence_parallel is sequence_parallel
    if not sequence_parallel:
        equal(layer.layer_norm_weight.grad, gamma_.grad, "norm gradient, complete on each rank")
        return
    rows = part(normed.grad * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))
    equal(layer.layer_norm_weight.grad, rows.sum((0, 1)), "norm gradient of own rows")
    total = layer.layer_norm_weight.grad.clone()
    dist.all_reduce(total)
    equal(total, gamma_.grad, "norm gradient summed over ranks")


def column_with_sequence_parallelism() -> None:
    column(True)


def column_without_sequence_parallelism() -> None:
    column(False)


def norm_output_gathered() -> None:
    """LoRA reads the gathered normalised input; its gradient must reach every rank's rows."""
    te = load()
    x, gamma, weight, direction = tensors((S, B, C), (C,), (OUT, C), (S, B, C))
    layer = _norm_linear(te, True, return_layernorm_output=True, return_layernorm_output_gathered=True)
    with torch.no_grad():
        layer.layer_norm_weight.copy_(gamma)
        layer.weight.copy_(part(weight))
    mine = leaf(part(x))
    _, normed = layer(mine)
    # Each rank reads its own columns, as a column-parallel adapter does.
    (part(normed, -1) * part(direction, -1)).sum().backward()
    x_ = leaf(x)
    _, expected = _whole(x_, gamma, weight)
    (expected * direction).sum().backward()
    equal(normed, expected, "normalised input")
    equal(mine.grad, part(x_.grad), "input gradient")


def row(sequence_parallel: bool) -> None:
    te = load()
    x, weight, bias, direction = tensors((S, B, C), (OUT, C), (OUT,), (S, B, OUT))
    layer = te.pytorch.Linear(
        C,
        OUT,
        parallel_mode="row",
        sequence_parallel=sequence_parallel,
        tp_group=dist.group.WORLD,
        tp_size=dist.get_world_size(),
        params_dtype=torch.float64,
    )
    with torch.no_grad():
        layer.weight.copy_(part(weight, 1))
        layer.bias.copy_(bias)
    mine = leaf(part(x, -1))
    out = layer(mine)
    (out * (part(direction) if sequence_parallel else direction)).sum().backward()

    x_, weight_, bias_ = leaf(x), leaf(weight), leaf(bias)
    expected = x_ @ weight_.T + bias_
    (expected * direction).sum().backward()
    equal(out, part(expected) if sequence_parallel else expected, "output")
    equal(mine.grad, part(x_.grad, -1), "input gradient")
    equal(layer.weight.grad, part(weight_.grad, 1), "weight gradient")
    total = layer.bias.grad.clone()
    if sequence_parallel:
        dist.all_reduce(total)
    equal(total, bias_.grad, "bias gradient")


def row_with_sequence_parallelism() -> None:
    row(True)


def row_without_sequence_parallelism() -> None:
    row(False)


def _zigzag(x: torch.Tensor, offsets: list[int]) -> torch.Tensor:
    """This rank's rows: parts r and 2n - 1 - r of each sequence, written as a loop."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = []
    for start, end in pairwise(offsets):
        parts = x[start:end].chunk(2 * world)
        rows += [parts[rank], parts[2 * world - 1 - rank]]
    return torch.cat(rows)


def _attention(te: Any, **kwargs: Any) -> Any:
    return te.pytorch.DotProductAttention(4, 8, num_gqa_groups=2, attn_mask_type="causal", **kwargs)


def context_parallel_packed() -> None:
    te = load()
    offsets = [0, 4, 16, 24]
    q, k, v, direction = tensors((24, 4, 8), (24, 2, 8), (24, 2, 8), (24, 32))
    cu = torch.tensor(offsets, dtype=torch.int32)
    inputs = [leaf(t) for t in (q, k, v)]
    expected = _attention(te)(*inputs, qkv_format="thd", cu_seqlens_q=cu, attn_mask_type="padding_causal")
    (expected * direction).sum().backward()

    mine = [leaf(_zigzag(t, offsets)) for t in (q, k, v)]
    split = _attention(te, cp_group=dist.group.WORLD, cp_global_ranks=[0, 1])
    out = split(*mine, qkv_format="thd", cu_seqlens_q=cu, attn_mask_type="padding_causal")
    (out * _zigzag(direction, offsets)).sum().backward()
    equal(out, _zigzag(expected, offsets), "output")
    for name, whole, ours in zip("qkv", inputs, mine, strict=True):
        equal(ours.grad, _zigzag(whole.grad, offsets), f"{name} gradient")


def context_parallel_unpacked() -> None:
    te = load()
    q, k, v, direction = tensors((8, B, 4, 8), (8, B, 2, 8), (8, B, 2, 8), (8, B, 32))
    inputs = [leaf(t) for t in (q, k, v)]
    expected = _attention(te)(*inputs)
    (expected * direction).sum().backward()
    mine = [leaf(_zigzag(t, [0, 8])) for t in (q, k, v)]
    out = _attention(te, cp_group=dist.group.WORLD, cp_global_ranks=[0, 1])(*mine)
    (out * _zigzag(direction, [0, 8])).sum().backward()
    equal(out, _zigzag(expected, [0, 8]), "output")
    for name, whole, ours in zip("qkv", inputs, mine, strict=True):
        equal(ours.grad, _zigzag(whole.grad, [0, 8]), f"{name} gradient")


if __name__ == "__main__":
    rank, world, store, checks = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    for check in checks:
        globals()[check]()
        print(f"passed {check}", flush=True)
    dist.destroy_process_group()
