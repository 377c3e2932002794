"""Many compilations at once: on the right device, whatever one of them raises, and before they are needed."""

import threading
from typing import Any

import pytest

from fake_triton.isolated import isolated


def _rounds(gpu: Any, threads: int) -> tuple[Any, list[tuple[str, int]]]:
    """A runtime that tuned one kernel and froze; of each compilation the thread's name and the device."""
    import torch

    from fake_triton.kernels import add
    from fla_safe.runtime import RuntimeSettings, activate

    runtime = activate(RuntimeSettings(guard="strict", agree=False, compile_threads=threads))
    compiled: list[tuple[str, int]] = []
    compile_one = runtime.compiling._compile

    def watched(*args: Any) -> Any:
        compiled.append((threading.current_thread().name, gpu.current_device()))
        return compile_one(*args)

    runtime.compiling._compile = watched
    x = torch.zeros(512)
    with runtime.warmup():
        add[(1,)](x, x, x, 512, 32)
    assert gpu.benchmarks == 6
    runtime.freeze()
    return runtime, compiled


@isolated
def test_a_round_and_the_freeze_compile_in_threads(gpu: Any) -> None:
    runtime, compiled = _rounds(gpu, threads=4)
    pooled = [name for name, _ in compiled if name.startswith("fla_safe_compile")]
    assert len(pooled) >= 6
    assert runtime.counters()["late_compiles"] == 0


@isolated
def test_one_thread_compiles_nothing_ahead(gpu: Any) -> None:
    _, compiled = _rounds(gpu, threads=1)
    assert {name for name, _ in compiled} == {"MainThread"}


@isolated
def test_as_many_binaries_as_without_threads(gpu: Any) -> None:
    runtime, _ = _rounds(gpu, threads=4)
    many = runtime.compiling.compiled
    runtime.deactivate()
    from fake_triton.kernels import add

    add.cache.clear()
    for jit in (add.fn,):
        jit.device_caches.clear()
    gpu.benchmarks = 0
    runtime, _ = _rounds(gpu, threads=1)
    assert many == runtime.compiling.compiled


@isolated
def test_threads_work_on_the_device_of_their_caller(gpu: Any) -> None:
    from fla_safe.runtime.launching.ahead import Ahead

    seen: list[int] = []
    gpu.set_device(1)
    Ahead(3)([lambda: seen.append(gpu.current_device())] * 6)
    assert seen == [1] * 6


@isolated
def test_an_error_of_one_task_does_not_stop_the_others(gpu: Any) -> None:
    from fla_safe.runtime.launching.ahead import Ahead

    seen: list[int] = []

    def bad() -> None:
        raise ValueError("refused by the compiler")

    Ahead(2)([bad, lambda: seen.append(1), bad, lambda: seen.append(2)])
    assert sorted(seen) == [1, 2]


@pytest.mark.parametrize(("ranks", "share"), [("1", 16), ("8", 2), ("64", 1), ("", 16), ("0", 16), ("x", 16)])
def test_ranks_of_a_host_share_its_processors(monkeypatch: pytest.MonkeyPatch, ranks: str, share: int) -> None:
    from fla_safe.runtime.launching import ahead

    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert ahead.threads_of_this_rank() == share


@isolated
@pytest.mark.parametrize("inside", ["autotuner", "hook"])
def test_a_tuned_kernel_inside_a_tuned_kernel_does_not_deadlock(gpu: Any, inside: str) -> None:
    """The inner one would be tuned in threads, which wait for the round that waits for them."""
    import faulthandler

    import torch

    from fake_triton.kernels import add, halving, tuned_twice
    from fla_safe.runtime import NoWorkingConfigError, RuntimeSettings, activate

    faulthandler.dump_traceback_later(60, exit=True)
    activate(RuntimeSettings(agree=False, compile_threads=4))
    x = torch.zeros(64)
    if inside == "autotuner":
        with pytest.raises(NoWorkingConfigError, match="num_warps"):  # as in Triton, which refuses one in another
            tuned_twice[(1,)](x, x, 64)
        return
    add.fn.add_pre_run_hook(lambda *args, **kwargs: halving[(1,)](x, x, 512, 3))
    add[(1,)](x, x, x, 512, 32)
    assert gpu.launches[-1].kernel == "add"
