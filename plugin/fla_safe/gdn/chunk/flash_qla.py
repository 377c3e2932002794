"""FlashQLA's gated delta rule kernels (TileLang) behind the same interface as FLA's, without synchronisation.

FlashQLA, https://github.com/QwenLM/FlashQLA, version 0.1.3. Taken from it: the functions that launch one kernel each.
Left out: its split of long sequences within a card, which reads the offsets on the host in every call, and its sums
over heads and chunks, which the kernel that reads the gradients does on the way.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from packaging.version import InvalidVersion, Version

from fla_safe.errors import MissingDependencyError
from fla_safe.gdn.chunk.function import sum_heads
from fla_safe.gdn.chunk.grads import KernelGrads
from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.segments import CHUNK_SIZE, PackedSegments

__all__ = ["SUPPORTED", "FlashQlaKernel", "load", "segment_counts", "unsupported_reason", "watch_compilations"]

SUPPORTED: Final = (Version("0.1.3"), Version("0.1.4"))
"""First supported version of flash-qla, and the first that is not."""

_FUNCTIONS: Final = {
    "cumulate": "chunk_local_cumsum",
    "solve": "kkt_solve",
    "output": "fused_gdr_fwd",
    "states": "fused_gdr_h",
    "gradients": "fused_gdr_bwd",
}
"""Field of `FlashQlaKernel` -> function in `flash_qla.ops.gated_delta_rule.chunk`; each launches one kernel."""
_PREPARED: Final = "_flash_qla_prepared_varlen"
"""Attribute of an offsets tensor in which FlashQLA looks for chunk size, chunk offsets, their number, chunk indices."""


@dataclass(frozen=True, slots=True)
class FlashQlaKernel:
    """The kernel chain of one FlashQLA version, outside autograd, a `ChunkKernel`; its steps: `_FUNCTIONS`."""

    version: str
    cumulate: Callable[..., Any]
    solve: Callable[..., Any]
    output: Callable[..., Any]
    states: Callable[..., Any]
    gradients: Callable[..., Any]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float,
        segments: PackedSegments | None,
        keep_states: bool = False,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The output `[B, T, HV, V]` and what the backward pass needs, states `[B, NT, HV, K, V]` if kept."""
        offsets = _offsets(segments)
        cumulated = self.cumulate(g, chunk_size=CHUNK_SIZE, cu_seqlens=offsets)
        A = self.solve(k, beta, chunk_size=CHUNK_SIZE, cu_seqlens=offsets)
        o, h, _ = self.output(
            q, k, v, A, cumulated, beta, scale, output_final_state=False, output_h=keep_states, cu_seqlens=offsets
        )
        return o, (q, k, v, cumulated, beta, A, *((h,) if keep_states else ()))

    def backward(
        self,
        saved: tuple[torch.Tensor, ...],
        do: torch.Tensor,
        scale: float,
        segments: PackedSegments | None,
        key_heads: int,
    ) -> KernelGrads:
        """Gradients in as many parts as the kernels leave them; that of g is float32, and of the cumulated g."""
        q, k, v, g, beta, A, *states = saved
        offsets = _offsets(segments)
        if states:
            (h,) = states
            del states
        else:
            h, _, _ = self.states(k, v, A, g, beta, output_final_state=False, output_h=True, cu_seqlens=offsets)
        dq, dk, dv, dg, dbeta, _ = self.gradients(q, k, v, A, g, beta, do, None, h, scale, cu_seqlens=offsets)
        return KernelGrads(dq, dk, dv, dg, dbeta, chunk=CHUNK_SIZE)

    def total(
        self, grads: KernelGrads, segments: PackedSegments | None, key_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of q, k, v, g and beta from what `backward` returned."""
        dg = self.cumulate(
            grads.dg, chunk_size=CHUNK_SIZE, cu_seqlens=_offsets(segments), reverse=True, zero_last_chunk=True
        )
        return sum_heads(grads.dq, key_heads), sum_heads(grads.dk, key_heads), grads.dv, dg, grads.dbeta


def _offsets(segments: PackedSegments | None) -> torch.Tensor | None:
    """The offsets, with everything attached that FlashQLA would compute from them on the host."""
    if segments is None:
        return None
    offsets = segments.offsets
    if not hasattr(offsets, _PREPARED):
        chunks = segments.chunks(CHUNK_SIZE)
        setattr(offsets, _PREPARED, (CHUNK_SIZE, chunks.offsets, len(chunks.indices), chunks.indices))
    return offsets


def segment_counts(value_heads: int, processors: int) -> tuple[int, ...]:
    """Numbers of segments of which each makes FlashQLA compile another forward kernel on Hopper.

    It splits the value dimension by whether segments x value heads fill 0.7 of the GPU's multiprocessors, half of that,
    or less: a warm-up that has run these numbers has compiled all.
    """
    enough = int(processors * 0.7)
    return tuple(dict.fromkeys((-(-enough // value_heads), max(1, -(-enough // (2 * value_heads))), 1)))


@cache
def _version() -> Version | None:
    if importlib.util.find_spec("flash_qla") is None:
        return None
    try:
        return Version(importlib.metadata.version("flash-qla"))
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        return None


def unsupported_reason(device: torch.device, layout: ProjectionLayout | None, dtype: torch.dtype | None) -> str | None:
    """Why FlashQLA's kernels cannot run with these heads and this dtype, or None. Imports nothing of it."""
    version = _version()
    if version is None:
        return "flash-qla is not installed"
    if not SUPPORTED[0] <= version < SUPPORTED[1]:
        return f"flash-qla {version} is outside {SUPPORTED[0]} <= version < {SUPPORTED[1]}"
    if device.type != "cuda":
        return f"its kernels need CUDA, not {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"its kernels were checked for compute capability 9.0 only, not {capability[0]}.{capability[1]}"
    if dtype is not None and dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels compute in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}"
    if layout is not None and (layout.key_dim, layout.value_dim) != (128, 128):
        return f"its kernels know head dimensions of 128, not {layout.key_dim} and {layout.value_dim}"
    return None


@cache
def load() -> FlashQlaKernel:
    """FlashQLA's kernels; importing it starts CUDA on the current device.

    Raises:
        MissingDependencyError: it does not import, or lacks a function.
    """
    remedy = "pip install 'flash-qla==0.1.3', or --gdn_kernel fla"
    try:
        from flash_qla.ops.gated_delta_rule import chunk
    except Exception as error:  # TileLang's import fails in many ways (its libraries, the CUDA toolkit)
        raise MissingDependencyError(f"flash_qla does not import: {error}", "flash-qla 0.1.3", remedy) from error
    missing = [name for name in _FUNCTIONS.values() if not callable(getattr(chunk, name, None))]
    if missing or chunk.CHUNK_SIZE != CHUNK_SIZE:
        raise MissingDependencyError(f"flash_qla {_version()} has no {missing}", "flash-qla 0.1.3", remedy)
    return FlashQlaKernel(str(_version()), **{field: getattr(chunk, name) for field, name in _FUNCTIONS.items()})


def watch_compilations(told: Callable[[str], None]) -> Callable[[], None]:
    """Tell of each kernel that TileLang compiles from now on, before it does; returns what ends that."""
    from tilelang.jit import JITImpl

    stock = JITImpl.compile

    def compile(jit: Any, *args: Any, **kwargs: Any) -> Any:
        told(str(getattr(jit.func, "__name__", jit.func)))
        return stock(jit, *args, **kwargs)

    JITImpl.compile = compile

    def end() -> None:
        JITImpl.compile = stock

    return end
