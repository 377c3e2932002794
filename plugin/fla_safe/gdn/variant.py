"""Layers that run the same kernels with the same tuning keys, and random inputs for them: what a warm-up needs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fla_safe.gdn.backends import Backend, resolve
from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.mixer import mixer
from fla_safe.gdn.segments import PackedSegments

__all__ = ["MixerVariant"]


@dataclass(frozen=True, slots=True)
class MixerVariant:
    """A mixer without its weights' values.

    Attributes:
        layout: heads of this rank.
        backend: the kernel.
        dtype: of the activations.
        conv_width: W.
        conv_bias: whether the convolution has a bias.
        parameter_dtypes: of the convolution, A_log, dt_bias and the norm's weight.
        norm_eps, use_qk_l2norm, zero_centered_norm: as in `gdn.mixer.mixer`.
    """

    layout: ProjectionLayout
    backend: Backend
    dtype: torch.dtype
    conv_width: int
    conv_bias: bool
    parameter_dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype]
    norm_eps: float
    use_qk_l2norm: bool = True
    zero_centered_norm: bool = False

    def draw(
        self, rows: int, batch: int, device: torch.device | str, *, seed: int = 0
    ) -> dict[str, torch.Tensor | None]:
        """Random leaves by the names of `gdn.mixer.mixer`'s arguments; `proj` is `[rows, batch, proj_dim]`."""
        source = torch.Generator(device).manual_seed(seed)
        conv, A, dt, norm = self.parameter_dtypes
        layout = self.layout

        def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=dtype, generator=source).requires_grad_()

        return {
            "proj": normal(rows, batch, layout.proj_dim, dtype=self.dtype),
            "conv_weight": normal(layout.conv_dim, self.conv_width, dtype=conv),
            "conv_bias": normal(layout.conv_dim, dtype=conv) if self.conv_bias else None,
            "A_log": normal(layout.value_heads, dtype=A),
            "dt_bias": normal(layout.value_heads, dtype=dt),
            "norm_weight": normal(layout.value_dim, dtype=norm),
        }

    def __call__(
        self,
        leaves: Mapping[str, torch.Tensor | None],
        segments: PackedSegments | None,
        *,
        kernel: Backend | None = None,
    ) -> torch.Tensor:
        """`[rows, batch, HV * V]` from what `draw` made; `kernel` stands in for the variant's own."""
        arguments: dict[str, Any] = dict(leaves)
        return mixer(
            **arguments,
            layout=self.layout,
            norm_eps=self.norm_eps,
            segments=segments,
            kernel=kernel or self.backend,
            use_qk_l2norm=self.use_qk_l2norm,
            zero_centered_norm=self.zero_centered_norm,
        )

    def as_dict(self) -> dict[str, Any]:
        """For another process, JSON-serialisable; the kernel goes by name."""
        return {
            "layout": asdict(self.layout),
            "backend": self.backend.name,
            "dtype": _name(self.dtype),
            "conv_width": self.conv_width,
            "conv_bias": self.conv_bias,
            "parameter_dtypes": [_name(dtype) for dtype in self.parameter_dtypes],
            "norm_eps": self.norm_eps,
            "use_qk_l2norm": self.use_qk_l2norm,
            "zero_centered_norm": self.zero_centered_norm,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], device: torch.device | str) -> "MixerVariant":
        """The inverse of `as_dict` on a device of this process."""
        layout, dtype = ProjectionLayout(**data["layout"]), getattr(torch, data["dtype"])
        conv, A, dt, norm = (getattr(torch, name) for name in data["parameter_dtypes"])
        made = {
            "layout": layout,
            "dtype": dtype,
            "parameter_dtypes": (conv, A, dt, norm),
            "backend": resolve(data["backend"], device, layout=layout, dtype=dtype),
        }
        return cls(**{**data, **made})

    def __str__(self) -> str:
        layout = self.layout
        heads = f"{layout.key_heads} key heads of {layout.key_dim}, {layout.value_heads} value heads of "
        return f"{heads}{layout.value_dim}, {layout.kind}, {_name(self.dtype)}, kernel {self.backend.name}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
