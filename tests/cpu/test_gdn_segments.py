"""Offsets: what is accepted, what is refused by name, and when prepared segments still hold."""

import itertools
import pickle

import pytest
import torch
from gdn_cases import PACKS, pack, segments_of
from hypothesis import given
from hypothesis import strategies as st

from fla_safe.gdn.segments import OffsetsError, PackedSegments, zero_tail


@pytest.mark.parametrize("name", PACKS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_offsets_are_canonical_and_cover_every_row_once(name: str, dtype: torch.dtype) -> None:
    cu_seqlens, total = pack(name)
    segments = PackedSegments.prepare(cu_seqlens.to(dtype), total)
    offsets = list(segments.offsets_host)
    assert segments.offsets.tolist() == offsets
    assert segments.offsets.dtype == torch.int32
    assert offsets[0] == 0
    assert offsets[-1] == total
    assert all(a < b for a, b in itertools.pairwise(offsets)), "an empty segment survived"
    assert segments.used == cu_seqlens[-1]
    assert {*cu_seqlens.tolist(), total} == {*offsets}


@given(st.lists(st.integers(0, 200), min_size=1, max_size=40), st.integers(0, 3), st.sampled_from([16, 64, 128]))
def test_chunk_indices_name_every_chunk_of_every_segment(lengths: list[int], tail: int, size: int) -> None:
    total = sum(lengths) + tail
    if total == 0:
        return
    segments = PackedSegments.prepare(torch.tensor([0, *lengths]).cumsum(0), total, chunk_sizes=(64, size, size))
    kept = [length for length in [*lengths, tail] if length]
    expected = [[i, j] for i, length in enumerate(kept) for j in range(-(-length // size))]
    chunks = segments.chunks(size)
    assert chunks.indices.tolist() == expected
    assert chunks.offsets.tolist() == [sum(i < n for i, _ in expected) for n in range(len(kept) + 1)]
    assert chunks.indices.is_contiguous()
    for tensor in (segments.offsets, chunks.indices, chunks.offsets, segments.chunk_indices):
        assert tensor.data_ptr() % 16 == 0


BAD = {
    "starts-at-one": ([1, 5], "starts at 1"),
    "decreases": ([0, 5, 3, 8], "decreases from 5 to 3"),
    "negative": ([0, -1, 8], "decreases from 0 to -1"),
    "exceeds": ([0, 4, 9], "ends at 9"),
    "one-offset": ([0], "shape (1,)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_named(name: str) -> None:
    values, seen = BAD[name]
    with pytest.raises(OffsetsError) as error:
        PackedSegments.prepare(torch.tensor(values, dtype=torch.int32), 8)
    assert seen in error.value.seen
    assert error.value.expected
    assert error.value.remedy
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool, torch.uint8], ids=str)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(OffsetsError, match="dtype"):
        PackedSegments.prepare(torch.tensor([0, 1], dtype=dtype), 8)


def test_wrong_device_batch_and_rank_are_refused() -> None:
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(OffsetsError, match="on cpu"):
        PackedSegments.prepare(offsets, 8, device="meta")
    with pytest.raises(OffsetsError, match="batch of 2"):
        PackedSegments.prepare(offsets, 8, batch=2)
    with pytest.raises(OffsetsError, match="1-D"):
        PackedSegments.prepare(offsets[None], 8)
    with pytest.raises(OffsetsError, match="packed row of 0 rows"):
        PackedSegments.prepare(torch.zeros(2, dtype=torch.int32), 0)
    with pytest.raises(OffsetsError, match="list"):
        PackedSegments.prepare([0, 8], 8)  # type: ignore[arg-type]


def test_unprepared_chunk_size_is_refused() -> None:
    with pytest.raises(OffsetsError, match="chunk size 32 was not prepared"):
        segments_of([3]).chunks(32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_overwriting_the_callers_buffer_does_not_reach_prepared_segments(dtype: torch.dtype) -> None:
    buffer = torch.tensor([0, 3, 8], dtype=dtype)
    segments = PackedSegments.prepare(buffer, 8)
    assert segments.matches(buffer, 8)
    buffer[1] = 5
    assert segments.offsets.tolist() == [0, 3, 8]
    assert not segments.matches(buffer, 8)
    assert PackedSegments.prepare(buffer, 8).offsets.tolist() == [0, 5, 8]


def test_on_the_cpu_contents_decide() -> None:
    segments = segments_of([3, 5])
    assert segments.matches(torch.tensor([0, 3, 8], dtype=torch.int32), 8)
    assert not segments.matches(torch.tensor([0, 3, 8], dtype=torch.int32), 9)
    assert not segments.matches(torch.tensor([0, 3, 7, 8], dtype=torch.int32), 8)


def test_elsewhere_identity_and_version_decide_without_reading_the_device() -> None:
    # A meta tensor has no data: a comparison of contents would fail, as a read of device memory would synchronise.
    buffer = torch.zeros(3, dtype=torch.int32, device="meta")
    host = segments_of([3, 5])
    segments = PackedSegments(buffer, host.offsets_host, 8, 8, buffer, {}, buffer, buffer._version, host.offsets_host)
    assert segments.matches(buffer, 8)
    assert not segments.matches(buffer.clone(), 8)
    assert not segments.matches(buffer, 9)
    buffer.add_(1)
    assert not segments.matches(buffer, 8)


def test_inference_tensors_never_match_by_version() -> None:
    with torch.inference_mode():
        buffer = torch.zeros(3, dtype=torch.int32, device="meta")
    host = segments_of([3, 5])
    segments = PackedSegments(buffer, host.offsets_host, 8, 8, buffer, {}, buffer, None, host.offsets_host)
    assert not segments.matches(buffer, 8)
    with torch.inference_mode():
        assert PackedSegments.prepare(torch.tensor([0, 8]), 8).used == 8


def test_zero_tail_stops_values_and_gradients() -> None:
    x = torch.full((1, 5, 2), float("nan")).index_fill(1, torch.arange(3), 2.0).requires_grad_()
    out = zero_tail(x, segments_of([3], tail=2), 1)
    out.backward(torch.full_like(out, float("nan")).index_fill(1, torch.arange(3), 7.0))
    assert out.tolist() == [[[2.0, 2.0]] * 3 + [[0.0, 0.0]] * 2]
    assert x.grad is not None
    assert x.grad.tolist() == [[[7.0, 7.0]] * 3 + [[0.0, 0.0]] * 2]
    assert zero_tail(x, segments_of([5]), 1) is x
