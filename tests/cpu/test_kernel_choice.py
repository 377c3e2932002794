"""Which chunk kernel a shape runs on: the one that is faster on the slowest rank, and the same on all ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fla_safe.gdn import backends
from fla_safe.gdn.chunk import flash_qla
from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.steady import kernel_choice
from fla_safe.gdn.steady.rehearsal import Rows
from fla_safe.gdn.variant import MixerVariant

ROWS, DEVICE = Rows(4096, 1, True), torch.device("cpu")


def _variant(heads: int, kernel: str = "fla") -> MixerVariant:
    bf16 = torch.bfloat16
    backend = backends.Backend(kernel, "1", backends.torch_chunk_gated_delta_rule)
    layout = ProjectionLayout("interleaved", heads, 2 * heads, 128, 128)
    return MixerVariant(layout, backend, bf16, 4, False, (bf16, bf16, bf16, bf16), 1e-6)


def _choose(
    monkeypatch: pytest.MonkeyPatch, mine: dict[str, float], others: list[dict[str, Any]], *, unable: bool = False
) -> tuple[Any, Any, MixerVariant]:
    """What this rank chooses for one variant, with what it measures and what the other ranks say."""
    variant = _variant(2)
    rival = None if unable else replace(variant, backend=_variant(2, "flash_qla").backend)

    def measured(contender: MixerVariant, rows: Rows, device: torch.device) -> float:
        time = mine[contender.backend.name]
        if time < 0:
            raise torch.OutOfMemoryError("no room")
        return time

    monkeypatch.setattr(kernel_choice, "rival", lambda *_: rival)
    monkeypatch.setattr(kernel_choice, "milliseconds", measured)
    named = [{**rank, "timings": {str(variant): t for t in [rank["timings"]] if t}} for rank in others]
    stays = [{**rank, "stays": [str(variant)] * rank["stays"]} for rank in named]
    chosen, timings = kernel_choice.choose_kernels(
        [variant], ROWS, DEVICE, lambda value: [value, *stays], lambda text: None
    )
    return chosen, timings, variant


def test_the_faster_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, timings, variant = _choose(monkeypatch, {"fla": 2.0, "flash_qla": 1.0}, [])
    assert chosen[variant].name == "flash_qla"
    assert timings == {str(variant): {"fla": 2.0, "flash_qla": 1.0}}


def test_a_slower_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _choose(monkeypatch, {"fla": 1.0, "flash_qla": 2.0}, [])[0]


def test_the_slowest_rank_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faster here, but not where it matters: every rank waits for the slowest."""
    other = {"timings": {"fla": 2.5, "flash_qla": 4.0}, "stays": 0}
    chosen, timings, variant = _choose(monkeypatch, {"fla": 2.0, "flash_qla": 1.0}, [other])
    assert not chosen
    assert timings[str(variant)] == {"fla": 2.5, "flash_qla": 4.0}


def test_a_rank_that_cannot_keeps_flas_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _choose(monkeypatch, {"fla": 2.0, "flash_qla": 1.0}, [{"timings": {}, "stays": 1}])[0]


@pytest.mark.parametrize("unable", [False, True], ids=["out of memory at the job's rows", "not installed"])
def test_what_cannot_be_measured_here_stays(monkeypatch: pytest.MonkeyPatch, unable: bool) -> None:
    other = {"timings": {"fla": 2.0, "flash_qla": 1.0}, "stays": 0}
    assert not _choose(monkeypatch, {"fla": 2.0, "flash_qla": -1.0}, [other], unable=unable)[0]


def test_flash_qla_is_refused_by_reason_without_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    able, reason = backends.supports("flash_qla", "cuda")
    assert not able
    assert "not installed" in reason
    from packaging.version import Version

    monkeypatch.setattr(flash_qla, "_version", lambda: Version("0.1.2"))
    assert "outside 0.1.3" in str(backends.supports("flash_qla", "cuda")[1])
    monkeypatch.setattr(flash_qla, "_version", lambda: Version("0.1.3"))
    assert "need CUDA" in str(backends.supports("flash_qla", "cpu")[1])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    layout = ProjectionLayout("interleaved", 2, 4, 64, 64)
    for given, seen in (
        ({"dtype": torch.float32}, "not in float32"),
        ({"layout": layout}, "head dimensions of 128"),
    ):
        assert seen in backends.supports("flash_qla", "cuda", **given)[1]  # type: ignore[arg-type]
    assert backends.supports("flash_qla", "cuda", dtype=torch.bfloat16)[0]


@pytest.mark.parametrize("heads", [2, 4, 8, 16, 64, 128])
def test_rehearsed_segment_counts_reach_every_forward_kernel(heads: int) -> None:
    """FlashQLA 0.1.3 on Hopper splits the value dimension by how far segments x heads fill 70 % of the GPU."""

    def split(segments: int) -> int:
        target, grid = int(132 * 0.7), segments * heads
        return 1 if grid >= target else 2 if grid * 2 >= target else 4

    reached = {split(count) for count in flash_qla.segment_counts(heads, 132)}
    assert reached == {split(count) for count in range(1, 300)}
