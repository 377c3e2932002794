"""Tells whether what a forward pass keeps for its backward pass would live long."""

from typing import Any

import torch

__all__ = ["kept_briefly", "recomputing"]

_top_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def recomputing() -> bool:
    """Whether this forward pass runs inside a backward pass: it repeats one that ran before."""
    return torch._C._current_graph_task_id() != -1


def kept_briefly() -> bool:
    """Whether tensors that this forward pass saves are used next, or not kept at all: it is being recomputed.

    Reentrant checkpoints (Megatron's) recompute in a plain forward pass inside a backward pass. The other kind replaces
    saved tensors by those of a second forward pass, one for one: both passes must save the same ones, and those of the
    first cost nothing. False if this PyTorch does not tell which kind it is.
    """
    if _top_hooks is None:
        return False
    hooks = _top_hooks(False)
    if hooks is None:
        return recomputing()
    return hooks[0].__module__ == "torch.utils.checkpoint"
