"""A normalisation followed by a column-parallel linear layer, as one module with one set of parameters."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .base import ParallelLinearBase, refuse_unknown
from .layernorm import normalize

__all__ = ["LayerNormLinear"]


class LayerNormLinear(ParallelLinearBase):
    """Normalise, then `y = n W^T + b`.

    With sequence parallelism each rank normalises its own rows `[S / tp, ...]` before they are gathered, so the
    gradient of `layer_norm_weight` is that of these rows only: Megatron sums it over the tensor-parallel ranks because
    the parameter carries `sequence_parallel = True`. Without it every rank holds the complete gradient.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        zero_centered_gamma: bool = False,
        device: Any = "cpu",
        **kwargs: Any,
    ) -> None:
        super().__init__()
        refuse_unknown("LayerNormLinear", kwargs)
        if parallel_mode == "row":
            raise ValueError("LayerNormLinear is column-parallel or not parallel")
        self._set_shape(
            in_features, out_features, parallel_mode, sequence_parallel, tp_group, tp_size, bias, return_bias
        )
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        options: dict[str, Any] = {"dtype": params_dtype, "device": device}
        make = torch.zeros if zero_centered_gamma else torch.ones
        self.layer_norm_weight = torch.nn.Parameter(make(in_features, **options))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        self.layer_norm_bias: torch.nn.Parameter | None = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, **options))
            self.layer_norm_bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        self.weight = self._make_weight(params_dtype, device, init_method, get_rng_state_tracker, None)
        self.bias = self._make_bias(params_dtype, device)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None, **kwargs: Any) -> Any:
        """`x [..., in]` to `[..., out]`; with the options set, also the bias and the normalised input, as a tuple."""
        normed = normalize(
            x, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma, self.normalization
        )
        full = self._before_gemm(normed)
        y = F.linear(full, self.weight, self.bias if self.apply_bias else None)
        out: list[torch.Tensor | None] = [y]
        if self.return_bias:
            out.append(self.bias)
        if self.return_layernorm_output:
            out.append(full if self.return_layernorm_output_gathered else normed)
        return out[0] if len(out) == 1 else tuple(out)
