"""Names that Megatron imports from TransformerEngine's compiled part."""

from typing import Any

from fla_safe.cpu import StandinError

__all__ = ["cast_to_fp8"]


def cast_to_fp8(*args: Any, **kwargs: Any) -> Any:
    """Always raises StandinError."""
    raise StandinError("a cast to FP8 on the CPU stand-in", "no FP8", "drop the fp8 flags")
