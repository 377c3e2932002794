"""Which kernel runs the gated delta rule: asked once, answered with a reason, and then fixed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from fla_safe.errors import FlaSafeError
from fla_safe.gdn.chunk import fla as fla_chunk
from fla_safe.gdn.chunk import flash_qla, te
from fla_safe.gdn.chunk.function import ChunkKernel, differentiable
from fla_safe.gdn.chunk.plain import torch_chunk_gated_delta_rule
from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.segments import PackedSegments

__all__ = ["NAMES", "Backend", "BackendError", "RuleFunction", "require", "resolve", "supports"]

NAMES: Final = ("torch", "fla", "flash_qla", "te")
_REMEDIES: Final = {"fla": "use --gdn_impl torch", "te": te.REMEDY}


class BackendError(FlaSafeError, RuntimeError):
    """The kernel that was asked for cannot run here."""


class RuleFunction(Protocol):
    """`(q, k, v, g, beta, scale, segments) -> o`, shapes as in `ops.gated_delta_rule`; the tail is already zero."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float,
        segments: PackedSegments | None,
        /,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to run the gated delta rule, resolved.

    Attributes:
        name: one of `NAMES`.
        version: of the package that brings the kernel.
        gated_delta_rule: the kernel, differentiable.
        mixer: the whole mixer in one function (`gdn.fused`), with the arguments of `gdn.mixer.mixer`; None: `gdn.mixer`
            composes the functions of `gdn.ops` around `gated_delta_rule`.
    """

    name: str
    version: str
    gated_delta_rule: RuleFunction
    mixer: Callable[..., torch.Tensor] | None = None

    def supports(
        self, device: torch.device | str, *, layout: ProjectionLayout | None = None, dtype: torch.dtype | None = None
    ) -> tuple[bool, str]:
        """See the function `supports`."""
        return supports(self.name, device, layout=layout, dtype=dtype)


def supports(
    name: str,
    device: torch.device | str,
    *,
    layout: ProjectionLayout | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[bool, str]:
    """Whether a kernel can run on a device with these heads and this dtype, and why (not)."""
    if name == "torch":
        return True, "plain torch runs everywhere"
    if name == "fla":
        if dtype == torch.float64:
            return False, "its kernels compute in float32 at most, not in float64"
        narrow = layout is not None and dtype is not None and dtype.itemsize == 2
        reason = fla_chunk.unsupported_reason(
            torch.device(device),
            layout.key_dim if layout is not None else None,
            (layout.key_dim, layout.value_dim) if layout is not None and narrow else (),
        )
        return reason is None, reason or f"fla-core {fla_chunk.fla_version()}"
    if name == "flash_qla":
        reason = flash_qla.unsupported_reason(torch.device(device), layout, dtype)
        return reason is None, reason or "flash-qla"
    if name == "te":
        reason = te.unsupported_reason(torch.device(device), dtype)
        return reason is None, reason or "TransformerEngine, as far as can be told without a call"
    return False, f"no kernel is called {name!r}; there are {', '.join(NAMES)}"


def require(
    name: str,
    device: torch.device | str,
    *,
    layout: ProjectionLayout | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Do nothing if `supports`.

    Raises:
        BackendError: it cannot run here, and why.
    """
    able, reason = supports(name, device, layout=layout, dtype=dtype)
    if not able:
        raise _refused(name, reason)


def resolve(
    name: str,
    device: torch.device | str,
    *,
    layout: ProjectionLayout | None = None,
    dtype: torch.dtype | None = None,
    fused: bool | None = None,
) -> Backend:
    """The named kernel, ready to call. Call it once, when the layer is built.

    Args:
        name: one of `NAMES`.
        device: of the activations.
        layout, dtype: heads and activations that it will meet, if known.
        fused: whether `Backend.mixer` is the fused one of `gdn.fused`, for kernels that have it. Default: on CUDA;
            under Triton's interpreter it is right but slow.

    Raises:
        BackendError: it cannot run here; nothing else is chosen in its place.
    """
    require(name, device, layout=layout, dtype=dtype)
    if name == "torch":
        return Backend("torch", torch.__version__, torch_chunk_gated_delta_rule)
    if name == "te":
        reason = te.refusal(torch.device(device), layout, dtype)
        if reason is not None:
            raise _refused(name, reason)
        return Backend("te", str(te.version()), te.te_gated_delta_rule)
    kernel: ChunkKernel = flash_qla.load() if name == "flash_qla" else fla_chunk.load()
    mixer = None
    if torch.device(device).type == "cuda" if fused is None else fused:
        from fla_safe.gdn.fused.mixer import FusedMixer  # Triton, which a machine without these kernels may lack

        mixer = FusedMixer(kernel)
    return Backend(name, kernel.version, differentiable(kernel), mixer)


def _refused(name: str, reason: str) -> BackendError:
    return BackendError(
        f"kernel {name!r} asked for, but {reason}",
        "a kernel that this machine can run",
        _REMEDIES.get(name, "use --gdn_kernel auto"),
    )
