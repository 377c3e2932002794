"""Where q, k, v, z, b and a lie in the input projection's output, and in the convolution's channels."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from fla_safe.errors import FlaSafeError

__all__ = ["LayoutError", "ProjectionLayout", "Section", "Sections"]


class LayoutError(FlaSafeError, ValueError):
    """Head counts or dimensions that no gated delta net has, or a projection of the wrong width."""


class Section(NamedTuple):
    """Where one part lies: value head `i * r + j` of key head `i` at `start + i * group_stride + j * head_stride`.

    Parts that exist once a key head (q, k) have `j = 0` only. Units are elements of the last dimension.
    """

    start: int
    group_stride: int
    head_stride: int
    width: int


class Sections(NamedTuple):
    """Parts of a projection: convolution input, output gate, and the two gate features of a value head.

    Shapes: `qkv [..., conv_dim]`, `z [..., HV, V]`, `b [..., HV]`, `a [..., HV]`.
    """

    qkv: torch.Tensor
    z: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor


@dataclass(frozen=True, slots=True)
class ProjectionLayout:
    """Layout of one rank's input projection; heads are those of the rank.

    Attributes:
        kind: "interleaved" is mcore-bridge's and Hugging Face's: for every key head `[q k v*r z*r b*r a*r]` with
            r = value_heads / key_heads, convolution channels `[q k v*r]` for every key head. "sectioned" is
            megatron-core's: `[q | k | v | z | b | a]`, convolution channels `[q | k | v]`.
        key_heads: H.
        value_heads: HV, a multiple of H.
        key_dim: K, of queries too.
        value_dim: V.
    """

    kind: Literal["interleaved", "sectioned"]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        if self.kind not in ("interleaved", "sectioned"):
            raise LayoutError(f"layout kind {self.kind!r}", "'interleaved' or 'sectioned'", "name one of the two")
        if min(self.key_heads, self.value_heads, self.key_dim, self.value_dim) < 1 or self.value_heads % self.key_heads:
            raise LayoutError(
                f"{self.key_heads} key heads of {self.key_dim}, {self.value_heads} value heads of {self.value_dim}",
                "positive numbers, value heads a multiple of key heads",
                "check linear_num_key_heads and linear_num_value_heads against the tensor parallel size",
            )

    @property
    def group(self) -> int:
        """Value heads of one key head, r."""
        return self.value_heads // self.key_heads

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution."""
        return self.key_heads * (2 * self.key_dim + self.group * self.value_dim)

    @property
    def value_width(self) -> int:
        """Width of the mixer's output, HV * V."""
        return self.value_heads * self.value_dim

    @property
    def proj_dim(self) -> int:
        """Width of the projection."""
        return self.conv_dim + self.value_width + 2 * self.value_heads

    @property
    def proj_sections(self) -> dict[str, Section]:
        """Where q, k, v, z, b and a begin in a projection row, for kernels that read it in place."""
        return self._sections("qkvzba")

    @property
    def conv_sections(self) -> dict[str, Section]:
        """Where q, k and v begin among the convolution's channels."""
        return self._sections("qkv")

    def _sections(self, names: str) -> dict[str, Section]:
        H, r, K, V = self.key_heads, self.group, self.key_dim, self.value_dim
        widths = {"q": (1, K), "k": (1, K), "v": (r, V), "z": (r, V), "b": (r, 1), "a": (r, 1)}
        per_group = sum(count * width for count, width in (widths[name] for name in names))
        sections, start = {}, 0
        for name in names:
            count, width = widths[name]
            if self.kind == "interleaved":
                sections[name] = Section(start, per_group, width, width)
                start += count * width
            else:
                sections[name] = Section(start, count * width, width, width)
                start += H * count * width
        return sections

    def split(self, proj: torch.Tensor) -> Sections:
        """The parts of a projection `[..., proj_dim]`: views where strides allow it (always in "sectioned")."""
        if proj.shape[-1] != self.proj_dim:
            raise LayoutError(
                f"a projection of width {proj.shape[-1]}", f"{self.proj_dim} for {self}", "check the layout"
            )
        H, r, K, V = self.key_heads, self.group, self.key_dim, self.value_dim
        if self.kind == "interleaved":
            proj = proj.unflatten(-1, (H, -1))
            qkv, z, b, a = proj.split([2 * K + r * V, r * V, r, r], dim=-1)
            qkv, z, b, a = qkv.flatten(-2), z.flatten(-2), b.flatten(-2), a.flatten(-2)
        else:
            qkv, z, b, a = proj.split([self.conv_dim, H * r * V, H * r, H * r], dim=-1)
        return Sections(qkv, z.unflatten(-1, (H * r, V)), b, a)

    def split_conv(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`q [..., H, K]`, `k [..., H, K]`, `v [..., HV, V]` of the convolution's output `[..., conv_dim]`."""
        H, r, K, V = self.key_heads, self.group, self.key_dim, self.value_dim
        if self.kind == "interleaved":
            q, k, v = qkv.unflatten(-1, (H, -1)).split([K, K, r * V], dim=-1)
            return q, k, v.flatten(-2).unflatten(-1, (H * r, V))
        q, k, v = qkv.split([H * K, H * K, H * r * V], dim=-1)
        return q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (H * r, V))
