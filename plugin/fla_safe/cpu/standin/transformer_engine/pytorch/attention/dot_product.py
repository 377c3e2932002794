"""Softmax attention, packed or not, whole or split over a context-parallel group."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fla_safe.cpu import StandinError

from ..collectives import all_gather_rows

__all__ = ["DotProductAttention", "global_order"]


def global_order(offsets: list[int], cp_size: int) -> torch.Tensor:
    """Where each token of the whole row lies among the gathered rows of the context-parallel ranks.

    Each sequence is cut in 2 * cp_size equal parts; rank r holds parts r and 2 * cp_size - 1 - r of every sequence,
    so that causal work is balanced.

    Args:
        offsets: sequence boundaries in the whole row, N + 1 of them.
        cp_size: number of ranks.

    Returns:
        int64 `[offsets[-1]]`: index into the ranks' rows, concatenated in rank order.
    """
    local_rows = offsets[-1] // cp_size
    pieces = []
    for start, end in pairwise(offsets):
        if (end - start) % (2 * cp_size):
            raise StandinError(
                f"a sequence of {end - start} tokens under context parallelism {cp_size}",
                f"a length divisible by 2 * {cp_size}",
                "pad each sequence (ms-swift does so when context_parallel_size > 1)",
            )
        part = (end - start) // (2 * cp_size)
        for p in range(2 * cp_size):
            rank = min(p, 2 * cp_size - 1 - p)
            first = rank * local_rows + start // cp_size + (part if p >= cp_size else 0)
            pieces.append(torch.arange(first, first + part))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)


class DotProductAttention(torch.nn.Module):
    """Attention over `[S, B, H, D]` ('sbhd'), `[B, S, H, D]` ('bshd') or packed `[T, H, D]` ('thd').

    Represents: causal and unmasked attention, grouped queries, padding masks, packed sequences with or without padding
    between them, context parallelism in Megatron's balanced layout, dropout. Anything else raises StandinError.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: dist.ProcessGroup | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: dist.ProcessGroup | None = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        _refuse_window(window_size)
        if kwargs:
            raise StandinError(
                f"DotProductAttention({', '.join(kwargs)}) on the CPU stand-in",
                "plain softmax attention",
                "drop the flag",
            )
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.attention_dropout, self.get_rng_state_tracker = attention_dropout, get_rng_state_tracker
        self.softmax_scale, self.layer_number = softmax_scale, layer_number
        self.tp_group, self.tp_size = tp_group, tp_size
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Use these ranks from now on; None: no context parallelism."""
        self.cp_group, self.cp_global_ranks, self.cp_comm_type = cp_group, cp_global_ranks, cp_comm_type

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`[S, B, H * D]`, `[B, S, H * D]` or `[T, H * D]`; rows past the last offset are zero."""
        _refuse_window(window_size)
        asked = [name for name, value in kwargs.items() if value not in (None, False, "zigzag")]
        if core_attention_bias is not None or asked:
            raise StandinError(f"attention bias or {asked} on the CPU stand-in", "plain attention", "drop the flag")
        layout = qkv_format or self.qkv_format
        mask_type = attn_mask_type or self.attn_mask_type
        causal = "causal" in mask_type
        if layout == "thd":
            if cu_seqlens_q is None:
                raise ValueError("qkv_format 'thd' without cu_seqlens_q")
            lengths = cu_seqlens_q.diff().tolist()
            offsets = (cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded).tolist()
            return self._rows(query_layer, key_layer, value_layer, offsets, lengths, causal, None)
        if layout == "bshd":
            q, k, v = query_layer.transpose(0, 1), key_layer.transpose(0, 1), value_layer.transpose(0, 1)
            return self.forward(q, k, v, attention_mask, "sbhd", attn_mask_type=mask_type).transpose(0, 1)
        if layout != "sbhd":
            raise StandinError(f"qkv_format {layout!r} on the CPU stand-in", "sbhd, bshd or thd", "use one of these")
        hidden = attention_mask if ("padding" in mask_type or "arbitrary" in mask_type) else None
        length = query_layer.shape[0] * self._cp_size()
        out = []
        for b in range(query_layer.shape[1]):
            hide = None if hidden is None else hidden[b if hidden.shape[0] > 1 else 0, 0]
            q, k, v = query_layer[:, b], key_layer[:, b], value_layer[:, b]
            if self._cp_size() == 1 and key_layer.shape[0] != length:
                out.append(self._part(q, k, v, 0, causal, hide).flatten(1))
            else:
                out.append(self._rows(q, k, v, [0, length], [length], causal, hide))
        return torch.stack(out, dim=1)

    def _cp_size(self) -> int:
        return 1 if self.cp_group is None else dist.get_world_size(self.cp_group)

    def _rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        offsets: list[int],
        lengths: list[int],
        causal: bool,
        hidden: torch.Tensor | None,
    ) -> torch.Tensor:
        """One packed row `[T, H, D]`; `offsets` count the whole row, of which this rank may hold a part."""
        cp_size = self._cp_size()
        if cp_size > 1:
            order = global_order(offsets, cp_size)
            k, v = (all_gather_rows(t, self.cp_group)[order] for t in (k, v))
            rank = dist.get_rank(self.cp_group)
        out = []
        for start, end, length in zip(offsets, offsets[1:], lengths, strict=False):
            part = (end - start) // (2 * cp_size)
            spans = [(0, end - start)] if cp_size == 1 else [(p * part, part) for p in (rank, 2 * cp_size - 1 - rank)]
            local = start // cp_size
            for first, size in spans:
                real = min(size, max(0, length - first))
                if real:
                    stop = min(first + size, length) if causal else length
                    mine = q[local : local + real]
                    out.append(
                        self._part(mine, k[start : start + stop], v[start : start + stop], first, causal, hidden)
                    )
                if size > real:
                    out.append(q.new_zeros(size - real, q.shape[1], v.shape[2]))
                local += size
        done = sum(t.shape[0] for t in out)
        out.append(q.new_zeros(q.shape[0] - done, q.shape[1], v.shape[2]))
        return torch.cat(out).flatten(1)

    def _part(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, causal: bool, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """Queries `[Lq, H, D]` that stand at `first` of their sequence, over its keys `[Lk, Hk, D]`."""
        visible = None
        if causal and not (first == 0 and q.shape[0] == k.shape[0]):
            positions = first + torch.arange(q.shape[0])
            visible = torch.arange(k.shape[0])[None, :] <= positions[:, None]
        if hidden is not None:
            shown = (
                ~hidden[..., first : first + q.shape[0], : k.shape[0]]
                if hidden.shape[-2] > 1
                else ~hidden[..., : k.shape[0]]
            )
            if causal and visible is None:
                visible = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril()
            visible = shown if visible is None else visible & shown
        dropout = self.attention_dropout if self.training else 0.0
        tracked = dropout > 0 and self.get_rng_state_tracker is not None
        with self.get_rng_state_tracker().fork() if tracked and self.get_rng_state_tracker else nullcontext():
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                attn_mask=visible,
                dropout_p=dropout,
                is_causal=causal and visible is None,
                scale=self.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return out[0].transpose(0, 1)


def _refuse_window(window_size: tuple[int, int] | None) -> None:
    if window_size is not None and tuple(window_size) not in ((-1, -1), (-1, 0)):
        raise StandinError(f"window_size {window_size} on the CPU stand-in", "no window", "drop the sliding window")
