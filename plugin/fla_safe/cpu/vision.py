"""Declares the torchvision operators whose compiled library a CPU build of torch cannot load."""

from typing import Any

import torch

from fla_safe.installed import installed_version

__all__ = ["install"]

_OPERATORS = ("nms", "qnms")
_library: Any = None


def install() -> None:
    """Declare torchvision's operators if its own library belongs to another build of torch than the one in use.

    torchvision registers shapes for `torchvision::nms` at import and fails if its compiled library, which PyPI builds
    against the CUDA torch, did not load. Declared operators let the import pass; calling one raises PyTorch's
    NotImplementedError. Matching builds are left alone, because an operator can be declared only once.
    """
    global _library
    if torch.version.cuda is not None:
        return
    version = installed_version("torchvision")
    if version is None or version.endswith("+cpu"):
        return
    _library = torch.library.Library("torchvision", "DEF")
    for name in _OPERATORS:
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
