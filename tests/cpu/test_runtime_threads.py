"""Many threads and devices on one autotuner. Each test has a twin that shows plain Triton failing it."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from fake_triton.isolated import isolated

BOTH = pytest.mark.parametrize("ours", [True, False], ids=["ours", "plain Triton"])


def _activate(ours: bool) -> Any:
    if not ours:
        return None
    from fla_safe.runtime import RuntimeSettings, activate

    return activate(RuntimeSettings(guard="warn"))


def _together(*bodies: Callable[[], None]) -> list[BaseException]:
    """Run one thread each, on devices 0, 1, ...; returns what they raised."""
    from triton.runtime import driver

    failures: list[BaseException] = []
    start = threading.Barrier(len(bodies))

    def thread(device: int, body: Callable[[], None]) -> None:
        driver.active.set_current_device(device)
        start.wait(20)
        try:
            body()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=thread, args=item, daemon=True) for item in enumerate(bodies)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads), "a thread hangs"
    return failures


def _benchmarker(bench: Callable[..., list[float]]) -> None:
    from triton.runtime import driver

    driver.active.get_benchmarker = lambda: bench


@isolated
@BOTH
def test_a_warm_hit_neither_waits_for_nor_disturbs_another_threads_tuning(gpu: Any, ours: bool) -> None:
    """Triton: the hit sets `nargs` to None, and the tuning dies of `'NoneType' object is not a mapping`."""
    import torch

    from fake_triton.kernels import add

    _activate(ours)
    x = torch.zeros(512)
    add[(1,)](x, x, x, 512, 32)
    tuning, hit = threading.Event(), threading.Event()
    order: list[str] = []

    def bench(call: Any, **_: Any) -> list[float]:
        call()
        tuning.set()
        assert hit.wait(30), "the warm hit waited for the tuning"
        return [1.0] * 3

    add.__dict__.pop("do_bench", None)
    _benchmarker(bench)

    def cold() -> None:
        add[(1,)](x, x, x, 512, 64)
        order.append("tuned")

    def warm() -> None:
        assert tuning.wait(30)
        for _ in range(20):
            add[(1,)](x, x, x, 512, 32)
        order.append("hit")
        hit.set()

    failures = _together(cold, warm)
    if ours:
        assert not failures
        assert order == ["hit", "tuned"]
    else:
        assert ["NoneType" in str(f) for f in failures] == [True]


@isolated
@BOTH
def test_hooks_see_the_tensors_of_their_own_call(gpu: Any, ours: bool) -> None:
    """Triton: a hook gets the arguments of whichever call came last, and zeroes or restores another call's tensors."""
    import torch

    from fake_triton.kernels import zeroing

    _activate(ours)
    wrong: list[str] = []
    turn = threading.Barrier(2)
    mine = threading.local()

    class Owned(torch.Tensor):
        def zero_(self) -> Any:
            if self.data_ptr() != mine.total.data_ptr():
                wrong.append("zeroed")
            return super().zero_()

        def clone(self, *args: Any, **kwargs: Any) -> Any:
            if self.data_ptr() != mine.state.data_ptr():
                wrong.append("saved")
            return super().clone(*args, **kwargs)

        def copy_(self, other: Any, *args: Any) -> Any:
            if self.data_ptr() != mine.state.data_ptr():
                wrong.append("restored")
            return super().copy_(other, *args)

    def bench(call: Any, **_: Any) -> list[float]:
        if not ours:  # ours tunes one key at a time; plain Triton needs help to interleave every time
            with contextlib.suppress(threading.BrokenBarrierError):
                turn.wait(2)
        call()
        return [1.0] * 3

    _benchmarker(bench)

    def body(first: int) -> Callable[[], None]:
        def run() -> None:
            for n in range(first, first + 8):
                mine.total = torch.zeros(4).as_subclass(Owned)
                mine.state = torch.zeros(64).as_subclass(Owned)
                zeroing[(1,)](torch.zeros(64), mine.total, mine.state, n)

        return run

    failures = _together(body(1000), body(2000))
    if ours:
        assert not failures
        assert not wrong
    else:
        assert wrong or failures


@isolated
@BOTH
def test_a_winner_is_stored_under_the_key_it_was_measured_for(gpu: Any, ours: bool) -> None:
    """Triton writes `configs_timings` of the last tuning under the key of the one that is being stored."""
    import glob
    import json
    import os

    import torch

    from fake_triton.kernels import CONFIGS, add

    runtime = _activate(ours)
    add.cache_results = True
    x = torch.zeros(512)
    a_done, b_done = threading.Event(), threading.Event()
    counts: dict[str, int] = {}
    role = threading.local()

    def bench(call: Any, **_: Any) -> list[float]:
        call()
        i = counts[role.name] = counts.get(role.name, -1) + 1
        if role.name == "A" and i == len(CONFIGS) - 1:
            a_done.set()
            b_done.wait(5 if ours else 30)
        return [float(i + 1 if role.name == "A" else len(CONFIGS) - i)] * 3  # A: first wins, B: last wins

    def tune_a() -> None:
        role.name = "A"
        add[(1,)](x, x, x, 512, 32)

    def tune_b() -> None:
        role.name = "B"
        a_done.wait(30)
        add[(1,)](x, x, x, 512, 64)
        b_done.set()

    if not ours:  # hold A between its measurement and its store, as a slow disk would
        stock = add.check_disk_cache

        def slow(key: Any, configs: Any, bench_fn: Callable[[], None]) -> Any:
            def measured() -> None:
                bench_fn()
                if role.name == "A":
                    a_done.set()
                    b_done.wait(30)

            return stock(key, configs, measured)

        add.check_disk_cache = slow

        def quick(call: Any, **_: Any) -> list[float]:
            call()
            i = counts[role.name] = counts.get(role.name, -1) + 1
            return [float(i + 1 if role.name == "A" else len(CONFIGS) - i)] * 3

        _benchmarker(quick)
    else:
        _benchmarker(bench)
    failures = _together(tune_a, tune_b)
    if ours:
        assert not failures
        winners = {key.parts[0]: runtime.table.get(key) for key in runtime.table}
        assert dict(winners["width=32"].kwargs)["BLOCK"] == 64
        assert dict(winners["width=64"].kwargs)["BLOCK"] == 256
        return
    stored = {}
    for path in glob.glob(os.environ["TRITON_CACHE_DIR"] + "/*/*.autotune.json"):
        with open(path) as file:
            data = json.load(file)
        stored[data["key"][0]] = min(data["configs_timings"], key=lambda pair: pair[1])[0]["kwargs"]["BLOCK"]
    assert stored.get(32) == 256, "plain Triton did not show the fault this test is for"


@isolated
def test_one_key_is_tuned_once_and_one_binary_compiled_once(gpu: Any) -> None:
    import torch

    from fake_triton.kernels import CONFIGS, add

    runtime = _activate(True)
    x = torch.zeros(512)

    def body() -> None:
        gpu.set_device(0)
        for width in (32, 64, 32):
            add[(1,)](x, x, x, 512, width)

    assert not _together(*[body] * 8)
    assert gpu.benchmarks == 2 * len(CONFIGS)
    assert len(gpu.compiled) == len(CONFIGS)  # both widths are multiples of 16: one class
    assert len(runtime.table) == 2


@isolated
def test_frozen_kernels_from_eight_threads_on_eight_devices(gpu: Any) -> None:
    import torch

    from fake_triton.kernels import add, biased, zeroing

    runtime = _activate(True)
    x = torch.zeros(512)
    with runtime.warmup():
        for width in (32, 64):
            add[(1,)](x, x, x, 512, width)
        biased[(1,)](x, None, x, 0.5, 100, NB=1)
        zeroing[(1,)](x, torch.zeros(4), torch.zeros(64), 64)
    runtime.freeze("strict", devices=range(8))
    compiled = len(gpu.compiled)
    gpu.launches.clear()

    def body(number: int) -> Callable[[], None]:
        def run() -> None:
            own = torch.zeros(512 + 4 * number)
            for i in range(50):
                add[(1,)](own, own, own, 16 + 16 * i, 32 if i % 2 else 64)
                biased[(1,)](own, None, own, 0.5, 100 + i, NB=i)
                zeroing[(1,)](own, own, own, 64)
            launches = [launch for launch in gpu.launches if launch.arguments[0] == own.data_ptr()]
            assert len(launches) == 150
            assert {launch.device for launch in launches} == {number}
            assert {launch.stream for launch in launches} == {7000 + number}
            kept.append(own)

        return run

    kept: list[Any] = []  # so that no address is used twice
    assert not _together(*(body(i) for i in range(8)))
    assert len(gpu.launches) == 1200
    assert len(gpu.compiled) == compiled
    counters = runtime.counters()
    assert counters["late_tunes"] == counters["late_compiles"] == 0


@isolated
def test_calls_during_the_freeze_neither_break_it_nor_stay_without_a_plan(gpu: Any) -> None:
    import torch

    from fake_triton.kernels import plain
    from fla_safe.runtime.launching import plans

    runtime = _activate(True)
    x = torch.zeros(512)
    build, called = plans.build, iter(range(3, 1000))
    numbers = [1, 2]

    def call(number: int) -> None:
        """Each number is a class of its own."""
        plain[(1,)](x, x, 16 * number, BLOCK=64)

    def build_while_another_thread_calls(*args: Any) -> Any:
        if len(numbers) < 20:
            numbers.append(next(called))
            assert not _together(lambda: call(numbers[-1]))
        return build(*args)

    plans.build = build_while_another_thread_calls
    with runtime.warmup():
        call(1)
        call(2)
    runtime.freeze()
    assert len(numbers) > 2
    for turn in range(2):
        runtime.launching.misses = 0
        for number in numbers:
            call(number)
        assert turn == 0 or runtime.counters()["unplanned_launches"] == 0
    assert runtime.counters()["late_compiles"] == 0


@isolated
def test_strict_in_a_backward_pass_is_the_callers_named_error_and_leaves_nothing_locked(gpu: Any) -> None:
    import torch

    from fake_triton.kernels import add, plain
    from fla_safe.runtime import LateCompileError, LateTuneError

    runtime = _activate(True)
    with runtime.warmup():
        add[(1,)](torch.zeros(64), torch.zeros(64), torch.zeros(64), 64, 32)
        plain[(1,)](torch.zeros(64), torch.zeros(64), 64, BLOCK=64)
    runtime.freeze("strict")

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, launch: Any) -> Any:
            ctx.launch = launch
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            ctx.launch(grad)
            return grad, None

    def tune(grad: Any) -> None:
        add[(1,)](grad, grad, grad, 64, 4096)

    def compile_new(grad: Any) -> None:
        plain[(1,)](grad, grad, 64, BLOCK=128)

    def planned(grad: Any) -> None:
        add[(1,)](grad, grad, grad, 64, 32)
        plain[(1,)](grad, grad, 64, BLOCK=64)

    def body() -> None:
        gpu.set_device(0)
        for launch, error in ((tune, LateTuneError), (compile_new, LateCompileError), (planned, None)):
            with pytest.raises(error, match="after the freeze") if error else contextlib.nullcontext():
                Kernel.apply(torch.zeros(64, requires_grad=True), launch).sum().backward()

    assert not _together(*[body] * 4)
    counters = runtime.counters()
    assert (counters["late_tunes"], counters["late_compiles"]) == (4, 4)


@isolated
def test_a_tuned_kernel_inside_another_ones_hook_does_not_deadlock(gpu: Any) -> None:
    import torch
    import triton

    from fake_triton.kernels import add, halving

    _activate(True)
    x = torch.zeros(512)

    def hook(named: dict[str, Any], **_: Any) -> None:
        halving[(1,)](x, x, 512, 3)

    add.pre_hook, add.user_defined_pre_hook = hook, True

    def body() -> None:
        add[(1,)](x, x, x, 512, 32)
        halving[(1,)](x, x, 512, 4)

    assert not _together(body, body, body)
    assert isinstance(add, triton.runtime.autotuner.Autotuner)
