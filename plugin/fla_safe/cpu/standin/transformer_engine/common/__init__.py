"""Stand-in for `transformer_engine.common`: the names of the FP8 recipes."""

from . import recipe

__all__ = ["recipe"]
