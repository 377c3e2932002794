"""The frozen target: a small hybrid of gated delta net and attention layers; its hidden states are the features."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import nn

from fla_safe.errors import FlaSafeError
from fla_safe.gdn.backends import Backend, resolve
from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.mixer import mixer
from fla_safe.gdn.segments import PackedSegments

__all__ = ["Impl", "StockNeedsGpuError", "Target", "TargetSizes", "choose_kernel", "stock_kernel"]

Impl = Literal["fla_safe", "stock"]


class StockNeedsGpuError(FlaSafeError, RuntimeError):
    """FLA's own operator was asked for where it cannot run."""


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """Sizes of a target.

    Attributes:
        vocabulary: V.
        hidden: width.
        layers: number of layers; every fourth is attention, the others are GDN.
        gdn: heads of a GDN layer and their dimensions.
        attention_heads: of an attention layer.
        taps: layers whose outputs are features.
    """

    vocabulary: int
    hidden: int
    layers: int
    gdn: ProjectionLayout
    attention_heads: int
    taps: tuple[int, ...]

    @property
    def features(self) -> int:
        """Width of all features together."""
        return self.hidden * len(self.taps)


def choose_kernel(impl: Impl, device: torch.device, layout: ProjectionLayout, dtype: torch.dtype) -> Backend:
    """The gated delta rule of a GDN layer: fla_safe's best for the device, or FLA's public operator as it is.

    Raises:
        StockNeedsGpuError: `stock` on a machine without a GPU.
        BackendError: fla_safe's kernel cannot run these heads.
    """
    if impl == "fla_safe":
        return resolve("fla" if device.type == "cuda" else "torch", device, layout=layout, dtype=dtype)
    if device.type != "cuda":
        raise StockNeedsGpuError(
            f"--impl stock on {device}",
            "a GPU: FLA's operator is made of Triton kernels",
            "run it on a GPU; tests/cpu/test_recipe_dflash.py shows what happens on a fake one",
        )
    return stock_kernel()


def stock_kernel() -> Backend:
    """FLA's public `chunk_gated_delta_rule`, called as any trainer calls it."""
    import fla
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    one_head_count = Version(fla.__version__) < Version("0.5")

    def rule(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float,
        segments: PackedSegments | None,
    ) -> torch.Tensor:
        if one_head_count:
            q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
        offsets = None if segments is None else segments.offsets.long()
        out: torch.Tensor = chunk_gated_delta_rule(q, k, v, g, beta, scale=scale, cu_seqlens=offsets)[0]
        return out

    return Backend("stock", fla.__version__, rule)


class _Gdn(nn.Module):
    def __init__(self, sizes: TargetSizes, kernel: Backend) -> None:
        super().__init__()
        layout = self.layout = sizes.gdn
        self.kernel = kernel
        self.proj = nn.Linear(sizes.hidden, layout.proj_dim, bias=False)
        self.out = nn.Linear(layout.value_width, sizes.hidden, bias=False)
        self.conv = nn.Parameter(torch.randn(layout.conv_dim, 4) * 0.5)
        self.A_log = nn.Parameter(torch.empty(layout.value_heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.full((layout.value_heads,), -3.0))
        self.norm = nn.Parameter(torch.ones(layout.value_dim))

    def forward(self, x: torch.Tensor, segments: PackedSegments) -> torch.Tensor:
        mixed = mixer(
            self.proj(x)[:, None],
            layout=self.layout,
            conv_weight=self.conv,
            conv_bias=None,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            norm_weight=self.norm,
            norm_eps=1e-6,
            segments=segments,
            kernel=self.kernel,
        )
        out: torch.Tensor = self.out(mixed[:, 0])
        return out


class _Attention(nn.Module):
    def __init__(self, sizes: TargetSizes) -> None:
        super().__init__()
        self.heads = sizes.attention_heads
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden, bias=False)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor, segments: PackedSegments) -> torch.Tensor:
        rows = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(0, 2)  # [heads, 3, T, D]
        bounds = segments.offsets_host
        outs = []
        for start, end in pairwise(bounds):
            q, k, v = rows[:, :, start:end].unbind(1)
            outs.append(F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0])
        out: torch.Tensor = self.out(torch.cat(outs, 1).transpose(0, 1).flatten(1))
        return out


class _Layer(nn.Module):
    def __init__(self, sizes: TargetSizes, mix: nn.Module) -> None:
        super().__init__()
        self.mix = mix
        self.up = nn.Linear(sizes.hidden, 2 * sizes.hidden, bias=False)
        self.down = nn.Linear(2 * sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor, segments: PackedSegments) -> torch.Tensor:
        x = x + self.mix(F.rms_norm(x, x.shape[-1:]), segments)
        out: torch.Tensor = x + self.down(F.silu(self.up(F.rms_norm(x, x.shape[-1:]))))
        return out


class Target(nn.Module):
    """A random, frozen target model on one device.

    Args:
        sizes: of its layers.
        kernel: the gated delta rule.
        device, dtype: of parameters and activations; the gates' parameters are float32.
        seed: of the parameters.
        section: entered around every forward pass (`Runtime.section`): no file operation may happen within.
    """

    def __init__(
        self,
        sizes: TargetSizes,
        kernel: Backend,
        device: torch.device,
        dtype: torch.dtype,
        *,
        seed: int = 0,
        section: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.section = section
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
            mixers = [_Attention(sizes) if i % 4 == 3 else _Gdn(sizes, kernel) for i in range(sizes.layers)]
            self.layers = nn.ModuleList(_Layer(sizes, mix) for mix in mixers)
        self.to(device, dtype)
        for mix in mixers:
            if isinstance(mix, _Gdn):
                mix.A_log.data, mix.dt_bias.data = mix.A_log.float(), mix.dt_bias.float()
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, segments: PackedSegments) -> torch.Tensor:
        """Features `[T, features]` of packed tokens `[T]`; no segment sees another."""
        with self.section():
            x = self.embedding(tokens)
            taken = []
            for i, layer in enumerate(self.layers):
                x = layer(x, segments)
                if i in self.sizes.taps:
                    taken.append(F.rms_norm(x, x.shape[-1:]))
            return torch.cat(taken, -1)
