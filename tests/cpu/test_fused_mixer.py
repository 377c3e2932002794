"""The fused mixer under Triton's interpreter, against the composed one in float64 with plain torch kernels."""

import os
import subprocess
import sys
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton decides when a kernel is defined; a process that already compiles kernels cannot change its mind."""

if INTERPRETED:
    from fla_safe.cpu import interpreter

    interpreter.activate()
    from fused_interpreter import quicken
    from gdn_cases import PACKS, pack

    from fla_safe.gdn import calls
    from fla_safe.gdn.chunk.grads import KernelGrads
    from fla_safe.gdn.fused import mixer as fused
    from fla_safe.gdn.fused.launch import run_in
    from fla_safe.gdn.fused.mixer import FusedError, FusedMixer
    from fla_safe.gdn.layout import ProjectionLayout
    from fla_safe.gdn.segments import PackedSegments
    from fused_cases import TorchKernel, assert_close, both, parameters

    quicken()
else:
    PACKS = {}

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_under_the_interpreter starts")

SMALL = ("interleaved", 1, 2, 8, 8)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process with the interpreter")
def test_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", [n for n in PACKS if n not in ("hundreds-of-segments", "hundreds-of-pad-tokens")])
def test_packs_match_the_oracle(name: str) -> None:
    segments = PackedSegments.prepare(*pack(name))
    ours, oracle = both(SMALL, segments.total, segments=segments, tokens=256)
    assert_close(ours, oracle)
    assert not ours["out"][segments.used :].any()
    assert not ours["proj"][segments.used :].any()


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("rows", [1, 3, 63, 64, 65], ids=lambda rows: f"T={rows}")
def test_unpacked_rows_match_the_oracle(rows: int) -> None:
    assert_close(*both(SMALL, rows, tokens=256))


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("offsets", [None, [0, 50, 97]], ids=["unpacked", "packed"])
def test_programs_inside_a_segment_match_the_oracle(offsets: list[int] | None) -> None:
    # Of 32 rows: one program may drop its masks, one holds a boundary, one ends four rows too near to the last.
    segments = None if offsets is None else PackedSegments.prepare(torch.tensor(offsets), 98)
    assert_close(*both(SMALL, 98, segments=segments, tokens=32))


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
def test_the_launch_configuration_in_use_matches_the_oracle() -> None:
    segments = PackedSegments.prepare(torch.tensor([0, 129]), 131)
    assert_close(*both(SMALL, 131, segments=segments))


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
    assert_close(*both(heads, 11, batch=2, tokens=32))


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
    segments = PackedSegments.prepare(torch.tensor([0, 5, 7, 12, 13]), 14)
    assert_close(*both(SMALL, 14, segments=segments, tokens=256, **options))


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
def test_bfloat16_stays_within_rounding() -> None:
    segments = PackedSegments.prepare(torch.tensor([0, 30, 70]), 70)
    assert_close(*both(SMALL, 70, segments=segments, dtype=torch.bfloat16, tokens=256), tolerance=2e-2)


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
def test_a_segment_of_nans_does_not_reach_its_neighbours() -> None:
    segments = PackedSegments.prepare(torch.tensor([0, 20, 25, 45]), 45)
    layout = ProjectionLayout(*SMALL)
    weights = {name: x.float() for name, x in parameters(layout).items()}
    results = []
    for poison in (0.5, float("nan")):
        proj = torch.randn(45, 1, layout.proj_dim, generator=torch.Generator().manual_seed(0))
        proj[20:25] = poison
        proj.requires_grad_()
        mixer = FusedMixer(TorchKernel())
        out = mixer(proj, layout=layout, norm_eps=1e-5, segments=segments, **weights)
        grad = torch.autograd.grad(out, proj, torch.ones_like(out))[0]
        results.append((out.detach(), grad))
    assert results[1][0][20:25].isnan().all()
    for (clean, dirty), part in (
        (pair, s) for pair in zip(*results, strict=True) for s in (slice(0, 20), slice(25, 45))
    ):
        assert torch.equal(clean[part], dirty[part])


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
def test_addends_of_shared_heads_are_summed() -> None:
    class Parts(TorchKernel):
        """Leaves one gradient of q and k a value head, and k's and g's in two addends."""

        def backward(self, saved: Any, do: Any, scale: float, segments: Any, key_heads: int) -> Any:
            dq, dk, dv, dg, dbeta, *_ = super().backward(saved, do, scale, segments, key_heads)
            shares = torch.tensor([0.25, 0.5]), torch.tensor([1.5, -0.75]), torch.tensor([-0.5, 0.0])

            def share(x: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
                return (x.unsqueeze(3) * of[:, None]).flatten(2, 3).contiguous()

            rest = share(dk, shares[2]), dg * 3
            return KernelGrads(share(dq, shares[0] * 4 / 3), share(dk, shares[1] * 2), dv, dg * -2, dbeta, *rest)

    segments = PackedSegments.prepare(torch.tensor([0, 70]), 72)
    assert_close(*both(SMALL, 72, segments=segments, kernel=Parts(), tokens=32))


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("tokens", [32, 256], ids=lambda tokens: f"{tokens}-rows-a-program")
@pytest.mark.parametrize("name", ["unpacked", "packed"])
def test_gradients_of_decay_cumulated_in_chunks_are_summed(name: str, tokens: int) -> None:
    bounds = [0, 1, 64, 129, 200] if name == "packed" else [0, 205]

    class Chunks(TorchKernel):
        """Leaves the gradient of g cumulated in chunks, in three addends."""

        def backward(self, saved: Any, do: Any, scale: float, segments: Any, key_heads: int) -> Any:
            grads = super().backward(saved, do, scale, segments, key_heads)
            dg = grads.dg.clone()
            for start, end in pairwise(bounds):
                for first in range(start, end, 64):
                    rows = slice(first, min(first + 64, end))
                    dg[:, rows][:, :-1] -= grads.dg[:, rows][:, 1:]
            return grads._replace(dg=torch.stack([dg * 2, dg * 0.5]), dg2=dg * -1.5, chunk=64)

    segments = PackedSegments.prepare(torch.tensor(bounds), 205) if name == "packed" else None
    ours, oracle = both(SMALL, 205, 1 if segments else 2, segments=segments, kernel=Chunks(), tokens=tokens)
    assert_close(ours, oracle)


@interpreted
def test_recomputation_does_not_project_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def counted(*args: Any) -> Any:
        runs.append(torch.is_grad_enabled())
        return run_in(*args)

    monkeypatch.setattr(fused, "run_in", counted)
    layout = ProjectionLayout(*SMALL)
    weights = {name: x.float() for name, x in parameters(layout).items()}
    mixer = partial(FusedMixer(TorchKernel()), layout=layout, norm_eps=1e-5, segments=None, **weights)
    proj = torch.randn(5, 1, layout.proj_dim, requires_grad=True)
    grads = []
    for run in (mixer, *(partial(checkpoint, mixer, use_reentrant=reentrant) for reentrant in (True, False))):
        runs.clear()
        run(proj).sum().backward()
        assert len(runs) == 2
        grads.append(proj.grad)
        proj.grad = None
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
def test_around_flas_kernels() -> None:
    from fla_safe.gdn.chunk import fla as fla_chunk

    segments = PackedSegments.prepare(torch.tensor([0, 40, 66]), 68)
    before = calls.snapshot()
    ours, oracle = both(("interleaved", 1, 2, 16, 16), 68, segments=segments, kernel=fla_chunk.load(), tokens=256)
    assert_close(ours, oracle)
    assert calls.snapshot().since(before) == (2, 2)  # the oracle counts too


@interpreted
def test_around_flas_kernels_nothing_but_kernels_computes() -> None:
    from fla_safe.gdn.chunk import fla as fla_chunk

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    seen: set[str] = set()
    layout = ProjectionLayout("interleaved", 1, 2, 16, 16)
    weights = {name: x.float().requires_grad_() for name, x in parameters(layout).items()}
    mixer = partial(FusedMixer(fla_chunk.load()), layout=layout, norm_eps=1e-5, segments=None, **weights)
    proj = torch.randn(3, 1, layout.proj_dim, requires_grad=True)
    with Watch():
        out = mixer(proj)
        torch.autograd.grad(out, [proj, *weights.values()], torch.ones_like(out))
    assert not seen & {"sum", "add", "add_", "mul", "cat", "clone"}  # the interpreter copies


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
            **{name: x.float().requires_grad_() for name, x in parameters(layout).items()},
        )
    assert not out.requires_grad
    assert not packed


@interpreted
def test_a_window_too_long_is_named() -> None:
    layout = ProjectionLayout(*SMALL)
    weights = parameters(layout, window=5)
    with pytest.raises(FusedError, match="width 5"):
        FusedMixer(TorchKernel())(
            torch.randn(5, 1, layout.proj_dim), layout=layout, norm_eps=1e-5, segments=None, **weights
        )
