"""A package laid out as TransformerEngine 2.19 or 2.20 where its gated delta net attention is; plain torch inside.

Names, signatures and refusals are those of the released 2.19.0 and 2.20.2, but for the refusal of tensors on a CPU.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from fla_safe.gdn.chunk import te

__all__ = ["installed"]

_PYTORCH = """
import math
from contextlib import contextmanager

import torch

from fla_safe.gdn import oracle

VERSION = "{version}"
calls = []            # what each call was given
gradients = []        # whether the gradient of each output came contiguous
spoil = [lambda o: o]  # what is done to each output
_fp8 = [False]


@contextmanager
def autocast(enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False):
    before, _fp8[0] = _fp8[0], enabled
    yield
    _fp8[0] = before


class GatedDeltaNetAttention(torch.nn.Module):
    def __init__(self, num_attention_heads, kv_channels, qkv_format="sbhd", tp_size=1, tp_group=None,
                 layer_number=None, scale=None):
        super().__init__()
        self.heads, self.dims, self.qkv_format = num_attention_heads, kv_channels, qkv_format
        self.scale = 1.0 / math.sqrt(kv_channels[0]) if scale is None else scale

    def forward(self, query_layer, key_layer, value_layer, g=None, beta=None, *, qkv_format=None, cu_seqlens=None,
                checkpoint_core_attention=False, initial_state=None, output_final_state=False,
                use_qk_l2norm_in_kernel=False):
        if VERSION.startswith("2.19") and _fp8[0]:
            raise ValueError("GatedDeltaNetAttention does not support FP8 autocast or FP8 calibration.")
        q, k, v = query_layer, key_layer, value_layer
        tokens = q.shape[0]
        if (qkv_format or self.qkv_format) != "thd" or any(x.dim() != 3 for x in (q, k, v)):
            raise ValueError("Q, K, and V must be 3D tensors for qkv_format='thd'.")
        if q.shape != k.shape or q.shape[1:] != (self.heads, self.dims[0]):
            raise ValueError("GDN Q and K must have the same heads and dimension as the module")
        if v.shape != (tokens, self.heads, self.dims[1]):
            raise ValueError("GDN V must have as many heads as Q and K")
        if len({{q.dtype, k.dtype, v.dtype}}) > 1 or q.dtype not in {{torch.float16, torch.bfloat16}}:
            raise TypeError("GDN Q, K, and V must have dtype float16 or bfloat16")
        if g.dtype != torch.float32 or beta.dtype != torch.float32:
            raise TypeError("GDN g and beta must have dtype torch.float32")
        if g.shape != (tokens, self.heads) or beta.shape != g.shape:
            raise ValueError("GDN g and beta must both have shape [tokens, heads]")
        if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
            raise TypeError("cu_seqlens must have dtype torch.int32")
        assert all(x.is_contiguous() for x in (q, k, v, g, beta))
        offsets = tuple(cu_seqlens.tolist())
        calls.append({{"q": q.detach(), "k": k.detach(), "offsets": offsets, "l2norm": use_qk_l2norm_in_kernel}})
        if use_qk_l2norm_in_kernel:
            q, k = oracle.l2norm(q.float()), oracle.l2norm(k.float())
        wide = [x.float()[None] for x in (q, k, v, g, beta)]
        o = spoil[0](oracle.gated_delta_rule(*wide, scale=self.scale, offsets=offsets)[0]).to(v.dtype)
        if o.requires_grad:
            o.register_hook(lambda grad: gradients.append(grad.is_contiguous()))
        return o.reshape(tokens, -1)
"""


@contextmanager
def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str = "2.20.2") -> Iterator[ModuleType]:
    """Put the package and its metadata in `folder` and `folder` on the path; yields `transformer_engine.pytorch`."""
    package = folder / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text(_PYTORCH.format(version=version))
    metadata(folder, "transformer_engine", version)
    metadata(folder, "nvidia_cudnn_frontend", "1.32.0")
    before = {name: sys.modules.pop(name) for name in _loaded()}
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(te, "_TRIAL_BOUNDS", (0, 1, 66))
    te._attention.cache_clear()
    import transformer_engine.pytorch as fake

    try:
        yield fake
    finally:
        te._attention.cache_clear()
        for name in _loaded():
            del sys.modules[name]
        sys.modules.update(before)


def metadata(folder: Path, name: str, version: str) -> None:
    """What pip leaves beside an installed package, as far as `importlib.metadata.version` reads it."""
    place = folder / f"{name}-{version}.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]
