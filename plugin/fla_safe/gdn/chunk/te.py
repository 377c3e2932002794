"""TransformerEngine's gated delta net attention, experimental there, as a differentiable function. Never run by us.

`transformer_engine.pytorch.GatedDeltaNetAttention` (2.19 and later) checks shapes and calls one operator of the cuDNN
frontend, which has a backward pass of its own. TransformerEngine offers neither pass as a plain function, so this is no
`ChunkKernel` whose gradients the fused mixer could read in parts: `gdn.mixer` composes `gdn.ops` around it.

As the sources say (2.19.0 and 2.20.2, with the frontend's 1.28.0 to 1.32.0), it computes `ops.gated_delta_rule` in
chunks of 64: q, k and v in bfloat16 or float16; g, the logarithm of the decay, and beta, after the sigmoid, in float32;
l2norm of q and k only if asked; as many key heads as value heads; packed rows by int32 offsets on the device, without a
synchronisation. The frontend builds a graph for each new pair of row length and number of segments, and keeps it. Its
kernels are compiled at their first call: CuTe's on compute capability 10.0 to 10.3 and 10.7, cuTile's elsewhere. Those
of CuTe may cut a long sequence where the decay between leaves less than exp(-10) of the state, and drop the rest.
"""

import importlib.metadata
import sys
from functools import cache, lru_cache
from typing import Any, Final

import torch
from packaging.version import InvalidVersion, Version
from torch.autograd.function import once_differentiable

from fla_safe.gdn import calls
from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.segments import PackedSegments

__all__ = ["REMEDY", "SUPPORTED", "refusal", "segment_counts", "te_gated_delta_rule", "unsupported_reason", "version"]

SUPPORTED: Final = (Version("2.19"), Version("3"))
"""First supported version of TransformerEngine, and the first that is not."""
FRONTEND: Final = Version("1.28")
"""First version of the cuDNN frontend that TransformerEngine 2.19 accepts."""
REMEDY: Final = (
    "pip install 'transformer-engine[pytorch]>=2.19' 'nvidia-cudnn-frontend[cutedsl,cutile]>=1.28', "
    "or use --gdn_kernel auto"
)
_TRIAL_BOUNDS: Final = (0, 1, 66, 2048, 4096)
"""Long enough that launch options which cuTile times at its first call suit a long row."""


class _Ends(torch.autograd.Function):
    """The output as it is. Counts both passes; the gradient enters contiguous, as cuTile's kernels want it."""

    @staticmethod
    def forward(ctx, o):  # type: ignore[no-untyped-def]
        calls.count_forward()
        return o.view_as(o)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):  # type: ignore[no-untyped-def]
        calls.count_backward()
        return do.contiguous()


def te_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    segments: PackedSegments | None,
    /,
) -> torch.Tensor:
    """A `backends.RuleFunction`; bfloat16 or float16 on CUDA."""
    batch, rows, heads, value_dim = v.shape
    offsets = _equal_offsets(batch, rows, v.device) if segments is None else segments.offsets
    # Always packed: the offsets that TransformerEngine makes for a batch lie in attributes that threads would share.
    o = _attention(heads, q.shape[3], value_dim, scale)(
        *(x.contiguous().flatten(0, 1) for x in (_repeat(q, heads), _repeat(k, heads), v, g.float(), beta.float())),
        qkv_format="thd",
        cu_seqlens=offsets,
        use_qk_l2norm_in_kernel=False,
    )
    return _Ends.apply(o.view(v.shape))  # type: ignore[no-any-return]


def _repeat(x: torch.Tensor, heads: int) -> torch.Tensor:
    """`[B, T, H, K]` -> `[B, T, HV, K]`, each key head for the value heads that share it."""
    if x.shape[2] == heads:
        return x
    return x.unsqueeze(3).expand(-1, -1, -1, heads // x.shape[2], -1).flatten(2, 3)


@lru_cache(maxsize=64)
def _equal_offsets(batch: int, rows: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=device)


@cache
def _attention(heads: int, key_dim: int, value_dim: int, scale: float) -> Any:
    """TransformerEngine's module, which has no parameters: layers of one shape share it."""
    from transformer_engine.pytorch import GatedDeltaNetAttention

    attention = GatedDeltaNetAttention(heads, (key_dim, value_dim), qkv_format="thd", scale=scale)
    if version() >= Version("2.20"):
        return attention
    # 2.19 refuses to run inside an FP8 region, though it has nothing to do in FP8. Delete with support for 2.19.
    from transformer_engine.pytorch import autocast

    def outside_fp8(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        with autocast(enabled=False):
            return attention(*tensors, **options)  # type: ignore[no-any-return]

    return outside_fp8


def segment_counts(value_heads: int, processors: int) -> tuple[int, ...]:
    """Numbers of segments that together make the CuTe kernels take each of their schedules for long rows.

    They depend on how often segments x value heads go into the GPU's multiprocessors: 16 times, 3, 2, once, or not.
    """
    fitting = (max(1, processors // (times * value_heads)) for times in (16, 3, 2, 1))
    return tuple(dict.fromkeys((1, *fitting, processors // value_heads + 1)))


def version() -> Version:
    """Of the installed TransformerEngine.

    Raises:
        PackageNotFoundError: there is none.
        InvalidVersion: it has a version that cannot be compared.
    """
    return Version(importlib.metadata.version("transformer-engine"))


def unsupported_reason(device: torch.device, dtype: torch.dtype | None) -> str | None:
    """Why TransformerEngine's kernel cannot run, as far as versions, device and dtype say, or None. Imports nothing."""
    if getattr(sys.modules.get("transformer_engine"), "IS_FLA_SAFE_STANDIN", False):
        return "transformer_engine is this package's stand-in for machines without a GPU, which has no such kernel"
    for package, first, end in (("transformer-engine", *SUPPORTED), ("nvidia-cudnn-frontend", FRONTEND, None)):
        try:
            found = Version(importlib.metadata.version(package))
        except (importlib.metadata.PackageNotFoundError, InvalidVersion):
            return f"{package} is not installed, or its version cannot be read"
        if found < first or (end is not None and found >= end):
            return f"{package} {found} is outside {first} <= version" + (f" < {end}" if end else "")
    if device.type != "cuda":
        return f"its kernels need CUDA, not {device.type}"
    if dtype is not None and dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels compute in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}"
    return None


def refusal(device: torch.device, layout: ProjectionLayout | None, dtype: torch.dtype | None) -> str | None:
    """Why a forward and a backward pass over a packed row fail, or None. Takes as long as compiling its kernels.

    Whether there are kernels for this GPU, these heads, this CUDA runtime and the optional packages, the cuDNN frontend
    says when it is called, and TransformerEngine has no way to ask before; so it is called.
    """
    layout = layout or ProjectionLayout("sectioned", 1, 1, 128, 128)
    rows, dtype = _TRIAL_BOUNDS[-1], dtype or torch.bfloat16

    def leaf(heads: int, *dim: int, of: torch.dtype, value: float) -> torch.Tensor:
        return torch.full((1, rows, heads, *dim), value, device=device, dtype=of, requires_grad=True)

    try:
        segments = PackedSegments.prepare(torch.tensor(_TRIAL_BOUNDS, dtype=torch.int32, device=device), rows)
        q, k = (leaf(layout.key_heads, layout.key_dim, of=dtype, value=layout.key_dim**-0.5) for _ in range(2))
        v = leaf(layout.value_heads, layout.value_dim, of=dtype, value=1.0)
        g, beta = (leaf(layout.value_heads, of=torch.float32, value=value) for value in (-1.0, 0.5))
        te_gated_delta_rule(q, k, v, g, beta, layout.key_dim**-0.5, segments).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # TransformerEngine, the frontend, its compilers and CUDA each have their own
        return f"its first call with {layout} failed: {type(error).__name__}: {' '.join(str(error).split())[:600]}"
    return None
