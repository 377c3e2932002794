"""A model of GDN layers that runs without TransformerEngine: the package's own forward pass between plain matrices."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint

from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.megatron.layer import SafeForward

__all__ = ["HIDDEN", "LAYOUTS", "OFFSETS", "Model"]

HIDDEN = 12
LAYOUTS = {kind: ProjectionLayout(kind, 2, 4, 3, 5) for kind in ("interleaved", "sectioned")}  # type: ignore[arg-type]
LAYOUTS["wide"] = ProjectionLayout("interleaved", 1, 2, 128, 128)
"""Small ones, and one for the kernels of a GPU."""
OFFSETS = (0, 3, 3, 70, 75)
"""Four segments, the second one empty; rows beyond are a tail."""


class Linear(torch.nn.Module):
    """Returns a bias beside its result, and may normalise first, as Megatron's do."""

    def __init__(self, weight: torch.nn.Parameter, norm: bool = False) -> None:
        super().__init__()
        self.weight = weight
        self.norm = norm

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        if self.norm:
            x = x.view_as(x)  # its gradient is added up here, as in a fused norm, before that of the residual is
            x = torch.nn.functional.rms_norm(x, x.shape[-1:])
        return x @ self.weight.T, None


class GatedDeltaNet(SafeForward, torch.nn.Module):
    """What `SafeForward` needs of a Megatron layer."""

    def __init__(self, number: int, kind: str, dtype: torch.dtype) -> None:
        torch.nn.Module.__init__(self)
        layout = self._mixer_layout = LAYOUTS[kind]
        draw = torch.Generator().manual_seed(number)

        def normal(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter((torch.randn(shape, generator=draw) * 0.5).to(dtype))

        self.layer_number = number
        self.in_proj = Linear(normal(layout.proj_dim, HIDDEN), norm=True)
        self.out_proj = Linear(normal(HIDDEN, layout.value_width))
        self.conv1d = torch.nn.Module()
        self.conv1d.weight, self.conv1d.bias = normal(layout.conv_dim, 1, 4), None
        self.A_log, self.dt_bias = normal(layout.value_heads), normal(layout.value_heads)
        self.out_norm = torch.nn.Module()
        self.out_norm.weight, self.out_norm.eps, self.out_norm.zero_centered_gamma = normal(layout.value_dim), 1e-6, 0
        self.config = SimpleNamespace(deterministic_mode=False)
        self.tp_size = self.cp_size = 1
        self.use_qk_l2norm, self._reduce_norm_gradient, self._backend = True, False, None
        self.section: Any = nullcontext()


class MLP(torch.nn.Module):
    """Something between GDN layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain.to(x.dtype)


class Block(torch.nn.Module):
    """A residual block with the attribute names of Megatron's TransformerLayer."""

    def __init__(self, number: int, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_number = number
        self.self_attention = GatedDeltaNet(number, kind, dtype)
        self.mlp = MLP()

    def forward(self, x: torch.Tensor, params: Any) -> torch.Tensor:
        x = x + self.self_attention(x, None, packed_seq_params=params)[0]
        return x + self.mlp(x)


class Model(torch.nn.Module):
    """Blocks in `layers`; `recompute` repeats each block's forward pass in the backward pass."""

    def __init__(
        self, blocks: int = 3, kind: str = "interleaved", dtype: torch.dtype = torch.float32, recompute: str = "none"
    ) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(i + 1, kind, dtype) for i in range(blocks)])
        self.recompute = recompute

    def forward(self, x: torch.Tensor, params: Any = None) -> torch.Tensor:
        for block in self.layers:
            if self.recompute == "none":
                x = block(x, params)
            else:
                reentrant = self.recompute == "reentrant"
                x = torch.utils.checkpoint.checkpoint(block, x, params, use_reentrant=reentrant)
        return x
