"""FlashQLA's kernels behind our interface: right, without waiting for the GPU, and compiled before the freeze."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fla_safe.gdn.chunk import flash_qla
from fla_safe.gdn.layout import ProjectionLayout

LAYOUT = ProjectionLayout("interleaved", 2, 4, 128, 128)


def _reason() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA GPU: compiled kernels"
    return flash_qla.unsupported_reason(torch.device("cuda"), LAYOUT, torch.bfloat16)


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_reason() is not None, reason=str(_reason()))]


def variant(dtype: torch.dtype = torch.bfloat16) -> Any:
    from fla_safe.gdn.backends import resolve
    from fla_safe.gdn.variant import MixerVariant

    backend = resolve("flash_qla", "cuda", layout=LAYOUT, dtype=dtype)
    return MixerVariant(LAYOUT, backend, dtype, 4, False, (dtype, torch.float32, torch.float32, dtype), 1e-6)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    found: list[str] = []
    end = flash_qla.watch_compilations(found.append)
    yield found
    end()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "batch of 2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_its_kernels_pass_the_golden_check(dtype: torch.dtype, packed: bool) -> None:
    from fla_safe.gdn.steady.golden import GoldenCheck

    verdict = GoldenCheck(variant(dtype), "cuda", packed=packed, batch=2)()
    print("; ".join(f"{name} {error:.1e} of {verdict.limits[name]:.1e}" for name, error in verdict.errors.items()))
    assert verdict, verdict.failure


def test_after_a_rehearsal_nothing_is_compiled_and_nothing_waits(compiled: list[str]) -> None:
    from fla_safe.gdn.steady.rehearsal import Rows, packed_row, rehearse

    mixer = variant()
    rehearse(mixer, Rows(2048, 1, True), "cuda")
    before = len(compiled)
    rows = [(count, packed_row(2048 - 8 * count, count, "cuda")) for count in (1, 2, 5, 11, 12, 23, 24, 60, 200)]
    torch.cuda.synchronize()
    for _, segments in rows:
        leaves = mixer.draw(segments.total, 1, "cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            mixer(leaves, segments).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(compiled) == before


def test_states_kept_under_recomputation_give_the_same_gradients() -> None:
    from torch.utils.checkpoint import checkpoint

    from fla_safe.gdn.steady.rehearsal import packed_row

    mixer, segments = variant(), packed_row(700, 7, "cuda")

    def gradients(recompute: bool) -> list[torch.Tensor]:
        leaves: Any = mixer.draw(700, 1, "cuda")
        proj = leaves.pop("proj")

        def run(x: torch.Tensor) -> torch.Tensor:
            return mixer({"proj": x, **leaves}, segments)

        out: Any = checkpoint(run, proj, use_reentrant=True) if recompute else run(proj)
        out.float().square().sum().backward()
        return [proj.grad, *(leaf.grad for leaf in leaves.values() if leaf is not None)]

    for plain, again in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(plain, again, rtol=2e-2, atol=2e-2 * float(plain.abs().max()))
