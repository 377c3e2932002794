"""FLA's gated delta rule kernels outside autograd: no dispatch, no identity cache, no synchronisation.

Works with fla-core 0.4.2 to 0.6.x. Only functions that launch kernels are taken from FLA
(`fla.ops.gated_delta_rule.chunk`), by the arguments that all these versions share: the single steps where we know how
FLA puts them together (`fla_parts`), else its forward and its backward as a whole.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, Final

import torch
from packaging.version import InvalidVersion, Version

from fla_safe.errors import MissingDependencyError
from fla_safe.gdn.chunk.fla_parts import FlaParts, load_parts
from fla_safe.gdn.chunk.function import sum_heads
from fla_safe.gdn.chunk.grads import KernelGrads
from fla_safe.gdn.chunk.rebind import rebind
from fla_safe.gdn.segments import CHUNK_SIZE, PackedSegments

__all__ = ["SUPPORTED", "FlaKernel", "Saved", "fla_version", "load", "unsupported_reason"]

_log = logging.getLogger("fla_safe")

SUPPORTED: Final = (Version("0.4.2"), Version("0.7"))
"""First supported version of fla-core, and the first that is not."""

_ARGUMENTS: Final = {
    "chunk_gated_delta_rule_fwd": "q k v g beta scale initial_state output_final_state cu_seqlens chunk_indices",
    "chunk_gated_delta_rule_bwd": "q k v g beta A scale initial_state do dht cu_seqlens chunk_indices",
}

# `prepare_chunk_offsets` is called deep inside FLA with the offsets alone; the prepared answer waits here.
_prepared = threading.local()

type Saved = tuple[torch.Tensor, ...]
"""q, k, v, cumulated g, beta, A, and states if they were kept: what `FlaKernel.backward` needs of the forward pass."""

type Packing = dict[str, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class FlaKernel:
    """The two kernel chains of one FLA version, outside autograd. All tensors are contiguous.

    Attributes:
        version: of fla-core.
        native_gva: False for 0.4.2, whose kernels know one head count: queries and keys are repeated to the value
            heads there, and only there.
        parts: the single steps, used instead of the whole functions; None if this version puts them together otherwise.
    """

    version: str
    native_gva: bool
    parts: FlaParts | None
    _forward: Callable[..., tuple[Any, ...]]
    _backward: Callable[..., tuple[Any, ...]]

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
    ) -> tuple[torch.Tensor, Saved]:
        """The output `[B, T, HV, V]` and what the backward pass needs; arguments as in `ops.gated_delta_rule`.

        `keep_states`: keep for the backward pass what it would compute again, `2 HV (K + V + K V / 64)` bytes a token
        in 16 bits.
        """
        packing = _packing(segments)
        if self.parts is not None:
            o, (cumulated, *rest) = self.parts.forward(q, k, v, g, beta, scale, packing, keep_states)
            return o, (q, k, v, cumulated, beta, *rest)
        if not self.native_gva:
            q, k = _repeat(q, v), _repeat(k, v)
        cumulated, o, A, *_ = self._forward(
            q=q, k=k, v=v, g=g, beta=beta, scale=scale, initial_state=None, output_final_state=False, **packing
        )
        return o, (q, k, v, cumulated, beta, A)

    def backward(
        self, saved: Saved, do: torch.Tensor, scale: float, segments: PackedSegments | None, key_heads: int
    ) -> KernelGrads:
        """Gradients in as many parts as the kernels leave them; that of g is float32."""
        packing = _packing(segments)
        if self.parts is not None:
            return self.parts.backward(saved, do, scale, packing)
        q, k, v, cumulated, beta, A = saved
        dq, dk, dv, dbeta, dg, *_ = self._backward(
            q=q, k=k, v=v, g=cumulated, beta=beta, A=A, scale=scale, initial_state=None, do=do, dht=None, **packing
        )
        return KernelGrads(dq, dk, dv, dg, dbeta)

    def total(
        self, grads: KernelGrads, segments: PackedSegments | None, key_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of q, k `[B, T, H, K]`, v `[B, T, HV, V]`, g and beta `[B, T, HV]` from what `backward` returned.

        Overwrites the parts.
        """
        if self.parts is not None:
            return self.parts.total(grads, key_heads, _packing(segments))
        dq, dk, dv, dg, dbeta, *_ = grads
        return sum_heads(dq, key_heads), sum_heads(dk, key_heads), dv, dg, dbeta


def _repeat(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return x if x.shape[2] == v.shape[2] else x.repeat_interleave(v.shape[2] // x.shape[2], dim=2)


def _packing(segments: PackedSegments | None) -> Packing:
    if segments is None:
        return {"cu_seqlens": None, "chunk_indices": None}
    chunks = segments.chunks(CHUNK_SIZE)
    _prepared.offsets = chunks.offsets
    return {"cu_seqlens": segments.offsets, "chunk_indices": chunks.indices}


def _prepared_chunk_offsets(cu_seqlens: torch.Tensor, chunk_size: int) -> torch.Tensor:
    assert chunk_size == CHUNK_SIZE
    return _prepared.offsets


@cache
def fla_version() -> Version | None:
    """The importable version of fla-core, None without one."""
    try:
        import fla

        return Version(fla.__version__)
    except (ImportError, InvalidVersion):
        return None


def unsupported_reason(device: torch.device, key_dim: int | None, dims_16bit: tuple[int, ...] = ()) -> str | None:
    """Why FLA's kernels cannot run, or None.

    Args:
        device: of the activations.
        key_dim: K, if known.
        dims_16bit: K and V when the activations are 16-bit, else empty.
    """
    version = fla_version()
    if version is None:
        return "fla-core is not installed or does not import"
    if not SUPPORTED[0] <= version < SUPPORTED[1]:
        return f"fla-core {version} is outside {SUPPORTED[0]} <= version < {SUPPORTED[1]}"
    if device.type != "cuda":
        import triton

        if device.type != "cpu" or not triton.knobs.runtime.interpret:
            return (
                f"its Triton kernels need CUDA, or Triton's interpreter (TRITON_INTERPRET=1); device is {device.type}"
            )
    if key_dim is not None and key_dim > 256:
        return f"its kernels hold key dimensions up to 256, not {key_dim}"
    if any(dim % 2 for dim in dims_16bit):
        return f"its 16-bit kernels need even head dimensions, not {dims_16bit}"
    if device.type == "cuda" and key_dim is not None and 32 < key_dim <= 64 and _miscompiles(device):
        return (
            f"Triton before 3.7.1 miscompiles its backward kernel on Hopper for key dimension {key_dim} "
            "(fla-org/flash-linear-attention#640): upgrade Triton"
        )
    return None


def _miscompiles(device: torch.device) -> bool:
    import triton

    base = Version(Version(triton.__version__).base_version)
    return torch.cuda.get_device_capability(device)[0] == 9 and Version("3.4") <= base < Version("3.7.1")


@cache
def load() -> FlaKernel:
    """FLA's kernels, inspected once.

    Raises:
        MissingDependencyError: the installed FLA has no such functions, or they lack an argument that we pass.
    """
    try:
        import fla
        from fla.ops.gated_delta_rule import chunk
    except ImportError as error:
        raise _mismatch(f"fla-core does not import: {error}") from error
    # FLA refuses every gated backward pass on Hopper with these Tritons; only K of 33 to 64 is wrong there, and refused
    # by `unsupported_reason`. Delete the entry together with support for Triton < 3.7.1.
    replacements = {"prepare_chunk_offsets": _prepared_chunk_offsets, "IS_NVIDIA_HOPPER": False}
    functions = []
    for name, arguments in _ARGUMENTS.items():
        function = getattr(chunk, name, None)
        missing = set(arguments.split()) - set(signature(function).parameters) if function else {name}
        if function is None or missing:
            raise _mismatch(f"fla-core {fla.__version__}: {name} lacks {sorted(missing)}")
        functions.append(rebind(function, replacements))
    native_gva = Version(fla.__version__) >= Version("0.5")
    parts = load_parts(chunk, replacements) if native_gva else None
    if parts is None:
        _log.info("fla-safe: FLA %s runs its own backward as a whole: right, with more launches", fla.__version__)
    return FlaKernel(fla.__version__, native_gva, parts, *functions)


def _mismatch(seen: str) -> MissingDependencyError:
    return MissingDependencyError(
        seen, f"fla-core >= {SUPPORTED[0]}, < {SUPPORTED[1]}", "pip install 'fla-core>=0.6,<0.7'"
    )
