"""FP8 recipe classes that can be named in checks but not made."""

import enum
from typing import Any

from fla_safe.cpu import StandinError

__all__ = ["DelayedScaling", "Format", "Recipe"]


class Format(enum.Enum):
    """FP8 number formats."""

    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"


class Recipe:
    """Base of the recipes; none can be made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise StandinError(
            f"the FP8 recipe {type(self).__name__} on the CPU stand-in",
            "no FP8",
            "drop the fp8 flags, or run on a GPU with the real TransformerEngine",
        )


class DelayedScaling(Recipe):
    """FP8 scaled by a history of maxima."""
