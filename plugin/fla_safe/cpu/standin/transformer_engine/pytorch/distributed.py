"""Activation checkpointing through Megatron's own, and a random-state tracker that cannot be used."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fla_safe.cpu import StandinError

__all__ = [
    "CudaRNGStatesTracker",
    "activation_recompute_forward",
    "checkpoint",
    "in_fp8_activation_recompute_phase",
    "is_fp8_activation_recompute_enabled",
]


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Any = None,
    tp_group: Any = None,
    **kwargs: Any,
) -> Any:
    """Recompute `function(*args, **kwargs)` in the backward pass, random state restored, by Megatron's checkpoint."""
    from megatron.core.tensor_parallel.random import checkpoint as megatron_checkpoint

    bound = functools.partial(function, **kwargs) if kwargs else function
    return megatron_checkpoint(bound, distribute_saved_activations, *args)


class CudaRNGStatesTracker:
    """Named by Megatron as a base class; making one (`te_rng_tracker`) raises StandinError."""

    def __init__(self) -> None:
        raise StandinError(
            "te_rng_tracker on the CPU stand-in", "Megatron's own random-state tracker", "drop --te_rng_tracker"
        )


@contextmanager
def activation_recompute_forward(*args: Any, **kwargs: Any) -> Iterator[None]:
    """A context without effect (it marks FP8 recomputation)."""
    yield


def is_fp8_activation_recompute_enabled() -> bool:
    """False."""
    return False


def in_fp8_activation_recompute_phase() -> bool:
    """False."""
    return False
