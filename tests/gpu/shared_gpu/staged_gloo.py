"""Second half: an ms-swift plugin (`--external_plugins`) that sends CUDA tensors over gloo through host memory.

NCCL wants a GPU for each rank and gloo does not know most collectives for CUDA tensors. Staged like this, the real
TransformerEngine, Triton kernels and Megatron schedules run with TP, PP, EP or CP on a machine with a single GPU. Only
the transport is not real: nothing measured this way says anything about speed.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed import distributed_c10d as c10d


class Done:
    """A finished transfer."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def wait(self, *args: Any) -> bool:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return True

    def is_completed(self) -> bool:
        return self._finish is None


def host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()


def group_of(group: Any) -> Any:
    return c10d._get_default_group() if group is None else group


def staged(name: str) -> Callable[[Callable[..., Any]], None]:
    """Put `function` in place of `torch.distributed.<name>` for calls with CUDA tensors."""
    original = getattr(dist, name)

    def decorate(function: Callable[..., Any]) -> None:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            first = args[0] if args else next(iter(kwargs.values()))
            tensor = first[0] if isinstance(first, list) else first
            if not (isinstance(tensor, torch.Tensor) and tensor.is_cuda):
                return original(*args, **kwargs)
            asynchronous = kwargs.pop("async_op", False)
            result = function(*args, **kwargs)
            return result or (Done() if asynchronous else None)

        for module in (dist, c10d):
            setattr(module, name, call)

    return decorate


@staged("all_reduce")
def all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None) -> None:
    group, average = group_of(group), op == ReduceOp.AVG
    options = c10d.AllreduceOptions()
    options.reduceOp = ReduceOp.SUM if average else op
    # bfloat16 sums over gloo would round after every addition.
    wide = host(tensor).float() if tensor.dtype in (torch.bfloat16, torch.float16) else host(tensor)
    group.allreduce([wide], options).wait()
    tensor.copy_(wide / group.size() if average else wide)


def gather(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    mine = host(tensor)
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([parts], [mine]).wait()
    return parts


def gather_into(output: torch.Tensor, tensor: torch.Tensor, group: Any = None) -> None:
    output.copy_(torch.cat([part.view(-1) for part in gather(tensor, group_of(group))]).view(output.shape))


def scatter_sum(output: torch.Tensor, tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None) -> None:
    group = group_of(group)
    total = tensor.clone()
    dist.all_reduce(total, op=op, group=group)
    output.copy_(total.view(group.size(), -1)[group.rank()].view(output.shape))


for name, function in {
    "all_gather_into_tensor": gather_into,
    "_all_gather_base": gather_into,
    "reduce_scatter_tensor": scatter_sum,
    "_reduce_scatter_base": scatter_sum,
}.items():
    if hasattr(dist, name):
        staged(name)(function)


@staged("all_gather")
def all_gather(tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> None:
    for output, part in zip(tensors, gather(tensor, group_of(group)), strict=True):
        output.copy_(part)


@staged("broadcast")
def broadcast(tensor: torch.Tensor, src: int | None = None, group: Any = None, group_src: int | None = None) -> None:
    group = group_of(group)
    options = c10d.BroadcastOptions()
    options.rootRank = group_src if group_src is not None else dist.get_group_rank(group, src)
    options.rootTensor = 0
    wire = host(tensor)
    group.broadcast([wire], options).wait()
    tensor.copy_(wire)


@staged("all_to_all_single")
def all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
) -> None:
    def plain(sizes: Any) -> list[int]:
        return [] if sizes is None else [int(size) for size in sizes]

    received = torch.empty(output.shape, dtype=output.dtype)
    options = c10d.AllToAllOptions()
    group_of(group).alltoall_base(
        received, host(tensor), plain(output_split_sizes), plain(input_split_sizes), options
    ).wait()
    output.copy_(received)


def send_to(tensor: torch.Tensor, peer: int, group: Any, tag: int) -> Done:
    wire = host(tensor)
    work = group_of(group).send([wire], dist.get_group_rank(group_of(group), peer), tag)

    def finish(keep: torch.Tensor = wire) -> None:
        work.wait()

    return Done(finish)


def receive_from(tensor: torch.Tensor, peer: int, group: Any, tag: int) -> Done:
    wire = torch.empty(tensor.shape, dtype=tensor.dtype)
    work = group_of(group).recv([wire], dist.get_group_rank(group_of(group), peer), tag)

    def finish() -> None:
        work.wait()
        with torch.no_grad():  # Megatron receives into leaves that already require gradients
            tensor.copy_(wire)

    return Done(finish)


@staged("isend")
def isend(tensor: torch.Tensor, dst: int, group: Any = None, tag: int = 0) -> Done:
    return send_to(tensor, dst, group, tag)


@staged("irecv")
def irecv(tensor: torch.Tensor, src: int, group: Any = None, tag: int = 0) -> Done:
    return receive_from(tensor, src, group, tag)


@staged("send")
def send(tensor: torch.Tensor, dst: int, group: Any = None, tag: int = 0) -> None:
    send_to(tensor, dst, group, tag).wait()


@staged("recv")
def recv(tensor: torch.Tensor, src: int, group: Any = None, tag: int = 0) -> None:
    receive_from(tensor, src, group, tag).wait()


plain_batch = dist.batch_isend_irecv


@wraps(plain_batch)
def batch_isend_irecv(ops: list[Any]) -> Any:
    if not ops or not ops[0].tensor.is_cuda:
        return plain_batch(ops)
    return [(send_to if op.op is dist.isend else receive_from)(op.tensor, op.peer, op.group, op.tag) for op in ops]


dist.batch_isend_irecv = c10d.batch_isend_irecv = batch_isend_irecv
