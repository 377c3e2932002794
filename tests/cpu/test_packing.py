"""Segments are prepared once per micro-batch and follow their offsets."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fla_safe.gdn.segments import OffsetsError, PackedSegments

pytest.importorskip("megatron.core", reason="the megatron floor needs megatron-core")

from fla_safe.megatron import packing
from fla_safe.megatron.packing import packing_for, prepare_before_forward

CPU = torch.device("cpu")


def pack(*offsets: int, **fields: Any) -> SimpleNamespace:
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    return SimpleNamespace(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, **fields)


@pytest.fixture
def preparations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one at each preparation."""
    seen: list[int] = []
    original = PackedSegments.prepare.__func__  # type: ignore[attr-defined]

    def counted(cls: type, *args: Any, **kwargs: Any) -> PackedSegments:
        seen.append(1)
        return original(cls, *args, **kwargs)

    monkeypatch.setattr(PackedSegments, "prepare", classmethod(counted))
    return seen


def test_layers_and_recomputation_share_one_preparation(preparations: list[int]) -> None:
    params = pack(0, 5, 9)
    first = packing_for(params, total=9, batch=1, device=CPU)
    assert all(packing_for(params, total=9, batch=1, device=CPU) is first for _ in range(5))
    assert len(preparations) == 1


def test_the_model_s_hook_prepares_before_the_first_layer(preparations: list[int]) -> None:
    model = torch.nn.Module()
    model.config = SimpleNamespace(context_parallel_size=1)  # type: ignore[assignment]
    model.forward = lambda packed_seq_params: len(preparations)  # type: ignore[assignment]
    prepare_before_forward(model)
    params = pack(0, 5, 9, total_tokens=9)
    assert model(packed_seq_params=params) == 1
    packing_for(params, total=9, batch=1, device=CPU)
    assert len(preparations) == 1


def test_offsets_overwritten_in_place_give_new_segments() -> None:
    params = pack(0, 5, 9)
    packing_for(params, total=9, batch=1, device=CPU)
    params.cu_seqlens_q[1] = 2
    segments = packing_for(params, total=9, batch=1, device=CPU).segments
    assert segments is not None
    assert segments.offsets_host == (0, 2, 9)


def test_padded_offsets_win_over_the_plain_ones() -> None:
    params = pack(0, 5, 9, cu_seqlens_q_padded=torch.tensor([0, 6, 12]), cu_seqlens_kv_padded=torch.tensor([0, 6, 12]))
    segments = packing_for(params, total=12, batch=1, device=CPU).segments
    assert segments is not None
    assert segments.offsets_host == (0, 6, 12)


def test_token_orders_of_unpacked_rows_are_shared_and_do_not_pile_up() -> None:
    first, again = (packing_for(None, total=8, batch=2, device=CPU, context_parallel_size=2) for _ in range(2))
    assert first is again
    for total in range(12, 400, 4):
        packing_for(None, total=total, batch=2, device=CPU, context_parallel_size=2)
    assert len(packing._UNPACKED) <= 16


def test_parameters_of_another_format_describe_no_pack() -> None:
    """Attention layers get lengths of a padded batch in the same class."""
    params = pack(0, 5, 9)
    params.qkv_format = "sbhd"
    assert packing_for(params, total=9, batch=2, device=CPU).segments is None
    assert packing_for(None, total=9, batch=2, device=CPU).segments is None


@pytest.mark.parametrize(
    ("params", "batch", "message"),
    [
        pytest.param(pack(0, 5, 9), 2, "batch of 2", id="batch"),
        pytest.param(pack(0, 5, 10), 1, "ends at 10", id="too long"),
        pytest.param(pack(0, 5, 4), 1, "decreases", id="decreasing"),
        pytest.param(pack(1, 5, 9), 1, "starts at 1", id="start"),
        pytest.param(SimpleNamespace(qkv_format="thd", cu_seqlens_q=None), 1, "without cu_seqlens_q", id="missing"),
        pytest.param(
            SimpleNamespace(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 9]), cu_seqlens_kv=torch.tensor([0, 8])),
            1,
            "differ",
            id="queries and keys",
        ),
    ],
)
def test_bad_packs_are_refused_by_name(params: SimpleNamespace, batch: int, message: str) -> None:
    with pytest.raises(OffsetsError, match=message):
        packing_for(params, total=9, batch=batch, device=CPU)
