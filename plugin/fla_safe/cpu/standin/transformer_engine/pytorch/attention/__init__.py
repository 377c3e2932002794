"""Stand-in for `transformer_engine.pytorch.attention`."""

from ..utils import SplitAlongDim as _SplitAlongDim  # noqa: F401  (Megatron imports it under this name)
from . import rope
from .dot_product import DotProductAttention
from .rope import apply_rotary_pos_emb

__all__ = ["DotProductAttention", "apply_rotary_pos_emb", "rope"]
