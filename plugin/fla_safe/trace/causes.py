"""Says why a file was touched, from its path and from the Python stack that touched it."""

from typing import Literal, get_args

__all__ = ["CAUSES", "NORMAL", "Cause", "Frame", "classify", "is_probe"]

Cause = Literal[
    "image loading",
    "data set",
    "checkpoint",
    "Triton cache",
    "Python imports",
    "FLA backend probing",
    "other",
]
CAUSES: tuple[Cause, ...] = get_args(Cause)
NORMAL: frozenset[Cause] = frozenset({"image loading", "data set", "checkpoint"})
"""What a training step may do."""

Frame = tuple[str, int, str]
"""File, line, function."""

_PROBES = frozenset({"is_available", "is_enabled", "can_use", "find_spec_cached", "_update_active_backend"})
_IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".mp4", ".mov", ".mkv", ".avi", ".webm")
_TRITON = (".source", ".ttir", ".ttgir", ".llir", ".ptx", ".cubin", ".autotune.json")
_TRITON_PARTS = ("/.triton/", "torchinductor_", "/__grp__", "__triton_launcher", "cuda_utils.")
_CHECKPOINTS = (".safetensors", ".safetensors.index.json", ".pt", ".pth", ".ckpt", ".distcp", "/config.json")
_DATA = (".jsonl", ".json", ".arrow", ".parquet", ".csv", ".tsv", ".idx", ".lance", ".tar")
_PYTHON = (".py", ".pyc", ".pyi", ".so", ".pyd")
_METADATA = (".dist-info", ".egg-info", "__pycache__")
_STACK: tuple[tuple[str, Cause], ...] = (
    ("/fla_safe/runtime/artifacts/", "Triton cache"),
    ("/triton/", "Triton cache"),
    ("/torch/_inductor/", "Triton cache"),
    ("/PIL/", "image loading"),
    ("/torchvision/io/", "image loading"),
    ("/qwen_vl_utils/", "image loading"),
    ("/datasets/", "data set"),
    ("/modelscope/msdatasets/", "data set"),
    ("/swift/dataset/", "data set"),
    ("/safetensors/", "checkpoint"),
    ("/torch/serialization.py", "checkpoint"),
    ("/torch/distributed/checkpoint/", "checkpoint"),
    ("/dist_checkpointing/", "checkpoint"),
)


def is_probe(filename: str, function: str) -> bool:
    """Whether this frame is FLA asking itself if one of its optional backends is there."""
    return function in _PROBES and "/fla/" in filename


def classify(path: str, frames: tuple[Frame, ...] = (), *, importing: bool = False, cache: str = "") -> Cause:
    """Why `path` was touched.

    Args:
        path: a file or directory, or a module's name for an import.
        frames: the Python stack, innermost first, without the import system's own frames; empty where it is not known.
        importing: the import system is on the stack.
        cache: Triton's cache directory, if one was named.
    """
    if any(is_probe(filename, function) for filename, _, function in frames):
        return "FLA backend probing"
    low = path.lower()
    if low.endswith(_IMAGES):
        return "image loading"
    if low.endswith(_TRITON) or any(part in low for part in _TRITON_PARTS):
        return "Triton cache"
    if cache and f"{path}/".startswith(f"{cache.rstrip('/')}/"):
        return "Triton cache"
    if importing:
        return "Python imports"
    if low.endswith(_CHECKPOINTS):
        return "checkpoint"
    for filename, _, _ in frames:
        for part, cause in _STACK:
            if part in filename:
                return cause
    if low.endswith(_DATA):
        return "data set"
    if low.endswith(_PYTHON) or any(part in low for part in _METADATA):
        return "Python imports"
    return "other"
