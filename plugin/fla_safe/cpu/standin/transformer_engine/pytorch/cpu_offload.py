"""Activation offloading, without effect: everything is in host memory already."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["get_cpu_offload_context", "mark_activation_offload"]


def get_cpu_offload_context(*args: Any, **kwargs: Any) -> tuple[AbstractContextManager[None], Callable[[Any], Any]]:
    """A null context and the identity."""
    return nullcontext(), lambda x: x


def mark_activation_offload(*tensors: Any) -> None:
    """Does nothing."""
