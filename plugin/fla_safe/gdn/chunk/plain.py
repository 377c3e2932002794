"""The gated delta rule in plain torch: all chunks at once, then one step a chunk for all segments together.

Chunked form of "Gated Delta Networks" (Yang, Kautz, Hatamizadeh, 2024, arXiv:2412.06464): within a chunk of C rows the
product of Householder-like updates is written with the inverse of a unit lower triangular matrix (the WY form).
"""

from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from fla_safe.gdn import calls
from fla_safe.gdn.segments import CHUNK_SIZE, PackedSegments

__all__ = ["torch_chunk_gated_delta_rule"]


_CHUNKS: Final = (1, 16, CHUNK_SIZE)
"""Chunk sizes; a segment takes the first that holds it, so that hundreds of one-row segments cost no full chunks."""


class _Plan(NamedTuple):
    """How the segments of one chunk size are dealt to chunks, ordered by their place in the segment, longest first.

    Attributes:
        rows: `[NT * C]` row of every place in a chunk; places after a segment's end repeat row 0 and are masked.
        padding: `[NT * C]` bool, the masked places, or None.
        places, members: `[M]` the other places, and the rows they hold.
        active: number of chunks in each step; the segments of a step are the first of the step before.
        chunk: C.
    """

    rows: torch.Tensor
    padding: torch.Tensor | None
    places: torch.Tensor
    members: torch.Tensor
    active: tuple[int, ...]
    chunk: int


@lru_cache(maxsize=32)
def _plans(offsets: tuple[int, ...], device: torch.device) -> tuple[_Plan, ...]:
    """One plan for every chunk size in use; together they hold every row once."""
    starts, lengths = np.asarray(offsets[:-1]), np.diff(np.asarray(offsets))
    sizes = np.minimum(np.searchsorted(_CHUNKS, lengths), len(_CHUNKS) - 1)
    return tuple(_plan(starts[sizes == i], lengths[sizes == i], _CHUNKS[i], device) for i in np.unique(sizes))


def _plan(starts: np.ndarray, lengths: np.ndarray, chunk: int, device: torch.device) -> _Plan:
    order = np.argsort(-lengths, kind="stable")
    lengths, starts = lengths[order], starts[order]
    counts = -(-lengths // chunk)
    active = tuple(int((counts > step).sum()) for step in range(int(counts.max())))
    segment = np.concatenate([np.arange(n) for n in active])
    first = np.repeat(np.arange(len(active)), active) * chunk
    within = first[:, None] + np.arange(chunk)
    inside = within < lengths[segment][:, None]
    rows = np.where(inside, starts[segment][:, None] + within, 0)
    indices = (rows.ravel(), np.flatnonzero(inside), rows[inside])
    rows_at, places, members = (torch.from_numpy(index).to(device) for index in indices)
    padding = None if inside.all() else torch.from_numpy(~inside.ravel()).to(device)
    return _Plan(rows_at, padding, places, members, active, chunk)


def _deal(x: torch.Tensor, plan: _Plan, dtype: torch.dtype) -> torch.Tensor:
    """`[B, T, heads, ...]` to `[NT, heads, C, ...]`, zeros where a chunk is longer than its segment."""
    x = x.flatten(0, 1).index_select(0, plan.rows).to(dtype)
    if plan.padding is not None:
        x = x.masked_fill_(plan.padding.view(-1, *[1] * (x.dim() - 1)), 0)
    return x.unflatten(0, (-1, plan.chunk)).transpose(1, 2)


def _collect(x: torch.Tensor, plan: _Plan, out: torch.Tensor) -> None:
    """The inverse of `_deal`: writes the plan's rows of `out`, `[B, T, heads, ...]` and contiguous."""
    rows = x.transpose(1, 2).flatten(0, 1).index_select(0, plan.places)
    out.view(-1, *out.shape[2:]).index_copy_(0, plan.members, rows.to(out.dtype))


def _rule(dealt: list[torch.Tensor], scale: float, active: tuple[int, ...]) -> torch.Tensor:
    """q, k `[NT, H, C, K]`, v `[NT, HV, C, V]`, g, beta `[NT, HV, C]` of all segments to o `[NT, HV, C, V]`."""
    q, k, v, g, beta = dealt
    H, C, r = q.shape[1], q.shape[2], v.shape[1] // q.shape[1]
    q, k = q.unsqueeze(2), k.unsqueeze(2)  # one key head for its r value heads, never repeated
    v, beta = v.unflatten(1, (H, r)), beta.unflatten(1, (H, r)).unsqueeze(-1)
    G = g.unflatten(1, (H, r)).cumsum(-1)
    lower = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    # Masked before the exponential: above the diagonal it may overflow, and infinity has no usable gradient.
    decay = (G.unsqueeze(-1) - G.unsqueeze(-2)).masked_fill(~lower, -torch.inf).exp()
    scores = (q @ k.mT) * decay
    from_start, to_end = G.exp().unsqueeze(-1), (G[..., -1:] - G).exp().unsqueeze(-1)
    known = torch.cat([beta * v, beta * from_start * k], dim=-1)
    # `unitriangular` reads ones on the diagonal, so the matrix to invert is I + tril(beta k k^T decay, -1).
    solved = torch.linalg.solve_triangular(beta * (k @ k.mT) * decay, known, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    keys, whole = (k * to_end).mT, G[..., -1].exp()[..., None, None]

    state = q.new_zeros(active[0], H, r, k.shape[-1], v.shape[-1])
    states, updates = [], []
    steps = (x.split(list(active)) for x in (u, w, keys, whole))
    for count, u_s, w_s, keys_s, whole_s in zip(active, *steps, strict=True):
        state = state[:count]
        update = u_s - w_s @ state
        states.append(state)
        updates.append(update)
        state = whole_s * state + keys_s @ update
    out = (q * from_start) @ torch.cat(states) + scores @ torch.cat(updates)
    return (scale * out).flatten(1, 2)


class _TorchChunk(torch.autograd.Function):
    """Keeps only its inputs; the backward pass runs the forward pass again."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, scale, plans):  # type: ignore[no-untyped-def]
        calls.count_forward()
        ctx.save_for_backward(q, k, v, g, beta)
        ctx.scale, ctx.plans = scale, plans
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        for plan in plans:
            _collect(_rule([_deal(x, plan, dtype) for x in (q, k, v, g, beta)], scale, plan.active), plan, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        calls.count_backward()
        inputs = ctx.saved_tensors
        dtype = torch.promote_types(inputs[0].dtype, torch.float32)
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
        for plan in ctx.plans:
            dealt = [_deal(x, plan, dtype).requires_grad_() for x in inputs]
            with torch.enable_grad():
                out = _rule(dealt, ctx.scale, plan.active)
            for dx, x in zip(torch.autograd.grad(out, dealt, _deal(grad, plan, dtype)), grads, strict=True):
                _collect(dx, plan, x)
        return *grads, None, None


def torch_chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    segments: PackedSegments | None,
) -> torch.Tensor:
    """The gated delta rule on any device, in float32 or, for float64 inputs, float64; deterministic.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`, HV a multiple of H.
        g: `[B, T, HV]`, logarithm of the decay, <= 0.
        beta: `[B, T, HV]`.
        scale: factor of the queries.
        segments: of the packed row when B is 1, else None: every batch row is one segment.

    Returns:
        `[B, T, HV, V]` in the dtype of v.
    """
    batch, rows = q.shape[:2]
    offsets = segments.offsets_host if segments is not None else tuple(range(0, batch * rows + 1, rows))
    return _TorchChunk.apply(q, k, v, g, beta, scale, _plans(offsets, q.device))
