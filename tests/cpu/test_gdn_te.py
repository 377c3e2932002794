"""TransformerEngine's attention as a chunk kernel: rightly called, refused by name, checked, never taken unasked."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from fake_te import installed, metadata
from gdn_cases import rule_inputs, segments_of

from fla_safe.gdn import backends, calls
from fla_safe.gdn.backends import BackendError, resolve
from fla_safe.gdn.chunk import te
from fla_safe.gdn.chunk.plain import torch_chunk_gated_delta_rule
from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.steady import contest, kernel_choice, warmup
from fla_safe.gdn.steady.golden import GoldenCheck
from fla_safe.gdn.steady.rehearsal import Rows, steps
from fla_safe.gdn.variant import MixerVariant
from fla_safe.settings import GdnKernel, Settings

BF16, CPU, CUDA = torch.bfloat16, torch.device("cpu"), torch.device("cuda")
LAYOUT = ProjectionLayout("interleaved", 1, 2, 8, 6)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The package, on a machine that passes for one with a GPU."""
    with installed(tmp_path, monkeypatch) as package:
        monkeypatch.setattr(te, "unsupported_reason", lambda device, dtype: None)
        yield package


def variant(**options: Any) -> MixerVariant:
    backend = resolve("te", CPU, layout=LAYOUT, dtype=BF16)
    return MixerVariant(LAYOUT, backend, BF16, 4, False, (BF16, torch.float32, torch.float32, BF16), 1e-6, **options)


@pytest.mark.parametrize("heads", [(2, 2), (2, 6)], ids=["own keys", "shared keys"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "batch of 2"])
def test_it_is_given_what_the_rule_means(fake: ModuleType, packed: bool, heads: tuple[int, int]) -> None:
    segments = segments_of([1, 40, 7], tail=3) if packed else None
    inputs = rule_inputs(1 if packed else 2, 51, heads, dtype=BF16)
    upstream = torch.randn(*inputs[2].shape[:2], 2 * heads[1], 6, dtype=BF16)[:, :, : heads[1]]
    results = []
    for rule in (te.te_gated_delta_rule, torch_chunk_gated_delta_rule):
        leaves = [x.clone().requires_grad_() for x in inputs]
        before = calls.snapshot()
        o = rule(*leaves, 0.3, segments)
        grads = torch.autograd.grad(o, leaves, upstream)
        assert calls.snapshot().since(before) == (1, 1)
        assert [x.dtype for x in (o, *grads)] == [x.dtype for x in (inputs[2], *inputs)]
        results.append((o, *grads))
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=0.02, atol=0.02 * float(exact.detach().abs().max()))
    (given,) = fake.calls
    assert given["offsets"] == ((0, 1, 41, 48, 51) if packed else (0, 51, 102))
    assert fake.gradients == [True], "an upstream gradient that is not contiguous must be made so"


@pytest.mark.parametrize("normalised", [True, False], ids=["l2norm", "no l2norm"])
def test_queries_and_keys_are_normalised_once_and_by_us(fake: ModuleType, normalised: bool) -> None:
    mixer = variant(use_qk_l2norm=normalised)
    verdict = GoldenCheck(mixer, CPU, packed=True, repeats=1)()
    assert verdict, verdict.failure
    given = fake.calls[-1]
    assert given["l2norm"] is False
    norms = torch.cat([given["q"], given["k"]]).float().norm(dim=-1)
    used = norms[norms > 0]  # the convolution may give a row of zeros, and the tail does
    assert bool(((used - 1).abs() < 0.02).all()) is normalised


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "batch of 2"])
@pytest.mark.parametrize(
    ("spoil", "failure"),
    [
        (lambda o: o + 0.05 * o.roll(1, -1), "output has a relative error of"),
        (lambda o: o.detach() + 0 * o, "gradient of"),
        (lambda o: o.roll(1, 0), "output has a relative error of"),
    ],
    ids=["columns", "gradient", "rows"],
)
def test_the_golden_check_refuses_a_wrong_one(fake: ModuleType, packed: bool, spoil: Any, failure: str) -> None:
    mixer = variant()
    fake.spoil[0] = spoil
    verdict = GoldenCheck(mixer, CPU, packed=packed, batch=2, repeats=0)()
    assert failure in str(verdict.failure)


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_no_training_before_its_golden_check(fake: ModuleType, wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the warm-up hands to the freeze, which ends the job on a failed verdict (see test_runtime_settle)."""
    checks: dict[str, Any] = {}

    @contextmanager
    def warming(progress: Any) -> Iterator[None]:
        yield

    runtime: Any = SimpleNamespace(
        tuning=SimpleNamespace(),
        warmup=warming,
        store=None,
        section=nullcontext(),
        freeze=lambda **given: checks.update(given["checks"]),
    )
    monkeypatch.setattr(warmup, "_elsewhere", lambda *_: None)
    mixer = variant()
    fake.spoil[0] = lambda o: 2 * o if wrong else o
    warmup.warm_up(runtime, [mixer], Rows(4, 1, False), CPU, Settings("fla_safe", kernel="te"), lambda text: None)
    ((name, check),) = checks.items()
    assert name == str(mixer)
    assert name.endswith("kernel te")
    assert bool(check(True)) is not wrong


def test_version_2_19_runs_in_an_fp8_region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses FP8 regions, in which Megatron runs layers under --fp8; the error would come in the first step."""
    with installed(tmp_path, monkeypatch, "2.19.0") as package, package.autocast(enabled=True):
        te.te_gated_delta_rule(*rule_inputs(1, 5, dtype=BF16), 1.0, None)
        assert package._fp8 == [True]


# What is seen -> (versions of TransformerEngine and the cuDNN frontend, device, dtype, a part of the message).
REFUSED = {
    "absent": (None, "1.32.0", CUDA, BF16, "transformer-engine is not installed"),
    "too old": ("2.18.0", "1.32.0", CUDA, BF16, "transformer-engine 2.18.0 is outside 2.19 <= version < 3"),
    "too new": ("3.0", "1.32.0", CUDA, BF16, "transformer-engine 3.0 is outside 2.19 <= version < 3"),
    "no cuDNN frontend": ("2.20.2", None, CUDA, BF16, "nvidia-cudnn-frontend is not installed"),
    "old cuDNN frontend": ("2.20.2", "1.27.0", CUDA, BF16, "nvidia-cudnn-frontend 1.27.0 is outside 1.28 <= version"),
    "no GPU": ("2.20.2", "1.32.0", CPU, BF16, "need CUDA, not cpu"),
    "float32": ("2.20.2", "1.32.0", CUDA, torch.float32, "bfloat16 and float16, not in float32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_each_refusal_is_named(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, frontend, device, dtype, seen = REFUSED[case]
    for name, version in (("transformer_engine", engine), ("nvidia_cudnn_frontend", frontend)):
        if version is not None:
            metadata(tmp_path, name, version)
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(BackendError, match="kernel 'te' asked for, but") as raised:
        resolve("te", device, layout=LAYOUT, dtype=dtype)
    assert seen in raised.value.seen
    assert "transformer-engine[pytorch]>=2.19" in raised.value.remedy
    assert "--gdn_kernel auto" in raised.value.remedy


def _no_engine(o: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("python engines declined:\n GdnFrostEngine requires SM100 / SM103 / SM107 (found 90)")


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("GdnCuTileEngine declined GDN_BWD")


@pytest.mark.parametrize(
    ("spoil", "seen"),
    [
        (_no_engine, "RuntimeError: python engines declined: GdnFrostEngine requires SM100 / SM103 / SM107 (found 90)"),
        (_NoBackward.apply, "NotImplementedError: GdnCuTileEngine declined GDN_BWD"),
    ],
    ids=["forward", "backward"],
)
def test_what_the_frontend_refuses_at_a_call_is_named_before_training(fake: ModuleType, spoil: Any, seen: str) -> None:
    """Architecture, heads, CUDA runtime and optional packages: only a call tells."""
    fake.spoil[0] = spoil
    with pytest.raises(BackendError) as raised:
        variant()
    assert seen in raised.value.seen
    assert str(LAYOUT) in raised.value.seen


def test_a_transformer_engine_that_does_not_import_is_named(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fake, "GatedDeltaNetAttention")
    with pytest.raises(BackendError, match="ImportError: cannot import name 'GatedDeltaNetAttention'"):
        variant()


def test_asking_for_it_beside_the_stand_in_is_an_error_before_the_model_is_built() -> None:
    if torch.cuda.is_available() or importlib.util.find_spec("mcore_bridge") is None:
        pytest.skip("uses mcore-bridge on the CPU stand-in for TransformerEngine")
    code = """
import torch
from fla_safe import cpu
cpu.activate()
from fla_safe.megatron import bridge
from fla_safe.settings import Settings
for settings in (Settings("fla_safe"), Settings("fla_safe", kernel="te")):
    try:
        bridge.safe_layers("qwen3_5", settings)
    except Exception as error:
        print(settings.kernel, type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"FLA_SAFE_CPU": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = [line for line in done.stdout.splitlines() if "Error" in line] or [done.stderr[-2000:]]
    assert line.startswith("te BackendError kernel 'te' asked for, but transformer_engine is this package's stand-in")


def test_auto_never_tries_it(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where it could run."""
    asked: list[str] = []

    def supported(name: str, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        asked.append(name)
        return backends.supports(name, *args, **kwargs)

    monkeypatch.setattr(contest, "supports", supported)
    monkeypatch.setattr(backends.te, "refusal", lambda *_: pytest.fail("it was called"))
    stock = backends.Backend("fla", "1", torch_chunk_gated_delta_rule)
    mine = MixerVariant(LAYOUT, stock, BF16, 4, False, (BF16, torch.float32, torch.float32, BF16), 1e-6)
    chosen, timings = kernel_choice.choose_kernels([mine], Rows(64, 1, True), CPU, lambda x: [x], lambda text: None)
    assert not chosen
    assert not timings
    assert "te" not in asked


def test_auto_of_a_layer_never_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = pytest.importorskip("fla_safe.megatron.layer", reason="the megatron floor needs megatron-core")
    monkeypatch.setattr(te, "unsupported_reason", lambda device, dtype: None)
    monkeypatch.setattr(te, "refusal", lambda *_: pytest.fail("it was called"))
    named: list[str] = []
    monkeypatch.setattr(layer, "_resolved", lambda name, *_: named.append(name))
    of_layer: Any = SimpleNamespace(
        kernel_name="auto", config=SimpleNamespace(deterministic_mode=False), _mixer_layout=LAYOUT
    )
    for device in (CPU, CUDA):
        layer.SafeForward.backend_for(of_layer, device, BF16)
    assert len(named) == 2
    assert "te" not in named


def test_every_kernel_of_the_flag_can_be_resolved_by_name() -> None:
    assert set(get_args(GdnKernel)) - {"auto"} == set(backends.NAMES) - {"torch"}


@pytest.mark.parametrize("heads", [2, 4, 8, 16, 64, 128, 200])
def test_rehearsed_segment_counts_reach_every_schedule(heads: int) -> None:
    """cuDNN frontend 1.32: pieces of a sequence, a split of the value dimension or neither, by what fits the GPU."""

    def schedules(segments: int) -> tuple[str, str, bool]:
        fits = min(148 // (segments * heads), 16)
        forward = "pieces" if fits >= 3 else "split" if fits == 2 else "whole"
        return forward, "pieces" if fits >= 2 else "whole", fits >= 2 and segments * heads * 16 <= 148

    reached = {schedules(count) for count in te.segment_counts(heads, 148)}
    assert reached == {schedules(count) for count in range(1, 300)}


def test_a_rehearsal_takes_those_segment_counts(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=148)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    planned = [step.args[-1] for step in steps(variant(), Rows(64, 1, True), CPU)]  # type: ignore[attr-defined]
    assert {count for count in planned if type(count) is int} == set(te.segment_counts(2, 148))


@pytest.mark.parametrize("kernel", ["te", "auto"])
def test_its_compiled_kernels_lie_with_the_rank(kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SimpleNamespace(directory=SimpleNamespace(path=tmp_path))
    monkeypatch.setattr(warmup, "activate", lambda settings: SimpleNamespace(store=store, deactivate=lambda: None))
    monkeypatch.setattr(warmup.atexit, "register", lambda function: None)  # type: ignore[attr-defined]
    monkeypatch.setattr(os, "environ", environ := {"PATH": os.environ["PATH"]})
    warmup.take_over(Settings("fla_safe", kernel=kernel))
    expected = str(tmp_path / "cudnn") if kernel == "te" else None
    assert environ.get("CUDNN_FRONTEND_COMPILED_CACHE") == expected
