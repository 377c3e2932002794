"""FP8 switches, all off: a context that asks for FP8 is an error."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fla_safe.cpu import StandinError

__all__ = ["FP8GlobalStateManager", "fp8_autocast", "fp8_model_init"]


class FP8GlobalStateManager:
    """Answers every question about FP8 with no."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return False

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return False

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        return False

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        return False

    @classmethod
    def get_fp8_recipe(cls) -> None:
        return None

    @classmethod
    def reset(cls) -> None: ...

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: bool) -> None: ...


def _refuse(enabled: bool) -> None:
    if enabled:
        raise StandinError(
            "FP8 asked of the CPU stand-in",
            "no FP8",
            "drop the fp8 flags, or run on a GPU with the real TransformerEngine",
        )


@contextmanager
def fp8_autocast(enabled: bool = True, *args: Any, **kwargs: Any) -> Iterator[None]:
    """A context without effect; `enabled=True` raises StandinError."""
    _refuse(enabled)
    yield


@contextmanager
def fp8_model_init(enabled: bool = True, *args: Any, **kwargs: Any) -> Iterator[None]:
    """A context without effect; `enabled=True` raises StandinError."""
    _refuse(enabled)
    yield
