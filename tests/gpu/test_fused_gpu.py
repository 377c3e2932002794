"""The fused mixer on a GPU: near the float64 oracle, the same bits each time, no synchronisation, no recompilation."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: compiled Triton kernels"),
]

if torch.cuda.is_available():
    from fla_safe.gdn.backends import resolve
    from fla_safe.gdn.chunk import fla as fla_chunk
    from fla_safe.gdn.fused.inputs import mixer_in_forward
    from fla_safe.gdn.fused.inputs_grad import mixer_in_backward
    from fla_safe.gdn.fused.mixer import FusedMixer
    from fla_safe.gdn.fused.output import gate_backward, mixer_out_backward, mixer_out_forward
    from fla_safe.gdn.fused.sums import add_sums
    from fla_safe.gdn.layout import ProjectionLayout
    from fla_safe.gdn.segments import PackedSegments
    from fused_cases import TorchKernel, assert_close, both, parameters

SHARD = ("interleaved", 2, 4, 128, 128)


def packed(lengths: list[int], tail: int = 0) -> "PackedSegments":
    offsets = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    return PackedSegments.prepare(offsets, sum(lengths) + tail)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    "heads",
    [
        pytest.param(("interleaved", 2, 4, 128, 128), id="interleaved-r2"),
        pytest.param(("interleaved", 2, 6, 128, 128), id="interleaved-r3-rows-aligned-to-4-bytes"),
        pytest.param(("interleaved", 1, 4, 128, 128), id="interleaved-r4"),
        pytest.param(("sectioned", 4, 4, 64, 128), id="sectioned-r1-K<V"),
        pytest.param(("sectioned", 1, 2, 256, 48), id="sectioned-r2-K>V-no-power-of-two"),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 1.5e-2)], ids=["fp32", "bf16"]
)
def test_kernels_match_the_oracle(heads: tuple, dtype: torch.dtype, tolerance: float) -> None:
    segments = packed([1, 2, 3, 4, 63, 64, 65, 0, 700, 130], tail=9)
    ours, oracle = both(heads, segments.total, segments=segments, device="cuda", dtype=dtype)
    assert_close(ours, oracle, tolerance)
    assert not ours["out"][segments.used :].any()
    assert not ours["proj"][segments.used :].any()


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("rows", [1, 3, 63, 64, 65, 127, 128, 129, 400], ids=lambda rows: f"T={rows}")
def test_a_batch_without_packing_matches_the_oracle(rows: int) -> None:
    assert_close(*both(SHARD, rows, 2, device="cuda"))


@pytest.fixture
def tuned_in_threads() -> Iterator[None]:
    """FLA's many configs compile all at once, not one by one."""
    from fla_safe.runtime import RuntimeSettings, activate

    runtime = activate(RuntimeSettings(guard="off", agree=False, guarded=("fla", "fla_safe")))
    yield
    runtime.deactivate()


@pytest.mark.usefixtures("poisoned_memory", "tuned_in_threads")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("keep_inputs", [False, True], ids=["inputs-recomputed", "inputs-kept"])
def test_around_flas_kernels(dtype: torch.dtype, tolerance: float, keep_inputs: bool) -> None:
    segments = packed([63, 64, 1, 130, 200], tail=5)
    kernel = fla_chunk.load()
    ours, oracle = both(
        SHARD, segments.total, segments=segments, device="cuda", dtype=dtype, kernel=kernel, keep_inputs=keep_inputs
    )
    assert_close(ours, oracle, tolerance)


def draw_leaves(rows: int) -> dict[str, torch.Tensor]:
    layout = ProjectionLayout(*SHARD)
    draw = torch.Generator(device="cuda").manual_seed(0)
    leaves = {"proj": torch.randn(rows, 1, layout.proj_dim, generator=draw, device="cuda").bfloat16()}
    leaves |= {name: x.to("cuda", torch.bfloat16) for name, x in parameters(layout).items() if x is not None}
    return {name: x.requires_grad_() for name, x in leaves.items()}


def backward(
    leaves: dict[str, torch.Tensor], segments: "PackedSegments", mixer: Callable[..., torch.Tensor]
) -> list[torch.Tensor]:
    out = mixer(**leaves, layout=ProjectionLayout(*SHARD), norm_eps=1e-5, segments=segments)
    out.backward(torch.ones_like(out))  # reentrant checkpoints know no `torch.autograd.grad`
    return [out, *(leaf.grad for leaf in leaves.values())]


def run_backward(rows: int, segments: "PackedSegments", mixer: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    return backward(draw_leaves(rows), segments, mixer)


@pytest.mark.usefixtures("tuned_in_threads")
@pytest.mark.parametrize("keep_inputs", [False, True], ids=["inputs-recomputed", "inputs-kept"])
def test_the_same_bits_every_time(keep_inputs: bool) -> None:
    segments = packed([900, 1, 600, 333])
    mixer = FusedMixer(fla_chunk.load(), keep_inputs)
    first, *others = (run_backward(segments.total, segments, mixer) for _ in range(4))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.usefixtures("tuned_in_threads")
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_recomputation_gives_the_same_bits(reentrant: bool) -> None:
    segments = packed([900, 1, 600, 333])
    mixer = FusedMixer(fla_chunk.load())

    def recomputed(proj: torch.Tensor, **rest: Any) -> torch.Tensor:
        return checkpoint(lambda x: mixer(x, **rest), proj, use_reentrant=reentrant)

    plain, again = (run_backward(segments.total, segments, way) for way in (mixer, recomputed))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.usefixtures("tuned_in_threads")
def test_resolved_on_cuda_it_is_the_fused_one_and_never_waits_for_the_gpu() -> None:
    segments = packed([900, 600])
    mixer = resolve("fla", "cuda").mixer
    assert isinstance(mixer, FusedMixer)
    leaves = draw_leaves(1500)
    backward(leaves, segments, mixer)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        backward(leaves, segments, mixer)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    "launched",
    [
        pytest.param({"_GRAD_UNROLL": 4, "_GRAD_AHEAD": 2}, id="further-ahead"),
        pytest.param({"_IN_UNROLL": 1, "_GRAD_UNROLL": 1}, id="not-unrolled"),
    ],
)
def test_every_way_to_launch_matches_the_oracle(launched: dict[str, Any]) -> None:
    segments = packed([900, 1, 600, 333], tail=40)
    assert_close(*both(SHARD, segments.total, segments=segments, device="cuda", launched=launched))


def test_another_number_of_tokens_compiles_nothing() -> None:
    kernels = [mixer_in_forward, mixer_in_backward, mixer_out_forward, mixer_out_backward, gate_backward, add_sums]

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    mixer = FusedMixer(TorchKernel())
    run_backward(640, packed([640]), mixer)
    before = compiled()
    for lengths in ([1], [16], [17], [31, 2, 1000]):
        segments = packed(lengths)
        run_backward(segments.total, segments, mixer)
    assert compiled() == before
