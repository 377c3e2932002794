"""RMSNorm and LayerNorm, computed in float32 (or wider) and returned in the input's dtype."""

from typing import Any, Literal

import torch
import torch.nn.functional as F

from .base import TransformerEngineBaseModule, refuse_unknown

__all__ = ["LayerNorm", "RMSNorm", "normalize"]

Normalization = Literal["RMSNorm", "LayerNorm"]


def normalize(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered_gamma: bool,
    kind: str,
) -> torch.Tensor:
    """`x [..., C]` normalised over C; `zero_centered_gamma` means that the weight is stored minus one."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, gamma = x.to(dtype), weight.to(dtype)
    if zero_centered_gamma:
        gamma = gamma + 1
    if kind == "RMSNorm":
        out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gamma
    else:
        out = F.layer_norm(wide, wide.shape[-1:], gamma, None if bias is None else bias.to(dtype), eps)
    return out.to(x.dtype)


class _Norm(TransformerEngineBaseModule):
    kind: Normalization

    def __init__(
        self,
        normalized_shape: int | list[int] | tuple[int, ...] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = "cpu",
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        refuse_unknown(type(self).__name__, kwargs)
        shape = normalized_shape if normalized_shape is not None else hidden_size
        if shape is None:
            raise ValueError(f"{type(self).__name__} needs normalized_shape")
        options: dict[str, Any] = {"dtype": params_dtype or dtype, "device": device}
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        make = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = torch.nn.Parameter(make(shape, **options))
        self.weight.sequence_parallel = bool(sequence_parallel)  # type: ignore[attr-defined]
        self.bias: torch.nn.Parameter | None = None
        if self.kind == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(shape, **options))
            self.bias.sequence_parallel = bool(sequence_parallel)  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [..., C]` normalised, same shape and dtype."""
        return normalize(x, self.weight, self.bias, self.eps, self.zero_centered_gamma, self.kind)


class RMSNorm(_Norm):
    """Root-mean-square normalisation."""

    kind = "RMSNorm"


class LayerNorm(_Norm):
    """Layer normalisation with bias."""

    kind = "LayerNorm"
