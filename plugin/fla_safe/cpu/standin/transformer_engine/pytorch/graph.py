"""CUDA-graph hooks, without effect."""

from typing import Any

from fla_safe.cpu import StandinError

__all__ = ["make_graphed_callables", "restore_fp8_tensors", "save_fp8_tensors", "set_capture_end", "set_capture_start"]


def _nothing(*args: Any, **kwargs: Any) -> None: ...


restore_fp8_tensors = save_fp8_tensors = set_capture_end = set_capture_start = _nothing


def make_graphed_callables(*args: Any, **kwargs: Any) -> Any:
    """Always raises StandinError."""
    raise StandinError("CUDA graphs on the CPU stand-in", "no CUDA graphs", "drop the cuda_graph flags")
