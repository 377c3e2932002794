"""Runs the fused mixer and the composed one in float64 on the same random input, on a CPU or a GPU."""

from typing import Any
from unittest import mock

import torch

from fla_safe.gdn.backends import resolve
from fla_safe.gdn.chunk.grads import KernelGrads
from fla_safe.gdn.chunk.plain import torch_chunk_gated_delta_rule
from fla_safe.gdn.fused import launch as fused_launch
from fla_safe.gdn.fused.mixer import FusedMixer
from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.mixer import composed_mixer

__all__ = ["TorchKernel", "assert_close", "both", "parameters"]

type Heads = tuple[str, int, int, int, int]


class TorchKernel:
    """The torch gated delta rule with the interface of a kernel outside autograd."""

    def forward(
        self, q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, segments: Any, keep_states: bool = False
    ) -> tuple[Any, Any]:
        o = torch_chunk_gated_delta_rule(q, k, v, g, beta, scale, segments)
        return o.contiguous(), (q, k, v, g, beta)

    def backward(self, saved: Any, do: Any, scale: float, segments: Any, key_heads: int) -> KernelGrads:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in saved]
            o = torch_chunk_gated_delta_rule(*leaves, scale, segments)
        return KernelGrads(*(x.contiguous() for x in torch.autograd.grad(o, leaves, do)))


def parameters(layout: ProjectionLayout, window: int = 4, bias: bool = True) -> dict[str, torch.Tensor | None]:
    """Random parameters of a mixer, float64."""
    draw = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    return {
        "conv_weight": normal(layout.conv_dim, 1, window),
        "conv_bias": normal(layout.conv_dim) if bias else None,
        "A_log": normal(layout.value_heads),
        "dt_bias": normal(layout.value_heads),
        "norm_weight": normal(layout.value_dim),
    }


def both(
    heads: Heads,
    rows: int,
    batch: int = 1,
    *,
    segments: Any = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    window: int = 4,
    bias: bool = True,
    keep_inputs: bool | None = None,
    kernel: Any = None,
    tokens: int | None = None,
    launched: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Output and gradients, by name, of the fused mixer and of the composed one in float64. Tails hold NaN.

    `tokens`: rows of a program, default the ones in use. Many make the interpreter fast; few give programs whose rows
    all lie in one segment. `launched`: constants of `fla_safe.gdn.fused.launch` to use instead.
    """
    layout = ProjectionLayout(*heads)
    draw = torch.Generator().manual_seed(rows)
    proj = torch.randn(rows, batch, layout.proj_dim, generator=draw, dtype=torch.float64)
    dout = torch.randn(rows, batch, layout.value_width, generator=draw, dtype=torch.float64).to(device, dtype)
    if segments is not None:
        proj[segments.used :] = float("nan")
        dout[segments.used :] = float("nan")
    given = {"proj": proj, **parameters(layout, window, bias)}
    rounded = {name: x.to(device, dtype) for name, x in given.items() if x is not None}
    changes = {name: tokens or getattr(fused_launch, name) for name in ("_IN_TOKENS", "_GRAD_TOKENS")} | (
        launched or {}
    )
    results = []
    for wide in (False, True):
        leaves = {name: x.detach().to(torch.float64 if wide else dtype) for name, x in rounded.items()}
        leaves = {name: x.clone().requires_grad_() for name, x in leaves.items()}
        arguments = {"conv_bias": None, **leaves, "layout": layout, "norm_eps": 1e-5, "segments": segments, **options}
        with mock.patch.multiple(fused_launch, **changes):
            if wide:
                out = composed_mixer(kernel=resolve("torch", device), **arguments)
            else:
                out = FusedMixer(kernel or TorchKernel(), keep_inputs)(**arguments)
            grads = torch.autograd.grad(out, list(leaves.values()), dout.to(out.dtype))
        results.append({"out": out.detach(), **dict(zip(leaves, grads, strict=True))})
    return results[0], results[1]


def assert_close(ours: dict[str, torch.Tensor], oracle: dict[str, torch.Tensor], tolerance: float = 1e-4) -> None:
    """Every output and gradient within a relative error, as a whole tensor."""
    for name, expected in oracle.items():
        assert ours[name].shape == expected.shape, name
        error = (ours[name].double() - expected).norm() / expected.norm().clamp(min=1e-3)
        assert error < tolerance, f"{name}: relative error {error:.2e}"
