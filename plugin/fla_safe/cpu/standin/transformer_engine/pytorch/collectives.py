"""The four autograd pairs of collectives that tensor, sequence and context parallelism are made of."""

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["all_gather_rows", "all_reduce_backward", "all_reduce_forward", "reduce_scatter_rows"]


def _gather(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    world = dist.get_world_size(group)
    out = x.new_empty(world * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _scatter_sum(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    world = dist.get_world_size(group)
    if x.shape[0] % world:
        raise ValueError(f"reduce-scatter of {x.shape[0]} rows over {world} ranks: not divisible")
    out = x.new_empty(x.shape[0] // world, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _scatter_sum(grad, ctx.group), None


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _scatter_sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _gather(grad, ctx.group), None


class _AllReduceForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


class _AllReduceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def all_gather_rows(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Rows `[R, ...]` of all ranks, `[world * R, ...]` in rank order; backward: reduce-scatter."""
    return _AllGatherRows.apply(x, group)


def reduce_scatter_rows(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum over ranks of `[world * R, ...]`, own rows `[R, ...]` kept; backward: gather."""
    return _ReduceScatterRows.apply(x, group)


def all_reduce_forward(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum over ranks; backward: identity."""
    return _AllReduceForward.apply(x, group)


def all_reduce_backward(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Identity; backward: sum over ranks."""
    return _AllReduceBackward.apply(x, group)
