"""Who decides a config: the table, tuning before the freeze, the guard after it; and what never becomes a decision."""

import logging
import math
from typing import Any

import pytest

from fake_triton.isolated import isolated


def _runtime(**settings: Any) -> Any:
    from fla_safe.runtime import RuntimeSettings, activate

    return activate(RuntimeSettings(**{"guard": "strict", **settings}))


def _floats(count: int = 512) -> Any:
    import torch

    return torch.zeros(count, dtype=torch.float32)


def _add(width: int, n: int = 512) -> Any:
    from fake_triton.kernels import add

    x = _floats()
    return lambda: add[(1,)](x, x, x, n, width)


def _warps(gpu: Any, call: Any) -> tuple[int, int]:
    """BLOCK and number of warps that a call runs with."""
    binary = call()
    names = binary.src.fn.arg_names
    return {names[k[0]]: v for k, v in binary.src.constants.items()}["BLOCK"], gpu.launches[-1].num_warps


@isolated
def test_tuning_happens_once_a_key_and_its_winner_is_the_fastest(gpu: Any) -> None:
    times = iter([9, 8, 7, 1, 5, 6] + [4, 4, 4, 4, 4, 0.5])
    gpu.bench_ms = lambda: float(next(times))
    runtime = _runtime()
    assert _warps(gpu, _add(32)) == (128, 4)
    assert _warps(gpu, _add(32, n=77)) == (128, 4)
    assert _warps(gpu, _add(64)) == (256, 4)
    assert gpu.benchmarks == 12
    assert [k.parts[0] for k in runtime.table] == ["width=32", "width=64"]
    assert {str(runtime.table.get(k)) for k in runtime.table} == {
        "BLOCK=128, num_warps=4, num_ctas=1, num_stages=3",
        "BLOCK=256, num_warps=4, num_ctas=1, num_stages=3",
    }


@isolated
def test_a_decision_in_the_table_is_used_without_a_benchmark(gpu: Any) -> None:
    first = _runtime()
    chosen = _warps(gpu, _add(32))
    text = first.table.to_json()
    first.deactivate()
    gpu.benchmarks = 0
    from fla_safe.runtime.tuning.decisions import DecisionTable

    _runtime(table=DecisionTable.from_json(text))
    gpu.bench_ms = lambda: pytest.fail("benchmarked")
    assert _warps(gpu, _add(32)) == chosen
    assert gpu.benchmarks == 0


@isolated
def test_a_decision_that_the_kernel_does_not_offer_is_tuned_again(gpu: Any) -> None:
    from fla_safe.runtime.tuning.decisions import Decision

    runtime = _runtime()
    _add(32)()
    (key,) = runtime.table
    runtime.table.put(key, Decision((("BLOCK", 12345),), num_warps=4))
    runtime.tuning.forget()
    block, _ = _warps(gpu, _add(32))
    assert block in (64, 128, 256)
    assert gpu.benchmarks == 12


@isolated
def test_a_decision_that_pruning_rules_out_is_not_used(gpu: Any) -> None:
    """The key of this kernel hides what its pruning depends on; a remembered winner may be wrong for others."""
    from fake_triton.kernels import halving
    from fla_safe.runtime.tuning.decisions import Decision

    runtime = _runtime()
    x = _floats()
    halving[(1,)](x, x, 1024, 5)
    (key,) = runtime.table
    runtime.table.put(key, Decision((("BLOCK", 256),), num_warps=4))
    runtime.tuning.forget()
    assert _warps(gpu, lambda: halving[(1,)](x, x, 100, 5))[0] == 64


@isolated
@pytest.mark.parametrize("guard", ["warn", "strict", "off"])
def test_a_key_without_decision_after_the_freeze(gpu: Any, guard: str) -> None:
    from fla_safe.runtime import LateTuneError

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("fla_safe").addHandler(handler)
    winners = iter([1, 2, 3, 4, 5, 6] + [6, 5, 4, 3, 2, 1] + [9, 9, 1, 9, 9, 9])
    gpu.bench_ms = lambda: float(next(winners))
    runtime = _runtime()
    near, far = _warps(gpu, _add(32)), _warps(gpu, _add(4096))
    assert near != far
    runtime.freeze(guard)
    benchmarks = gpu.benchmarks
    if guard == "strict":
        with pytest.raises(LateTuneError) as caught:
            _add(48)()
        for part in ("fake_triton.kernels.add", "width=48", "warm-up"):
            assert part in str(caught.value)
        with pytest.raises(LateTuneError):
            _add(48)()
        assert runtime.counters()["late_tunes"] == 2
    else:
        assert (_warps(gpu, _add(48)) == near) == (guard == "warn")
        assert gpu.benchmarks - benchmarks == (6 if guard == "off" else 0)
        _add(48)()
        assert runtime.counters()["late_tunes"] == 1
    assert bool(records) == (guard == "warn")
    assert sum("width=48" in text for text in records) <= 1
    _warps(gpu, _add(32))
    assert runtime.counters()["late_tunes"] == (2 if guard == "strict" else 1)


@isolated
def test_a_kernel_that_was_never_seen_runs_its_first_config_under_warn(gpu: Any) -> None:
    runtime = _runtime(guard="warn")
    runtime.freeze()
    assert _warps(gpu, _add(32)) == (64, 2)
    assert (gpu.benchmarks, runtime.counters()["late_tunes"], runtime.counters()["late_compiles"]) == (0, 1, 1)


@isolated
def test_configs_that_fail_are_refused_with_a_reason_and_do_not_end_the_job(gpu: Any) -> None:
    """Triton lets any error but three kinds end the process (AMD: 32 warps, invalid argument)."""
    from fla_safe.runtime import NoWorkingConfigError

    real, calls = gpu.bench, iter(range(100))

    def bench(call: Any, **options: Any) -> Any:
        number = next(calls)
        if number in (0, 3) or number >= 6:
            raise RuntimeError("Triton Error [CUDA]: invalid argument")
        return [math.inf] * 3 if number == 1 else real(call, **options)

    from triton.runtime import driver

    driver.active.get_benchmarker = lambda: bench
    runtime = _runtime()
    _add(32)()
    (reasons,) = runtime.report()["rejected"].values()
    assert sum("invalid argument" in text for text in reasons.values()) == 2
    assert len(reasons) == 3
    with pytest.raises(NoWorkingConfigError, match="invalid argument"):
        _add(64)()
    assert len(runtime.table) == 1


@isolated
def test_the_judge_decides_which_of_the_fast_ones_wins(gpu: Any) -> None:
    times = iter([1, 2, 3, 4, 5, 6])
    gpu.bench_ms = lambda: float(next(times))
    asked: list[int] = []

    def judge(key: Any, config: Any, launch: Any, named: dict[str, Any]) -> str | None:
        asked.append(config.kwargs["BLOCK"])
        assert named["n"] == 512
        launch()
        if len(asked) == 2:
            raise ValueError("planted")
        return "wrong gradient" if len(asked) < 3 else None

    runtime = _runtime(judge=judge)
    assert _warps(gpu, _add(32)) == (128, 2)
    assert len(asked) == 3
    (reasons,) = runtime.report()["rejected"].values()
    assert list(reasons.values()) == ["wrong gradient", "ValueError: planted"]


@isolated
def test_tuning_leaves_tensors_as_they_were(gpu: Any) -> None:
    import torch

    from fake_triton.kernels import zeroing

    total, state = torch.full((4,), 3.0), torch.full((8,), 5.0)
    seen: list[tuple[float, float]] = []
    real = gpu.bench

    def bench(call: Any, **options: Any) -> Any:
        done = real(call, **options)
        seen.append((float(total[0]), float(state[0])))
        state.add_(0)
        return done

    from triton.runtime import driver

    driver.active.get_benchmarker = lambda: bench
    _runtime()
    zeroing[(1,)](_floats(), total, state, 64)
    assert len(seen) == 6
    assert all(pair == (0.0, 5.0) for pair in seen)
    assert float(total[0]) == 0.0
    assert float(state[0]) == 5.0


@isolated
def test_constexprs_that_nothing_reads_neither_tune_nor_compile(gpu: Any) -> None:
    from fake_triton.kernels import biased

    runtime = _runtime()
    x = _floats()
    with runtime.warmup():
        biased[(1,)](x, None, x, 0.5, 100, NB=1)
    compiled, benchmarks = len(gpu.compiled), gpu.benchmarks
    for blocks in range(2, 40):
        biased[(1,)](x, None, x, 0.5, 100, NB=blocks)
    runtime.freeze()
    after = len(gpu.compiled)
    assert after - compiled <= 1  # the general binary
    for blocks in range(2, 40):
        biased[(1,)](x, None, x, 0.5, 100, NB=blocks)
    assert (len(gpu.compiled), gpu.benchmarks) == (after, benchmarks)
    assert runtime.report()["launches"]["pinned"] == {"fake_triton.kernels.biased": ["NB"]}


@isolated
def test_stock_triton_tunes_again_for_a_constexpr_that_nothing_reads(gpu: Any) -> None:
    """What the test above prevents."""
    from fake_triton.kernels import biased

    x = _floats()
    for blocks in range(1, 5):
        biased[(1,)](x, None, x, 0.5, 100, NB=blocks)
    assert gpu.benchmarks == 24


@isolated
def test_kernels_of_others_stay_unguarded(gpu: Any) -> None:
    runtime = _runtime(guarded=("fla", "somebody"))
    runtime.freeze()
    _add(32)()
    _add(64)()
    assert runtime.counters()["late_tunes"] == runtime.counters()["late_compiles"] == 0
    assert gpu.benchmarks == 12
