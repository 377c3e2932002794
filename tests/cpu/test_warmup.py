"""From layers to frozen kernels: a planted wrong config is banned, losers are pruned, a bundle spares all work."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_triton.isolated import isolated

pytest.importorskip("megatron.core")

PLANTED = "chunk_bwd_kernel_dqkwg"


def _layer(heads: int = 2) -> Any:
    """What the warm-up reads of a GDN layer; those with the same number of key heads share one variant."""
    from fla_safe.gdn.backends import Backend
    from fla_safe.gdn.chunk import fla as fla_chunk
    from fla_safe.gdn.chunk.function import differentiable
    from fla_safe.gdn.fused.mixer import FusedMixer
    from fla_safe.gdn.layout import ProjectionLayout
    from fla_safe.megatron.layer import SafeForward

    kernel = fla_chunk.load()
    backend = Backend("fla", kernel.version, differentiable(kernel), FusedMixer(kernel))
    layout = ProjectionLayout("interleaved", heads, 4, 64, 64)

    class Layer(SafeForward, torch.nn.Module):
        layout_kind = "interleaved"

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            width, bf16 = layout.conv_dim, torch.bfloat16
            self._mixer_layout = layout
            self.conv1d = torch.nn.Conv1d(width, width, 4, groups=width, bias=False, dtype=bf16)
            self.A_log, self.dt_bias = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
            self.out_norm = torch.nn.LayerNorm(64, dtype=bf16)
            self.out_norm.zero_centered_gamma = False
            self.use_qk_l2norm = True

        def backend_for(self, device: Any, dtype: Any) -> Any:
            return backend

    return Layer


def _check_instead(wrong: set[str]) -> Any:
    """Nothing is computed here: a check runs the kernels and then says what a GPU would have shown."""
    from fla_safe.gdn.steady.golden import Verdict
    from fla_safe.runtime import active

    asked: list[int | None] = []

    def check(golden: Any, *, repeats: int | None = None) -> Verdict:
        asked.append(repeats)
        golden._run()
        tuning = active().tuning  # type: ignore[union-attr]
        bad = [k for k in tuning.asked if k.kernel.endswith(PLANTED) and str(tuning.table.get(k)) in wrong]
        return Verdict("gradient of proj has a relative error of 1.0e+00, allowed 1.0e-02" if bad else None)

    from fla_safe.gdn.steady.golden import GoldenCheck

    GoldenCheck.__call__ = check  # type: ignore[method-assign, assignment]
    return asked


@isolated
@pytest.mark.slow
@pytest.mark.parametrize("bundle", [False, True], ids=["cold", "from the bundle"])
def test_a_warm_up(gpu: Any, bundle: bool, tmp_path_factory_dir: str) -> None:
    from fake_triton.fla import prepare
    from fla_safe.megatron.warmup import Workload, reach_steady_state
    from fla_safe.settings import Settings

    prepare()
    root, out = Path(tmp_path_factory_dir, "rank"), Path(tmp_path_factory_dir, "out")
    root.mkdir(exist_ok=True)
    saved = out / "gdn_bundle.fsb"
    ticks = iter(range(1, 10_000))
    gpu.bench_ms = lambda: float(next(ticks))  # the first config of each kernel is the fastest
    wrong: set[str] = set()
    asked = _check_instead(wrong)
    said: list[str] = []

    def say(text: str) -> None:
        from fla_safe.runtime import active

        said.append(text)
        if not bundle and PLANTED in text and text.startswith("tuned") and not wrong:
            table = active().table  # type: ignore[union-attr]
            wrong.update(str(table.get(key)) for key in table if key.kernel.endswith(PLANTED))

    Layer = _layer()
    settings = Settings(
        gdn_impl="fla_safe",
        guard="strict",
        cache_root=root,
        tune_in_child=False,
        bundle=saved if bundle else None,
    )
    model = torch.nn.ModuleList([Layer() for _ in range(3)])
    steady = reach_steady_state(
        [model], settings, Workload(400, 1, True, torch.bfloat16), say, device=torch.device("cpu")
    )
    report = json.loads(json.dumps(steady.report()))
    assert len(report["variants"]) == 1
    assert report["unverified"] == []
    assert report["counters"]["late_tunes"] == 0
    counts = steady.runtime.store.store.counts
    if bundle:
        assert report["store"]["bundle"]
        assert asked == [1], "what was verified before is not repeated twenty times again"
        assert report["timings"]["tuning_rounds"] == 0
        assert counts.misses == 0
        assert not steady.learned
        assert not any(text.startswith("tuned") for text in said)
    else:
        (key,) = [key for key in report["rejected"] if PLANTED in key]
        ((config, reason),) = report["rejected"][key].items()
        assert {config} == wrong
        assert "gradient of proj has a relative error" in reason
        assert report["decisions"][key] != config
        assert steady.given_back > 1_000_000, "binaries of configs that lost"
        assert steady.learned
        assert steady.writes_bundle
        assert steady.save_bundle(out) == saved
        kept = len(list(steady.runtime.store.store.groups()))
        assert 10 < kept < counts.written
    directory = steady.runtime.store.directory.path
    steady.runtime.deactivate()
    assert not directory.exists()


def _reach(model: Any, root: str, earlier: Any = None) -> Any:
    """A strict job's steady state on short packed rows, checked by `_check_instead`."""
    from fla_safe.megatron.warmup import Workload, reach_steady_state
    from fla_safe.settings import Settings

    settings = Settings(gdn_impl="fla_safe", guard="strict", cache_root=Path(root), tune_in_child=False)
    workload, device = Workload(70, 1, True, torch.bfloat16), torch.device("cpu")
    return reach_steady_state([model], settings, workload, lambda text: None, device=device, earlier=earlier)


@isolated
@pytest.mark.slow
def test_a_second_model_with_other_heads_is_warmed_up_beside_the_first(gpu: Any, tmp_path: str) -> None:
    """A teacher's or reference model's layers; without it a strict job ends at their first call."""
    from fake_triton.fla import prepare
    from fla_safe.gdn.steady.rehearsal import packed_row
    from fla_safe.runtime import LateCompileError, LateTuneError

    prepare()
    _check_instead(set())
    first, second = (torch.nn.ModuleList([_layer(heads)()]) for heads in (2, 4))

    def call(steady: Any, variant: Any) -> None:
        with steady.runtime.section:
            variant(variant.draw(33, 1, "cpu"), packed_row(33, 2, "cpu")).sum().backward()

    steady = _reach(first, tmp_path)
    (known,) = steady.variants
    other = replace(known, layout=second[0]._mixer_layout)
    with pytest.raises((LateTuneError, LateCompileError)):
        call(steady, other)
    both = _reach(second, tmp_path, steady)
    assert both.variants == (known, other)
    assert both.runtime is steady.runtime
    for variant in both.variants:
        call(both, variant)
    counters = both.runtime.counters()
    assert [counters[name] for name in ("late_tunes", "late_compiles", "file_ops")] == [0, 0, 0]
    assert "syncs" not in counters, "nobody counted them"


@isolated
@pytest.mark.slow
def test_a_file_that_a_backward_pass_opens_is_counted(gpu: Any, tmp_path: str) -> None:
    """Autograd calls it where no layer's section is open."""
    from fake_triton.fla import prepare
    from fla_safe.gdn.fused import mixer
    from fla_safe.gdn.steady.rehearsal import packed_row

    prepare()
    _check_instead(set())
    steady = _reach(torch.nn.ModuleList([_layer()()]), tmp_path)
    stock = mixer.grad_in

    def grad_in(*args: Any) -> Any:
        Path(__file__).open().close()
        return stock(*args)

    mixer.grad_in = grad_in
    (variant,) = steady.variants
    out = variant(variant.draw(33, 1, "cpu"), packed_row(33, 2, "cpu"))
    assert steady.runtime.counters()["file_ops"] == 0
    out.sum().backward()
    assert steady.runtime.counters()["file_ops"] >= 1


@pytest.fixture(scope="module")
def tmp_path_factory_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("warmup"))
