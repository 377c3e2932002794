"""One packed Gated DeltaNet layer over FLA's kernels, forward and backward, on host tensors that stand for GPU ones."""

import importlib
import random
from typing import Any

import torch

__all__ = ["Layer", "lift_hopper_refusal", "packed_offsets", "prepare"]


def prepare() -> None:
    """Make FLA accept host tensors (their device has no index), and this Triton on Hopper."""
    utils: Any = importlib.import_module("fla.utils")
    shared, count = utils.check_shared_mem, utils.get_multiprocessor_count
    utils.check_shared_mem = lambda arch="none", tensor_idx=0: shared(arch, tensor_idx or 0)
    utils.get_multiprocessor_count = lambda tensor_idx=0: count(tensor_idx or 0)
    lift_hopper_refusal()


def lift_hopper_refusal() -> None:
    """Let `chunk_bwd_dqkwg` run on Hopper without TileLang, for measurements that do not look at results.

    FLA raises there with Triton 3.4 to 3.7.0 (flash-linear-attention issue 640: wrong gradients with some tiles).
    """
    importlib.import_module("fla.ops.common.chunk_o").IS_NVIDIA_HOPPER = False  # type: ignore[attr-defined]


def packed_offsets(total: int, segments: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Random offsets `[N + 1]` that cut `total` tokens in at most `segments` segments."""
    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(1, total), min(segments, total) - 1)) if total > 1 else []
    return torch.tensor([0, *cuts, total], dtype=dtype)


class Layer:
    """Convolution, l2norm, chunked gated delta rule and gated norm, as a GDN layer calls them.

    Args:
        heads, value_heads: of keys and of values; width of both is 128.
        device: `"cpu"` under the stand-in GPU.
    """

    def __init__(
        self, heads: int = 2, value_heads: int = 2, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
    ) -> None:
        from fla.modules import FusedRMSNormGated
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        try:
            from fla.modules.convolution import causal_conv1d
        except ImportError:
            from fla.modules.conv import causal_conv1d
        self.rule, self.conv = chunk_gated_delta_rule, causal_conv1d
        self.heads, self.value_heads, self.width = heads, value_heads, 128
        self.make: dict[str, Any] = {"dtype": dtype, "device": device}
        self.gate_make: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.channels = (2 * heads + value_heads) * self.width
        self.weight = torch.randn(self.channels, 4, **self.make).requires_grad_()
        self.norm = FusedRMSNormGated(self.width).to(**self.make)

    def step(self, total: int, offsets: torch.Tensor | None) -> None:
        """Forward and backward over `[1, total, channels]`."""
        keys = self.heads * self.width
        x = torch.empty(1, total, self.channels, **self.make).requires_grad_()
        y = self.conv(x=x, weight=self.weight, bias=None, activation="silu", cu_seqlens=offsets)
        y = y[0] if isinstance(y, tuple) else y
        q, k, v = y.split([keys, keys, self.value_heads * self.width], -1)
        gate = torch.empty(1, total, self.value_heads, **self.gate_make).requires_grad_()
        beta = torch.empty(1, total, self.value_heads, **self.make).requires_grad_()
        out, _ = self.rule(
            q.view(1, total, self.heads, -1),
            k.view(1, total, self.heads, -1),
            v.view(1, total, self.value_heads, -1),
            g=gate,
            beta=beta,
            cu_seqlens=offsets,
            use_qk_l2norm_in_kernel=True,
        )
        out = self.norm(out, torch.empty_like(out))
        torch.autograd.backward(out, torch.empty_like(out))
