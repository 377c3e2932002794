"""Several linear layers, one an expert, over consecutive rows of one input."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .base import ParallelLinearBase, refuse_unknown

__all__ = ["GroupedLinear"]


class GroupedLinear(ParallelLinearBase):
    """Expert i is `weight{i} [out, in]` and `bias{i} [out]`; communication between experts is the dispatcher's."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cpu",
        **kwargs: Any,
    ) -> None:
        super().__init__()
        refuse_unknown("GroupedLinear", kwargs)
        self.num_gemms = num_gemms
        self._set_shape(
            in_features, out_features, parallel_mode, sequence_parallel, tp_group, tp_size, bias, return_bias
        )
        for i in range(num_gemms):
            weight = self._make_weight(params_dtype, device, init_method, get_rng_state_tracker, rng_tracker_name)
            self.register_parameter(f"weight{i}", weight)
            if bias:
                self.register_parameter(f"bias{i}", self._make_bias(params_dtype, device))

    def forward(self, x: torch.Tensor, m_splits: Any, is_first_microbatch: bool | None = None, **kwargs: Any) -> Any:
        """`x [M, in]`, of which expert i takes `m_splits[i]` rows in order, to `[M, out]`."""
        splits = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
        parts = [
            F.linear(rows, getattr(self, f"weight{i}"), getattr(self, f"bias{i}") if self.apply_bias else None)
            for i, rows in enumerate(torch.split(x, splits, dim=0))
        ]
        y = torch.cat(parts)
        if self.return_bias:
            return y, [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
        return y
