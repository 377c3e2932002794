"""The base class of the stand-in's layers, and what they share of tensor parallelism."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from fla_safe.cpu import StandinError

from ..collectives import all_gather_rows, all_reduce_backward, all_reduce_forward, reduce_scatter_rows

__all__ = ["ParallelLinearBase", "TransformerEngineBaseModule", "refuse_unknown"]

# Keyword arguments that change how fast TransformerEngine is, never what it computes.
_PERFORMANCE_ONLY = frozenset({"fuse_wgrad_accumulation", "ub_name", "save_original_input", "single_grouped_weight"})


def refuse_unknown(owner: str, kwargs: dict[str, Any]) -> None:
    """Raise StandinError for the first keyword argument that asks for something not represented."""
    for name, value in kwargs.items():
        if value in (None, False) or name in _PERFORMANCE_ONLY:
            continue
        raise StandinError(
            f"{owner}({name}={value!r}) on the CPU stand-in",
            "an argument the stand-in represents (see fla_safe.cpu.NOT_REPRESENTED)",
            "drop the flag that sets it, or run on a GPU",
        )


class TransformerEngineBaseModule(torch.nn.Module):
    """What Megatron reads of any TransformerEngine layer; FP8 is off."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = self.fp8_calibration = self.fp8_initialized = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "recipe": None}
        self.tp_group: dist.ProcessGroup | None = None
        self.tp_size = 1

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Does nothing."""

    def get_extra_state(self) -> None:
        """None: the key exists in a state dict, as with the real layer, and holds nothing."""
        return None

    def set_extra_state(self, state: Any) -> None:
        """Ignores the state."""

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """Use these ranks from now on."""
        self.tp_group = tp_group

    def backward_dw(self) -> None:
        """Does nothing: weight gradients are never delayed."""


class ParallelLinearBase(TransformerEngineBaseModule):
    """A linear layer's tensor-parallel shape, initialisation and communication.

    Column-parallel, with sequence parallelism: rows `[S / tp, ...]` are gathered before the GEMM and their gradients
    reduce-scattered; without: gradients of the input are all-reduced. Row-parallel, with: outputs are reduce-scattered;
    without: all-reduced. `sequence_parallel` is read at each call, because mcore-bridge changes it between calls.
    """

    def _set_shape(
        self,
        in_features: int,
        out_features: int,
        parallel_mode: str | None,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup | None,
        tp_size: int,
        bias: bool,
        return_bias: bool,
    ) -> None:
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.sequence_parallel = tp_size > 1 and bool(sequence_parallel)
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        if parallel_mode == "column":
            out_features = _shard(out_features, tp_size)
        elif parallel_mode == "row":
            in_features = _shard(in_features, tp_size)
        self.in_features, self.out_features = in_features, out_features

    def _make_weight(
        self,
        params_dtype: torch.dtype | None,
        device: Any,
        init_method: Callable[[torch.Tensor], Any] | None,
        get_rng_state_tracker: Callable[[], Any] | None,
        rng_tracker_name: str | None,
    ) -> torch.nn.Parameter:
        weight = torch.nn.Parameter(torch.zeros(self.out_features, self.in_features, dtype=params_dtype, device=device))
        if init_method is None:
            init_method = _default_init
        fork: Any = nullcontext()
        if get_rng_state_tracker is not None:
            tracker = get_rng_state_tracker()
            fork = tracker.fork(rng_tracker_name) if rng_tracker_name else tracker.fork()
        with fork, torch.no_grad():
            init_method(weight)
        _mark_partitioned(weight, 1 if self.parallel_mode == "row" else 0)
        return weight

    def _make_bias(self, params_dtype: torch.dtype | None, device: Any) -> torch.nn.Parameter | None:
        if not self.use_bias:
            return None
        bias = torch.nn.Parameter(torch.zeros(self.out_features, dtype=params_dtype, device=device))
        if self.parallel_mode == "row":
            bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        elif self.parallel_mode == "column":
            _mark_partitioned(bias, 0)
        return bias

    def _before_gemm(self, x: torch.Tensor) -> torch.Tensor:
        if self.parallel_mode != "column" or self.tp_size == 1:
            return x
        if self.sequence_parallel:
            return all_gather_rows(x, self.tp_group)
        return all_reduce_backward(x, self.tp_group)

    def _after_gemm(self, y: torch.Tensor) -> torch.Tensor:
        if self.parallel_mode != "row" or self.tp_size == 1:
            return y
        if self.sequence_parallel:
            return reduce_scatter_rows(y, self.tp_group)
        return all_reduce_forward(y, self.tp_group)


def _shard(features: int, tp_size: int) -> int:
    if features % tp_size:
        raise ValueError(f"{features} features over {tp_size} tensor-parallel ranks: not divisible")
    return features // tp_size


def _default_init(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(weight, mean=0.0, std=0.023)


def _mark_partitioned(parameter: Any, dim: int) -> None:
    parameter.tensor_model_parallel = True
    parameter.partition_dim = dim
    parameter.partition_stride = 1
