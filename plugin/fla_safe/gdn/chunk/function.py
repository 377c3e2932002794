"""A chunk kernel behind autograd: what a kernel must offer, and the function that makes it differentiable."""

from functools import cache, partial
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from fla_safe.gdn import calls
from fla_safe.gdn.chunk.grads import KernelGrads
from fla_safe.gdn.recomputation import kept_briefly
from fla_safe.gdn.segments import PackedSegments

__all__ = ["ChunkKernel", "differentiable", "sum_heads"]


class ChunkKernel(Protocol):
    """A gated delta rule outside autograd, as `fla.FlaKernel` is; all tensors are contiguous.

    `saved` begins with q, k, v, the kernel's own form of g, and beta; with `keep_states` it may hold more than the
    backward pass needs, to save it work. Who calls `backward` sums what it leaves in parts, or asks `total` to.
    """

    @property
    def version(self) -> str: ...

    def __hash__(self) -> int: ...

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float,
        segments: PackedSegments | None,
        keep_states: bool = False,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]: ...

    def backward(
        self, saved: Any, do: torch.Tensor, scale: float, segments: PackedSegments | None, key_heads: int
    ) -> KernelGrads: ...

    def total(
        self, grads: KernelGrads, segments: PackedSegments | None, key_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]: ...


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, scale, segments, kernel):  # type: ignore[no-untyped-def]
        calls.count_forward()
        ctx.key_heads, ctx.scale, ctx.segments, ctx.kernel = q.shape[2], scale, segments, kernel
        o, saved = kernel.forward(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            g.contiguous(),
            beta.contiguous(),
            scale,
            segments,
            kept_briefly(),
        )
        ctx.save_for_backward(*saved)
        ctx.dtypes = q.dtype, k.dtype, v.dtype, g.dtype, beta.dtype
        return o.to(v.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):  # type: ignore[no-untyped-def]
        calls.count_backward()
        kernel, segments = ctx.kernel, ctx.segments
        with calls.guarded():
            parts = kernel.backward(ctx.saved_tensors, do.contiguous(), ctx.scale, segments, ctx.key_heads)
            grads = kernel.total(parts, segments, ctx.key_heads)
        return *(grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)), None, None, None


def _run(
    kernel: ChunkKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    segments: PackedSegments | None,
    /,
) -> torch.Tensor:
    return _Rule.apply(q, k, v, g, beta, scale, segments, kernel)


@cache  # backends are compared, and functions by identity
def differentiable(kernel: ChunkKernel) -> Any:
    """A `backends.RuleFunction` by this kernel."""
    return partial(_run, kernel)


def sum_heads(x: torch.Tensor, key_heads: int) -> torch.Tensor:
    """`[B, T, H, K]` from one gradient a value head, `[B, T, HV, K]`."""
    return x if x.shape[2] == key_heads else x.unflatten(2, (key_heads, -1)).sum(3)
