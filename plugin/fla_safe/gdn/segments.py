"""Packed rows: offsets checked, copied and turned into chunk indices once per micro-batch, for all layers."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
import torch

from fla_safe.errors import FlaSafeError

__all__ = ["CHUNK_SIZE", "NO_SEGMENT", "ChunkIndex", "OffsetsError", "PackedSegments", "zero_tail"]

CHUNK_SIZE: Final = 64
"""Rows of one chunk in FLA's gated delta rule kernels."""

NO_SEGMENT: Final = 2**31 - 1
"""Segment start of a row that belongs to nobody: no row comes at or after it."""

_ALIGN = 4  # int32 elements in 16 bytes, the alignment that Triton specialises pointers on
_REMEDY = (
    "pass packed_seq_params.cu_seqlens_q as the collator built it: 0 first, never decreasing, at most the rows held"
)


class OffsetsError(FlaSafeError, ValueError):
    """`cu_seqlens` does not describe segments of one packed row."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkIndex:
    """The chunks of all segments for one chunk size, on the device.

    Attributes:
        indices: `[NT, 2]` int32, (segment, chunk within the segment) of every chunk, segments in order.
        offsets: `[N + 1]` int32, the number of chunks before each segment.
    """

    indices: torch.Tensor
    offsets: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedSegments:
    """Segments of one packed row of `total` rows. Make it with `prepare`; it owns copies of all it needs.

    Empty segments are dropped: kernels start one program a segment and FLA reads out of bounds for an empty one
    (fla-org/flash-linear-attention#103). Rows from the caller's last offset to `total` form a last segment, the tail,
    so that every row belongs to exactly one segment; `used` says where the tail begins, and whoever computes with
    these segments returns zeros and zero gradients from there on (`zero_tail`).

    Attributes:
        offsets: `[N + 1]` int32 on the device, 16-byte aligned, from 0 to `total`, strictly increasing.
        offsets_host: the same numbers.
        total: rows of the packed row.
        used: rows that the caller's offsets cover.
        row_starts: `[T]` int32 on the device, the first row of each row's segment; `NO_SEGMENT` for rows of the tail.
    """

    offsets: torch.Tensor
    offsets_host: tuple[int, ...]
    total: int
    used: int
    row_starts: torch.Tensor = field(repr=False)
    _chunks: Mapping[int, ChunkIndex] = field(repr=False)
    _source: torch.Tensor = field(repr=False)
    _source_version: int | None = field(repr=False)
    _source_host: tuple[int, ...] = field(repr=False)

    @classmethod
    def prepare(
        cls,
        cu_seqlens: torch.Tensor,
        total: int,
        *,
        device: torch.device | str | None = None,
        batch: int = 1,
        chunk_sizes: Sequence[int] = (CHUNK_SIZE,),
    ) -> "PackedSegments":
        """Validate offsets and build everything that kernels read from them.

        One device-to-host copy (a synchronisation on CUDA) and one asynchronous copy back.

        Args:
            cu_seqlens: `[N + 1]` int32 or int64 offsets of N >= 1 segments, empty ones allowed.
            total: rows T of the packed row; more than the last offset leaves a tail.
            device: where the activations are; offsets elsewhere are an error. Default: where the offsets are.
            batch: batch size of the activations; a packed row has 1.
            chunk_sizes: chunk sizes to prepare indices for.

        Raises:
            OffsetsError: wrong rank, dtype or device, batch > 1, offsets that do not start at 0, decrease or exceed T.
        """
        _check_tensor(cu_seqlens, total, device, batch)
        version = _version(cu_seqlens)
        given = tuple(cu_seqlens.tolist())
        _check_values(given, total)

        bounds = [0]
        for end in (*given[1:], total):
            if end > bounds[-1]:
                bounds.append(end)
        row_starts = np.repeat(np.asarray(bounds[:-1], dtype=np.int32), np.diff(bounds))
        row_starts[given[-1] :] = NO_SEGMENT
        parts = [np.asarray(bounds, dtype=np.int32), row_starts]
        sizes = tuple(dict.fromkeys(chunk_sizes))
        for size in sizes:
            parts += _chunk_parts(np.diff(parts[0]), size)
        offsets, starts, *rest = _upload(parts, cu_seqlens.device)
        chunks = {size: ChunkIndex(rest[2 * i].view(-1, 2), rest[2 * i + 1]) for i, size in enumerate(sizes)}
        return cls(offsets, tuple(bounds), total, given[-1], starts, chunks, cu_seqlens, version, given)

    @property
    def device(self) -> torch.device:
        """Where the offsets are."""
        return self.offsets.device

    @property
    def chunk_indices(self) -> torch.Tensor:
        """`[NT, 2]` int32 chunk indices for FLA's chunk size, 64."""
        return self.chunks(CHUNK_SIZE).indices

    def chunks(self, chunk_size: int) -> ChunkIndex:
        """The chunks of one size; the size must have been named to `prepare`, so that no call here can copy or sync."""
        try:
            return self._chunks[chunk_size]
        except KeyError:
            raise OffsetsError(
                f"chunk size {chunk_size} was not prepared",
                f"one of {sorted(self._chunks)}",
                "name the size in PackedSegments.prepare(..., chunk_sizes=...)",
            ) from None

    def matches(self, cu_seqlens: torch.Tensor, total: int) -> bool:
        """Whether these segments still describe `cu_seqlens`; never synchronises.

        On the CPU the contents are compared. Elsewhere the same tensor object with an unchanged version counter is
        required: an in-place write by PyTorch is noticed, one behind its back (`.data`, a raw kernel) is not.
        """
        if total != self.total:
            return False
        if cu_seqlens.device.type == "cpu":
            return cu_seqlens.device == self.device and tuple(cu_seqlens.tolist()) == self._source_host
        if cu_seqlens is not self._source or self._source_version is None:
            return False
        return _version(cu_seqlens) == self._source_version

    @property
    def caller_offsets(self) -> tuple[int, ...]:
        """The offsets that `prepare` was given, empty segments and all."""
        return self._source_host

    def locate(self, row: int) -> tuple[int, int, int] | None:
        """The caller's segment that holds a row: its index, first row and end. None for a row of the tail."""
        if row >= self.used:
            return None
        index = bisect_right(self._source_host, row) - 1
        return index, self._source_host[index], self._source_host[index + 1]

    def __len__(self) -> int:
        """Number of segments, the tail included."""
        return len(self.offsets_host) - 1


def zero_tail(x: torch.Tensor, segments: PackedSegments | None, dim: int) -> torch.Tensor:
    """`x` with zeros in the rows beyond the last offset; its gradient is zero there too, whatever the rows hold.

    Args:
        x: a tensor whose dimension `dim` is the packed row.
        segments: nothing is copied when it is None or has no tail.
        dim: the row dimension.
    """
    if segments is None or segments.used == segments.total:
        return x
    shape = list(x.shape)
    shape[dim] = segments.total - segments.used
    return torch.cat([x.narrow(dim, 0, segments.used), x.new_zeros(shape)], dim)


def _check_tensor(cu_seqlens: torch.Tensor, total: int, device: torch.device | str | None, batch: int) -> None:
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        seen = f"cu_seqlens of shape {tuple(getattr(cu_seqlens, 'shape', ())) or type(cu_seqlens).__name__}"
        raise OffsetsError(seen, "a 1-D tensor of N + 1 offsets, N >= 1", _REMEDY)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise OffsetsError(f"cu_seqlens of dtype {cu_seqlens.dtype}", "int32 or int64", "convert with .to(torch.int32)")
    if device is not None and not _same_device(cu_seqlens.device, torch.device(device)):
        raise OffsetsError(
            f"cu_seqlens on {cu_seqlens.device}", f"the device of the activations, {device}", "move the offsets there"
        )
    if batch != 1:
        raise OffsetsError(
            f"cu_seqlens with a batch of {batch}",
            "a batch of 1: one packed row holds all samples",
            "turn packing off, or concatenate the samples into one row as ms-swift's collator does",
        )
    if not 1 <= total < 2**31:
        raise OffsetsError(
            f"a packed row of {total} rows", "1 to 2**31 - 1 rows", "check the activations' row dimension"
        )


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (b.index is None or a.index == b.index)


def _check_values(given: tuple[int, ...], total: int) -> None:
    if given[0] != 0:
        raise OffsetsError(f"cu_seqlens starts at {given[0]}", "0 first", _REMEDY)
    for i, (start, end) in enumerate(pairwise(given)):
        if end < start:
            raise OffsetsError(
                f"cu_seqlens decreases from {start} to {end} at position {i + 1}",
                "offsets that never decrease",
                _REMEDY,
            )
    if given[-1] > total:
        raise OffsetsError(f"cu_seqlens ends at {given[-1]}", f"at most the {total} rows held", _REMEDY)


def _version(tensor: torch.Tensor) -> int | None:
    # Inference tensors keep no version counter, so nothing could be noticed.
    return None if tensor.is_inference() else tensor._version


def _chunk_parts(lengths: np.ndarray, chunk_size: int) -> list[np.ndarray]:
    counts = -(-lengths // chunk_size)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    segment = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    within = np.arange(offsets[-1], dtype=np.int32) - offsets[segment]
    return [np.stack([segment, within], axis=1).ravel(), offsets]


def _upload(parts: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy int32 arrays to the device in one transfer, each 16-byte aligned in the common buffer."""
    starts = np.cumsum([0] + [-(-len(part) // _ALIGN) * _ALIGN for part in parts])
    host = torch.zeros(int(starts[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    for start, part in zip(starts, parts, strict=False):
        host[int(start) : int(start) + len(part)] = torch.from_numpy(part)
    # The caching host allocator keeps a pinned block until the copies that read it are done.
    buffer = host.to(device, non_blocking=True)
    return [buffer[int(start) : int(start) + len(part)] for start, part in zip(starts, parts, strict=False)]
