"""Tells a forward pass that a backward pass is waiting for it."""

import torch

__all__ = ["inside_backward"]


def inside_backward() -> bool:
    """Whether a backward pass runs in this thread: a forward pass inside it is how activation recomputation works.

    What such a forward pass keeps lives only until its own backward pass, which comes next.
    """
    return torch._C._current_graph_task_id() != -1
