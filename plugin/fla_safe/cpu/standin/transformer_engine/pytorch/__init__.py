"""Stand-in for `transformer_engine.pytorch`."""

from . import attention, cpu_offload, distributed, float8_tensor, fp8, graph, module, utils
from .attention import DotProductAttention
from .fp8 import fp8_autocast, fp8_model_init
from .module import GroupedLinear, LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "attention",
    "cpu_offload",
    "distributed",
    "float8_tensor",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "graph",
    "module",
    "utils",
]
