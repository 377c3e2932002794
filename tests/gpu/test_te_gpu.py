"""TransformerEngine's attention behind our interface: right on its own kernels, and without waiting for the GPU."""

from functools import cache
from typing import Any

import pytest
import torch

from fla_safe.gdn.chunk import te
from fla_safe.gdn.layout import ProjectionLayout

LAYOUT = ProjectionLayout("interleaved", 2, 4, 128, 128)


def _reason() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA GPU: compiled kernels"
    return te.unsupported_reason(torch.device("cuda"), torch.bfloat16)


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_reason() is not None, reason=str(_reason()))]


@cache
def _refusal(dtype: torch.dtype) -> str | None:
    return te.refusal(torch.device("cuda"), LAYOUT, dtype)


def variant(dtype: torch.dtype = torch.bfloat16) -> Any:
    from fla_safe.gdn.backends import Backend
    from fla_safe.gdn.variant import MixerVariant

    if (reason := _refusal(dtype)) is not None:
        pytest.skip(reason)
    backend = Backend("te", str(te.version()), te.te_gated_delta_rule)
    return MixerVariant(LAYOUT, backend, dtype, 4, False, (dtype, torch.float32, torch.float32, dtype), 1e-6)


def test_what_fails_at_a_call_is_refused_by_name() -> None:
    from fla_safe.gdn.backends import BackendError, resolve

    if (reason := _refusal(torch.bfloat16)) is None:
        assert resolve("te", "cuda", layout=LAYOUT, dtype=torch.bfloat16).name == "te"
        return
    print(reason)
    with pytest.raises(BackendError, match="its first call with"):
        resolve("te", "cuda", layout=LAYOUT, dtype=torch.bfloat16)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "batch of 2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_its_kernels_pass_the_golden_check(dtype: torch.dtype, packed: bool) -> None:
    from fla_safe.gdn.steady.golden import GoldenCheck

    verdict = GoldenCheck(variant(dtype), "cuda", packed=packed, batch=2)()
    print("; ".join(f"{name} {error:.1e} of {verdict.limits[name]:.1e}" for name, error in verdict.errors.items()))
    assert verdict, verdict.failure


@pytest.mark.parametrize("count", [1, 4, 60])
def test_long_rows_agree_with_plain_torch(count: int) -> None:
    """The golden check's rows are short; the frontend schedules, and may cut, long ones otherwise."""
    from fla_safe.gdn.backends import resolve
    from fla_safe.gdn.steady.rehearsal import packed_row

    mixer, segments = variant(), packed_row(8192, count, "cuda")
    results = []
    for kernel in (None, resolve("torch", "cuda")):
        leaves = mixer.draw(segments.total, 1, "cuda")
        given = [leaf for leaf in leaves.values() if leaf is not None]
        out = mixer(leaves, segments, kernel=kernel)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), given)])
    for ours, plain in zip(*results, strict=True):
        assert float((ours - plain).float().norm() / plain.float().norm()) < 2e-2


def test_after_a_rehearsal_nothing_waits() -> None:
    from fla_safe.gdn.steady.rehearsal import Rows, packed_row, rehearse

    mixer = variant()
    rehearse(mixer, Rows(2048, 1, True), "cuda")
    for count in (1, 2, 5, 12, 60):
        segments, leaves = packed_row(2048 - 8 * count, count, "cuda"), mixer.draw(2048 - 8 * count, 1, "cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            mixer(leaves, segments).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
