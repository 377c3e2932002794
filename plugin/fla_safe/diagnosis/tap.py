"""A kernel that shows what goes into it and what comes out of it, forward and backward, and is otherwise the same."""

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch

from fla_safe.gdn.backends import Backend
from fla_safe.gdn.chunk.grads import KernelGrads
from fla_safe.gdn.segments import PackedSegments

__all__ = ["Tap", "What", "followed", "tapped"]

type What = Literal["inputs", "output", "output gradient", "input gradients"]


class Tap(Protocol):
    """Told of tensors by name (q, k, v, g, beta, o) in the order in which they arise; it may raise.

    Gradients of the inputs arrive in one call or in several. A fused mixer shows them in the parts that its kernel
    leaves (`gdn.chunk.grads.KernelGrads`).
    """

    def __call__(self, what: What, tensors: Mapping[str, torch.Tensor], /) -> None: ...


def followed(x: torch.Tensor, see: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """`x` by another node of the graph, whose gradient `see` is shown: that of this use of x, not of all its uses."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    same = x.view_as(x)
    same.register_hook(see)
    return same


def tapped(kernel: Backend, tap: Tap) -> Backend:
    """`kernel` with its chunk kernel under observation, in its mixer too."""
    rule, mixer = kernel.gated_delta_rule, kernel.mixer

    def show(what: What, name: str, grad: torch.Tensor) -> None:
        tap(what, {name: grad})

    def watched_rule(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float,
        segments: PackedSegments | None,
        /,
    ) -> torch.Tensor:
        inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        tap("inputs", inputs)
        q, k, v, g, beta = (followed(x, partial(show, "input gradients", name)) for name, x in inputs.items())
        o = rule(q, k, v, g, beta, scale, segments)
        tap("output", {"o": o})
        return followed(o, partial(show, "output gradient", "o"))

    if mixer is not None and is_dataclass(mixer) and hasattr(mixer, "kernel"):
        mixer = replace(mixer, kernel=_TappedKernel(mixer.kernel, tap))  # type: ignore[type-var]
    return replace(kernel, gated_delta_rule=watched_rule, mixer=mixer)


class _TappedKernel:
    """A chunk kernel outside autograd (`gdn.chunk.function.ChunkKernel`)."""

    def __init__(self, kernel: Any, tap: Tap) -> None:
        self._kernel = kernel
        self._tap = tap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *rest: Any,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        self._tap("inputs", {"q": q, "k": k, "v": v, "g": g, "beta": beta})
        o, saved = self._kernel.forward(q, k, v, g, beta, *rest)
        self._tap("output", {"o": o})
        return o, saved

    def backward(self, saved: Any, do: torch.Tensor, *rest: Any) -> KernelGrads:
        self._tap("output gradient", {"o": do})
        grads: KernelGrads = self._kernel.backward(saved, do, *rest)
        names = ("q", "k", "v", "g", "beta")
        shown = dict(zip(names, (grads.dq, grads.dk, grads.dv, grads.dg, grads.dbeta), strict=True))
        shown |= {n: x for n, x in (("k (second part)", grads.dk2), ("g (second part)", grads.dg2)) if x is not None}
        self._tap("input gradients", shown)
        return grads
