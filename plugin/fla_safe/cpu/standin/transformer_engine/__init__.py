"""Not NVIDIA's TransformerEngine: fla_safe's CPU stand-in, plain PyTorch with its parallel semantics."""

from fla_safe import cpu as _cpu

from . import common, pytorch

__all__ = ["IS_FLA_SAFE_STANDIN", "common", "pytorch"]
__version__ = _cpu.STANDIN_VERSION
IS_FLA_SAFE_STANDIN = True

_cpu.notice()
