"""Stand-in for `transformer_engine.pytorch.module`."""

from typing import Any

from fla_safe.cpu import StandinError

from . import base, grouped_linear, layernorm, layernorm_linear, linear
from .base import TransformerEngineBaseModule
from .grouped_linear import GroupedLinear
from .layernorm import LayerNorm, RMSNorm
from .layernorm_linear import LayerNormLinear
from .linear import Linear

__all__ = [
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "TransformerEngineBaseModule",
    "base",
    "grouped_linear",
    "layernorm",
    "layernorm_linear",
    "linear",
]


class LayerNormMLP(TransformerEngineBaseModule):
    """Not represented: making one raises StandinError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise StandinError("LayerNormMLP on the CPU stand-in", "Megatron's MLP", "use the default layer spec")
