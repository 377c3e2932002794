"""Fused rotary embedding: not represented."""

from typing import Any

from fla_safe.cpu import StandinError

__all__ = ["apply_rotary_pos_emb"]


def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
    """Always raises StandinError."""
    raise StandinError(
        "fused rotary embedding on the CPU stand-in", "apply_rope_fusion=False", "pass --apply_rope_fusion false"
    )
