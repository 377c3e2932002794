"""The whole token mixer as one autograd function: fused kernels around a chunk kernel."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from fla_safe.errors import FlaSafeError
from fla_safe.gdn import calls
from fla_safe.gdn.chunk.function import ChunkKernel
from fla_safe.gdn.fused.launch import (
    MAX_WINDOW,
    Gates,
    MixerShape,
    grad_gate,
    grad_in,
    grad_out,
    mixer_shape,
    run_in,
    run_out,
    total_sums,
)
from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.recomputation import kept_briefly
from fla_safe.gdn.segments import PackedSegments

__all__ = ["FusedError", "FusedMixer"]


class FusedError(FlaSafeError, ValueError):
    """The fused kernels cannot run what they were given."""


class _Call(NamedTuple):
    shape: MixerShape
    segments: PackedSegments | None
    kernel: ChunkKernel
    keep_inputs: bool
    keep_states: bool

    @property
    def scale(self) -> float:
        return self.shape.layout.key_dim**-0.5


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which in a process with several need not be the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


class _Mixer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, proj, conv_weight, conv_bias, A_log, dt_bias, norm_weight, call):  # type: ignore[no-untyped-def]
        calls.count_forward()
        gates = Gates(conv_weight, conv_bias, A_log, dt_bias)
        with _on(proj.device):
            inputs = run_in(proj, gates, call.shape, call.segments)
            q, k, v, beta = inputs.q, inputs.k, inputs.v, inputs.beta
            o, saved = call.kernel.forward(q, k, v, inputs.g, beta, call.scale, call.segments, call.keep_states)
            out = run_out(o, proj, norm_weight, call.shape, call.segments)
        # A kernel that saved other queries than it was given (repeated ones) needs them back as they were.
        ctx.keeps_inputs = call.keep_inputs or saved[0] is not q
        ctx.call = call
        kept = saved if ctx.keeps_inputs else (saved[3], *saved[5:])
        ctx.save_for_backward(proj, conv_weight, conv_bias, A_log, dt_bias, norm_weight, o, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        calls.count_backward()
        call = ctx.call
        proj, conv_weight, conv_bias, A_log, dt_bias, norm_weight, o, *saved = ctx.saved_tensors
        gates = Gates(conv_weight, conv_bias, A_log, dt_bias)
        shape, segments = call.shape, call.segments
        with calls.guarded(), _on(proj.device):
            dout = dout.contiguous()
            do, out_sums = grad_out(dout, o, proj, norm_weight, shape, segments)
            if not ctx.keeps_inputs:
                inputs = run_in(proj, gates, shape, segments)
                saved = [inputs.q, inputs.k, inputs.v, saved[0], inputs.beta, *saved[1:]]
                del inputs
            parts = call.kernel.backward(saved, do, call.scale, segments, shape.layout.key_heads)
            del saved, do
            dproj = torch.empty_like(proj)
            grad_gate(dout, o, proj, norm_weight, dproj, shape, segments)
            in_sums = grad_in(parts, proj, gates, dproj, shape, segments)
            grads, dnorm = total_sums(in_sums, out_sums, gates, norm_weight, shape)
        return dproj, grads.conv_weight, grads.conv_bias, grads.A_log, grads.dt_bias, dnorm, None


@dataclass(frozen=True, slots=True)
class FusedMixer:
    """`gdn.mixer.mixer` by fused Triton kernels around `kernel`, with the same arguments and result.

    One launch before the chunk kernel and one after it; backward one before, two after, one for the parameters'
    gradients, and the first again if `keep_inputs` is False.

    Attributes:
        kernel: the chunk kernel.
        keep_inputs: keep q, k, v and beta for the backward pass (`2 (2 H K + HV V)` bytes a token in bfloat16) instead
            of computing them again from the projection (one launch). None: keep them when the forward pass runs inside
            a backward pass, which is how activation recomputation runs it: their life is short then, and the chunk
            kernel keeps its states too.
    """

    kernel: ChunkKernel
    keep_inputs: bool | None = None

    def __call__(
        self,
        proj: torch.Tensor,
        *,
        layout: ProjectionLayout,
        conv_weight: torch.Tensor,
        conv_bias: torch.Tensor | None,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_eps: float,
        segments: PackedSegments | None,
        use_qk_l2norm: bool = True,
        zero_centered_norm: bool = False,
    ) -> torch.Tensor:
        """`[T, B, HV * V]` from `proj` `[T, B, proj_dim]`; see `gdn.mixer.mixer`.

        Raises:
            FusedError: a dtype, a window or a shape that the kernels do not know.
        """
        window = conv_weight.shape[-1]
        if window > MAX_WINDOW or proj.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise FusedError(
                f"a convolution of width {window} on {proj.dtype}",
                f"a width of at most {MAX_WINDOW} and bfloat16, float16 or float32",
                "use gdn.mixer.composed_mixer",
            )
        if proj.shape[-1] != layout.proj_dim or conv_weight.numel() != layout.conv_dim * window:
            raise FusedError(
                f"a projection {tuple(proj.shape)} and convolution weights {tuple(conv_weight.shape)}",
                f"widths {layout.proj_dim} and {layout.conv_dim} for {layout}",
                "check the layout against the tensor parallel size",
            )
        shape = mixer_shape(
            layout,
            proj.shape[1],
            window,
            conv_bias is not None,
            segments is not None,
            use_qk_l2norm,
            zero_centered_norm,
            norm_eps,
        )
        short_lived = kept_briefly()
        keep_inputs = short_lived if self.keep_inputs is None else self.keep_inputs
        call = _Call(shape, segments, self.kernel, keep_inputs, keep_inputs and short_lived)
        # No copies in practice: Megatron's projection and parameters are contiguous.
        return _Mixer.apply(
            proj.contiguous(), conv_weight.contiguous(), conv_bias, A_log, dt_bias, norm_weight.contiguous(), call
        )
