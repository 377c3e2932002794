"""Planted wrong, irreproducible and uncompilable configs of real kernels never reach a frozen table."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: compiled Triton kernels"),
]

if torch.cuda.is_available():
    from planted_kernels import DEADLY, IRREPRODUCIBLE, RIGHT, UNCOMPILABLE, WRONG, double, planted

    from fla_safe.gdn.backends import resolve
    from fla_safe.gdn.layout import ProjectionLayout
    from fla_safe.gdn.steady.golden import GoldenCheck
    from fla_safe.gdn.steady.rehearsal import Rows, rehearse
    from fla_safe.gdn.variant import MixerVariant
    from fla_safe.runtime import NoWorkingConfigError, RuntimeSettings, activate
    from fla_safe.runtime.artifacts.kept import keys_in_use, save_bundle
    from fla_safe.runtime.tuning.outside import OutsideTuning
    from fla_safe.runtime.tuning.repeats import RepeatCheck
    from fla_safe.runtime.tuning.settle import WrongResultsError


@dataclass
class Looks:
    failure: str | None


@pytest.fixture
def start() -> Iterator[Any]:
    made = []

    def activated(**settings: Any) -> Any:
        made.append(activate(RuntimeSettings(**{"guard": "strict", "agree": False, **settings})))
        return made[-1]

    yield activated
    for runtime in made:
        runtime.deactivate()


def modes(runtime: Any) -> list[int]:
    return [dict(runtime.table.get(key).kwargs)["MODE"] for key in runtime.table]


def doubles(kernel: Any, repeats: int = 20) -> Any:
    """A check of the kernel: its result against float64, and its bits."""
    x = torch.randn(1 << 16, device="cuda")

    def check(verified: bool) -> Looks:
        first = double(kernel, x)
        if not torch.equal(first.double(), x.double() * 2):
            return Looks("out differs from 2 * x")
        again = [double(kernel, x) for _ in range(repeats)]
        return Looks(None if all(torch.equal(first, a) for a in again) else "out has other bits")

    return check


def test_the_planted_wrong_config_is_the_fastest(start: Any) -> None:
    """Without a check it wins: what the other tests show is not luck."""
    runtime, kernel = start(), planted(WRONG, RIGHT)
    with runtime.warmup():
        double(kernel, torch.randn(1 << 16, device="cuda"))
    assert modes(runtime) == [WRONG]


def test_wrong_irreproducible_and_uncompilable_configs_are_banned(start: Any) -> None:
    runtime, kernel = start(), planted(WRONG, UNCOMPILABLE, IRREPRODUCIBLE, RIGHT)
    x = torch.randn(1 << 16, device="cuda")
    with runtime.warmup():
        double(kernel, x)
    runtime.freeze(checks={"double": doubles(kernel)}, again=lambda: double(kernel, x))
    assert modes(runtime) == [RIGHT]
    assert all(runtime.table.entry(key).verified for key in runtime.table)
    assert torch.equal(double(kernel, x), x * 2)
    (reasons,) = runtime.report()["rejected"].values()
    text = str(reasons)
    assert "out differs from 2 * x (double)" in text
    assert "refused by the compiler" in text
    counters = runtime.counters()
    assert counters["late_tunes"] == counters["late_compiles"] == 0


def test_the_repeat_check_keeps_an_irreproducible_config_out(start: Any) -> None:
    runtime, kernel = start(judge=RepeatCheck()), planted(IRREPRODUCIBLE, RIGHT)
    with runtime.warmup():
        double(kernel, torch.randn(1 << 16, device="cuda"))
    assert modes(runtime) == [RIGHT]
    (reasons,) = runtime.report()["rejected"].values()
    assert "not reproducible: out" in str(reasons)


def test_when_no_config_is_right_the_error_names_kernel_config_and_difference(start: Any) -> None:
    runtime, kernel = start(), planted(WRONG, IRREPRODUCIBLE)
    x = torch.randn(1 << 16, device="cuda")
    with runtime.warmup():
        double(kernel, x)
    with pytest.raises((WrongResultsError, NoWorkingConfigError)) as caught:
        runtime.freeze(checks={"double": doubles(kernel)}, again=lambda: double(kernel, x))
    for part in ("_double", "MODE=", "out differs from 2 * x"):
        assert part in str(caught.value)


def test_a_config_that_kills_the_context_costs_a_child(start: Any, tmp_path: Path) -> None:
    runtime, kernel = start(isolate=True, cache_root=tmp_path), planted(DEADLY, WRONG, RIGHT)
    x = torch.randn(1 << 16, device="cuda")
    told: list[str] = []
    outside = OutsideTuning(
        runtime.tuning,
        "planted_kernels:work",
        {"modes": [DEADLY, WRONG, RIGHT], "device": torch.cuda.current_device()},
        {},
        directory=runtime.store.store.directory,
        tell=told.append,
    )
    runtime.tuning.elsewhere = outside
    with runtime.warmup():
        double(kernel, x)
    assert outside.children == 2, told
    assert modes(runtime) == [WRONG]
    runtime.freeze(checks={"double": doubles(kernel)}, again=lambda: double(kernel, x))
    assert modes(runtime) == [RIGHT]
    assert torch.equal(double(kernel, x), x * 2), "the job's own context lives"
    (reasons,) = runtime.report()["rejected"].values()
    assert "killed the device's context" in str(reasons)
    assert runtime.store.store.counts.hits > 0, "the child's binaries are found"


def variant(dtype: Any, heads: tuple[Any, ...] = ("interleaved", 2, 4, 128, 128)) -> Any:
    layout = ProjectionLayout(*heads)
    backend = resolve("fla", "cuda", layout=layout, dtype=dtype)
    return MixerVariant(layout, backend, dtype, 4, False, (dtype, torch.float32, dtype, dtype), 1e-6)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "batch of 2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_flas_kernels_pass_the_golden_check(start: Any, dtype: Any, packed: bool) -> None:
    start(guarded=("fla", "fla_safe"))
    verdict = GoldenCheck(variant(dtype), "cuda", packed=packed, batch=2)()
    rows = [f"{name} {error:.1e} of {verdict.limits[name]:.1e}" for name, error in verdict.errors.items()]
    print(f"{dtype}, {'packed' if packed else 'batch'}: " + "; ".join(rows))
    assert verdict, verdict.failure


def test_a_spoiled_config_of_flas_output_kernel_is_found_among_all_kernels(start: Any, tmp_path: Path) -> None:
    from fla.ops.common.chunk_o import chunk_fwd_kernel_o

    runtime = start(guarded=("fla", "fla_safe"), judge=RepeatCheck(), isolate=True, cache_root=tmp_path)
    mixer, rows, device = variant(torch.bfloat16), Rows(2048, 1, True), torch.device("cuda", 0)

    def run() -> None:
        rehearse(mixer, rows, device)
        torch.cuda.synchronize()

    with runtime.warmup():
        run()
    (key,) = [key for key in runtime.table if key.kernel.endswith("chunk_fwd_kernel_o")]
    winner = runtime.table.get(key)
    tuner: Any = chunk_fwd_kernel_o
    while not hasattr(tuner, "configs"):
        tuner = tuner.fn
    spoiled = winner.select(tuner.configs)
    # The states are computed anew in each pass and read by this kernel only: the output alone is spoiled.
    spoiled.pre_hook = lambda named: named["h"].mul_(1.5) if isinstance(named["h"], torch.Tensor) else None
    try:
        golden = GoldenCheck(mixer, device, packed=True)
        runtime.freeze(checks={"golden": lambda verified: golden(repeats=2)}, again=run)
    finally:
        spoiled.pre_hook = None
    rejected = {name: reasons for name, reasons in runtime.report()["rejected"].items() if "golden" in str(reasons)}
    assert list(rejected) == [str(key)]
    assert "output has a relative error" in rejected[str(key)][str(winner)]
    assert runtime.table.get(key) != winner
    assert all(runtime.table.entry(k).verified for k in runtime.table)
    run()
    assert golden(repeats=1)
    counters = runtime.counters()
    assert [counters[name] for name in ("late_tunes", "late_compiles", "file_ops")] == [0, 0, 0]

    before = runtime.store.store.size()
    assert runtime.store.store.prune(keys_in_use(runtime.launching)) > 0
    bundle = tmp_path / "out" / "gdn_bundle.fsb"
    saved = save_bundle(bundle, runtime.table, runtime.store.store)
    assert 0 < len(saved.groups) < 100
    assert runtime.store.store.size() < before


def test_the_child_tunes_flas_kernels_for_the_job(start: Any, tmp_path: Path) -> None:
    runtime = start(guarded=("fla", "fla_safe"), judge=RepeatCheck(), isolate=True, cache_root=tmp_path)
    mixer, rows, device = variant(torch.bfloat16), Rows(2048, 1, True), torch.device("cuda", 0)
    told: list[str] = []
    outside = OutsideTuning(
        runtime.tuning,
        "fla_safe.gdn.steady.rehearsal:in_child",
        {"variants": [mixer.as_dict()], "rows": rows.as_dict(), "device": 0},
        {"guarded": ("fla", "fla_safe")},
        directory=runtime.store.store.directory,
        tell=told.append,
    )
    runtime.tuning.elsewhere = outside
    here = []
    runtime.tuning.trying = lambda key, config: here.append(key) if key not in runtime.table else None
    with runtime.warmup():
        rehearse(mixer, rows, device)
    print("\n".join(told))
    assert outside.children == 1
    assert not here, "nothing is benchmarked in the job"
    assert len([text for text in told if text.startswith("tuned")]) == len(runtime.table) > 5
    golden = GoldenCheck(mixer, device, packed=True)
    runtime.freeze(checks={"golden": lambda verified: golden()}, again=lambda: rehearse(mixer, rows, device))
    rehearse(mixer, rows, device)
    counters = runtime.counters()
    assert [counters[name] for name in ("late_tunes", "late_compiles", "file_ops")] == [0, 0, 0]


def test_a_bundle_spares_tuning_and_compiling_in_a_new_process(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = f"""
import sys, time, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_tuning_gpu import *
bundle = Path({str(tmp_path / "gdn_bundle.fsb")!r})
runtime = activate(RuntimeSettings(guard="strict", guarded=("fla", "fla_safe"), judge=RepeatCheck(), isolate=True,
    cache_root=Path({str(tmp_path)!r}), bundle=bundle if bundle.exists() else None, agree=False))
mixer, rows, device = variant(torch.bfloat16), Rows(4096, 1, True), torch.device("cuda", 0)
torch.cuda.init(); began = time.perf_counter()
run = lambda: rehearse(mixer, rows, device)
with runtime.warmup(): run()
golden = GoldenCheck(mixer, device, packed=True)
runtime.freeze(checks={{str(mixer): lambda verified: golden(repeats=1 if verified else None)}}, again=run)
runtime.store.store.prune(keys_in_use(runtime.launching))
counts = runtime.store.store.counts
print("RESULT", runtime.tuning.rounds, counts.written - counts.seeded, f"{{time.perf_counter() - began:.1f}}")
if not bundle.exists(): save_bundle(bundle, runtime.table, runtime.store.store)
runtime.deactivate()
"""
    results = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        results.append(next(x for x in done.stdout.splitlines() if x.startswith("RESULT")).split()[1:])
    print("cold, then with the bundle (rounds of tuning, kernels compiled, seconds):", results)
    assert int(results[0][0]) > 0
    assert results[1][:2] == ["0", "0"]
