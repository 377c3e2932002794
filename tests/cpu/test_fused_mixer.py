"""The fused mixer under Triton's interpreter, against the composed one in float64 with plain torch kernels."""

import os
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton decides when a kernel is defined; a process that already compiles kernels cannot change its mind."""

if INTERPRETED:
    from fla_safe.cpu import interpreter

    interpreter.activate()
    from fused_interpreter import quicken
    from gdn_cases import PACKS, mixer_parameters, pack

    from fla_safe.gdn import calls, fused_launch
    from fla_safe.gdn.backends import resolve
    from fla_safe.gdn.fused import FusedError, FusedMixer
    from fla_safe.gdn.layout import ProjectionLayout
    from fla_safe.gdn.mixer import composed_mixer
    from fla_safe.gdn.segments import PackedSegments
    from fla_safe.gdn.torch_chunk import torch_chunk_gated_delta_rule

    quicken()
else:
    PACKS = {}

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_under_the_interpreter starts")

SMALL = ("interleaved", 1, 2, 8, 8)


@pytest.mark.skipif(INTERPRETED, reason="this is the process with the interpreter")
def test_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


class TorchKernel:
    """The torch gated delta rule with the interface of a kernel outside autograd."""

    def forward(self, q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, segments: Any) -> tuple[Any, Any]:
        o = torch_chunk_gated_delta_rule(q, k, v, g, beta, scale, segments)
        return o.contiguous(), (q, k, v, g, beta)

    def backward(self, saved: Any, do: Any, scale: float, segments: Any, key_heads: int) -> tuple[Any, ...]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in saved]
            o = torch_chunk_gated_delta_rule(*leaves, scale, segments)
        return tuple(x.contiguous() for x in torch.autograd.grad(o, leaves, do))


def both(
    heads: tuple[str, int, int, int, int],
    rows: int,
    batch: int = 1,
    *,
    segments: Any = None,
    dtype: torch.dtype = torch.float32,
    window: int = 4,
    keep_inputs: bool = False,
    bias: bool = True,
    kernel: Any = None,
    tokens: int = 256,
    **options: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Output and gradients of the fused mixer, and of the composed one in float64, on the same random input.

    `tokens`: rows of a program; many make the interpreter fast, few give programs whose rows all lie in one segment.
    """
    layout = ProjectionLayout(*heads)
    draw = torch.Generator().manual_seed(rows)
    proj = torch.randn(rows, batch, layout.proj_dim, generator=draw, dtype=torch.float64).to(dtype)
    dout = torch.randn(rows, batch, layout.value_width, generator=draw, dtype=torch.float64).to(dtype)
    parameters = mixer_parameters(layout, dtype=dtype)
    parameters["conv_weight"] = parameters["conv_weight"].detach()[..., :window].contiguous()
    if not bias:
        parameters["conv_bias"] = None
    if segments is not None:
        proj[segments.used :] = float("nan")
        dout[segments.used :] = float("nan")
    results = []
    for wide in (False, True):
        leaves = {"proj": proj, **parameters}
        leaves = {
            name: x.detach().clone().to(torch.float64 if wide else dtype).requires_grad_()
            for name, x in leaves.items()
            if x is not None
        }
        arguments = {"conv_bias": None, **leaves, "layout": layout, "norm_eps": 1e-5, "segments": segments, **options}
        if wide:
            out = composed_mixer(kernel=resolve("torch", "cpu"), **arguments)
        else:
            with mock.patch.multiple(fused_launch, _IN_TOKENS=tokens, _GRAD_TOKENS=tokens):
                out = FusedMixer(kernel or TorchKernel(), keep_inputs)(**arguments)
        with mock.patch.multiple(fused_launch, _IN_TOKENS=tokens, _GRAD_TOKENS=tokens):
            grads = torch.autograd.grad(out, list(leaves.values()), dout.to(out.dtype))
        results.append({"out": out.detach(), **dict(zip(leaves, grads, strict=True))})
    return results[0], results[1]


def assert_close(ours: dict[str, torch.Tensor], oracle: dict[str, torch.Tensor], tolerance: float = 1e-4) -> None:
    for name, expected in oracle.items():
        assert ours[name].shape == expected.shape, name
        error = (ours[name].double() - expected).norm() / expected.norm().clamp(min=1e-3)
        assert error < tolerance, f"{name}: relative error {error:.2e}"


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", [n for n in PACKS if n not in ("hundreds-of-segments", "hundreds-of-pad-tokens")])
def test_packs_match_the_oracle(name: str) -> None:
    segments = PackedSegments.prepare(*pack(name))
    ours, oracle = both(SMALL, segments.total, segments=segments)
    assert_close(ours, oracle)
    assert not ours["out"][segments.used :].any()
    assert not ours["proj"][segments.used :].any()


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("rows", [1, 3, 63, 64, 65], ids=lambda rows: f"T={rows}")
def test_unpacked_rows_match_the_oracle(rows: int) -> None:
    assert_close(*both(SMALL, rows))


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("offsets", [None, [0, 105], [0, 1, 104]], ids=["unpacked", "one-segment", "two-and-a-tail"])
def test_programs_inside_a_segment_match_the_oracle(offsets: list[int] | None) -> None:
    segments = None if offsets is None else PackedSegments.prepare(torch.tensor(offsets), 105)
    assert_close(*both(SMALL, 105, segments=segments, tokens=32))


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
def test_the_launch_configuration_in_use_matches_the_oracle() -> None:
    segments = PackedSegments.prepare(torch.tensor([0, 129]), 131)
    assert_close(*both(SMALL, 131, segments=segments, tokens=fused_launch._GRAD_TOKENS))


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    "heads",
    [
        pytest.param(("interleaved", 2, 4, 8, 8), id="interleaved-r2"),
        pytest.param(("sectioned", 2, 4, 8, 8), id="sectioned-r2"),
        pytest.param(("sectioned", 1, 1, 8, 4), id="sectioned-r1-K>V"),
        pytest.param(("interleaved", 1, 3, 4, 12), id="interleaved-r3-K<V-no-power-of-two"),
        pytest.param(("interleaved", 1, 4, 6, 16), id="interleaved-r4"),
        pytest.param(("interleaved", 3, 3, 8, 8), id="three-heads-r1"),
    ],
)
def test_every_layout_and_batch_matches_the_oracle(heads: tuple[str, int, int, int, int]) -> None:
    assert_close(*both(heads, 37, batch=2, tokens=32))


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"window": 1}, id="window-1"),
        pytest.param({"window": 3, "bias": False}, id="window-3-no-bias"),
        pytest.param({"use_qk_l2norm": False}, id="no-l2norm"),
        pytest.param({"zero_centered_norm": True}, id="zero-centered"),
        pytest.param({"keep_inputs": True}, id="inputs-kept"),
    ],
)
def test_every_option_matches_the_oracle(options: dict[str, Any]) -> None:
    segments = PackedSegments.prepare(torch.tensor([0, 5, 7, 50, 51]), 52)
    assert_close(*both(SMALL, 52, segments=segments, **options))


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
def test_bfloat16_stays_within_rounding() -> None:
    segments = PackedSegments.prepare(torch.tensor([0, 30, 70]), 70)
    assert_close(*both(SMALL, 70, segments=segments, dtype=torch.bfloat16), tolerance=2e-2)


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
def test_a_segment_of_nans_does_not_reach_its_neighbours() -> None:
    segments = PackedSegments.prepare(torch.tensor([0, 70, 75, 140]), 140)
    layout = ProjectionLayout(*SMALL)
    parameters = mixer_parameters(layout, dtype=torch.float32)
    results = []
    for poison in (0.5, float("nan")):
        proj = torch.randn(140, 1, layout.proj_dim, generator=torch.Generator().manual_seed(0))
        proj[70:75] = poison
        proj.requires_grad_()
        mixer = FusedMixer(TorchKernel())
        out = mixer(proj, layout=layout, norm_eps=1e-5, segments=segments, **parameters)
        grad = torch.autograd.grad(out, proj, torch.ones_like(out))[0]
        results.append((out.detach(), grad))
    assert results[1][0][70:75].isnan().all()
    for (clean, dirty), part in (
        (pair, s) for pair in zip(*results, strict=True) for s in (slice(0, 70), slice(75, 140))
    ):
        assert torch.equal(clean[part], dirty[part])


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
def test_around_flas_kernels() -> None:
    from fla_safe.gdn import fla_chunk

    segments = PackedSegments.prepare(torch.tensor([0, 40, 66]), 68)
    before = calls.snapshot()
    ours, oracle = both(("interleaved", 1, 2, 16, 16), 68, segments=segments, kernel=fla_chunk.load())
    assert_close(ours, oracle)
    assert calls.snapshot().since(before) == (1, 1)


@interpreted
def test_without_gradients_nothing_is_saved() -> None:
    layout = ProjectionLayout(*SMALL)
    packed: list[torch.Size] = []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.shape) or x, lambda x: x):
        out = FusedMixer(TorchKernel())(
            torch.randn(5, 1, layout.proj_dim),
            layout=layout,
            norm_eps=1e-5,
            segments=None,
            **mixer_parameters(layout, dtype=torch.float32),
        )
    assert not out.requires_grad
    assert not packed


@interpreted
def test_a_window_too_long_is_named() -> None:
    layout = ProjectionLayout(*SMALL)
    parameters = mixer_parameters(layout, dtype=torch.float32)
    parameters["conv_weight"] = torch.randn(layout.conv_dim, 1, 5)
    with pytest.raises(FusedError, match="width 5"):
        FusedMixer(TorchKernel())(
            torch.randn(5, 1, layout.proj_dim), layout=layout, norm_eps=1e-5, segments=None, **parameters
        )
