"""A linear layer, plain, column- or row-parallel."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .base import ParallelLinearBase, refuse_unknown

__all__ = ["Linear"]


class Linear(ParallelLinearBase):
    """`y = x W^T + b`; see ParallelLinearBase for what the parallel modes communicate."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cpu",
        rng_tracker_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        refuse_unknown("Linear", kwargs)
        self._set_shape(
            in_features, out_features, parallel_mode, sequence_parallel, tp_group, tp_size, bias, return_bias
        )
        self.weight = self._make_weight(params_dtype, device, init_method, get_rng_state_tracker, rng_tracker_name)
        self.bias = self._make_bias(params_dtype, device)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None, **kwargs: Any) -> Any:
        """`x [..., in]` to `[..., out]`, or `(y, bias)` with `return_bias`."""
        y = self._after_gemm(F.linear(self._before_gemm(x), self.weight))
        if self.apply_bias and self.bias is not None:
            y = y + self.bias
        return (y, self.bias) if self.return_bias else y
