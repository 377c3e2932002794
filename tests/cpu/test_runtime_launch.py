"""After the freeze every call reaches the device exactly as Triton would have sent it, or takes Triton's own path."""

from typing import Any

import pytest

from fake_triton.isolated import isolated


def _runtime(**settings: Any) -> Any:
    from fla_safe.runtime import RuntimeSettings, activate

    return activate(RuntimeSettings(**{"guard": "strict", "audit": "process", **settings}))


def _on(tensor: Any, device: int) -> Any:
    """The tensor, claiming to lie on a GPU."""
    import torch

    class OnGpu(torch.Tensor):
        def get_device(self) -> int:
            return device

    return tensor.as_subclass(OnGpu)


def _floats(count: int, shift: int = 0) -> Any:
    """`count` float32 numbers that start `4 * shift` bytes after a 16-byte boundary."""
    import torch

    return torch.zeros(count + shift, dtype=torch.float32)[shift:]


def _seen(gpu: Any, call: Any) -> Any:
    gpu.launches.clear()
    call()
    (launch,) = gpu.launches
    return launch


@isolated
def test_planned_calls_arrive_as_triton_sends_them(gpu: Any) -> None:
    import triton

    from fake_triton.kernels import add, biased, plain

    x, y, out = _floats(512), _floats(512), _floats(512)

    def grid(meta: Any) -> Any:
        return (triton.cdiv(512, meta["BLOCK"]), 2)

    calls = {
        "keywords": lambda: add[grid](x=x, y=y, out=out, n=512, width=32),
        "by position": lambda: add[grid](x, y, out, 512, 32),
        "mixed": lambda: add[grid](x, y, out, n=512, width=32),
        "grid reads an argument": lambda: add[lambda meta: (meta["n"], meta["BLOCK"])](x, y, out, 512, 32),
        "grid asks with get": lambda: add[lambda meta: (meta.get("n", 0), 1, 3)](x, y, out, 512, 32),
        "grid is a list": lambda: add[[5, 6]](x, y, out, 512, 32),
        "no bias": lambda: biased[(3,)](x, None, out, 0.5, 100, NB=7),
        "bias": lambda: biased[(3,)](x, y, out, 0.5, 100, NB=9),
        "grid reads the dead constant": lambda: biased[lambda meta: (meta["NB"],)](x, y, out, 0.5, 100, NB=9),
        "no autotuner": lambda: plain[(1,)](x, out, 512, BLOCK=64),
        "options": lambda: plain[(1,)](x, out, 512, BLOCK=64, num_warps=8),
        "a one": lambda: plain[(1,)](x, out, 1, BLOCK=64),
    }
    runtime = _runtime()
    with runtime.warmup():
        before = {name: _seen(gpu, call) for name, call in calls.items() if call() or True}
    runtime.freeze()
    for name, call in calls.items():
        assert _seen(gpu, call) == before[name], name
    # The second time round nothing takes Triton's path (the first time a grid function may turn out to need arguments).
    misses = runtime.counters()["unplanned_launches"]
    for call in calls.values():
        call()
    assert runtime.counters()["unplanned_launches"] == misses == 0
    assert not any(runtime.counters()[k] for k in ("late_tunes", "late_compiles", "file_ops"))


@isolated
def test_stock_triton_sends_the_same(gpu: Any) -> None:
    """The reference of the test above is Triton with us active; here it is Triton alone."""
    from fake_triton.kernels import add, plain

    x, y, out = _floats(512), _floats(512), _floats(512)
    plain[(2,)](x, out, 100, BLOCK=64)
    add[(4,)](x, y, out, 96, 32)
    calls = [lambda: plain[(2,)](x, out, 100, BLOCK=64), lambda: add[(4,)](x, y, out, 96, 32)]
    stock = [_seen(gpu, call) for call in calls]
    from fla_safe.runtime.tuning.decisions import Decision, DecisionTable, Stamp, TuningKey

    table = DecisionTable(Stamp.current())
    dtypes = {"x": x.dtype, "y": y.dtype, "out": out.dtype}
    table.put(TuningKey.of("fake_triton.kernels.add", {"width": 32}, dtypes), Decision.from_config(add.best_config))
    runtime = _runtime(table=table)
    for call in calls:
        call()
    assert runtime.tuning.rounds == 0
    runtime.freeze()
    assert [_seen(gpu, call) for call in calls] == stock
    runtime.deactivate()
    assert [_seen(gpu, call) for call in calls] == stock


@isolated
@pytest.mark.parametrize("shifts", [(1, 0, 0), (0, 1, 0), (0, 2, 3), (1, 1, 1)], ids=str)
def test_misaligned_pointers_get_a_binary_that_assumes_nothing(gpu: Any, shifts: list[int]) -> None:
    from fake_triton.kernels import add

    runtime = _runtime()
    with runtime.warmup():
        add[(1,)](_floats(512), _floats(512), _floats(512), 512, 32)
    runtime.freeze()
    compiled = len(gpu.compiled)
    x, y, out = (_floats(512, s) for s in shifts)
    assert any(t.data_ptr() % 16 for t in (x, y, out))
    launch = _seen(gpu, lambda: add[(1,)](x, y, out, 512, 32))
    assert launch.arguments[:3] == (x.data_ptr(), y.data_ptr(), out.data_ptr())
    assert launch.arguments[3:] == (512, 32)
    binary = add[(1,)](x, y, out, 512, 32)
    assert not any(v for v in binary.src.attrs.values()), "the binary assumes an alignment"
    usual = add[(1,)](_floats(512), _floats(512), _floats(512), 512, 32)
    assert any(v for v in usual.src.attrs.values())
    assert len(gpu.compiled) == compiled
    assert runtime.counters()["late_compiles"] == 0


@isolated
def test_a_new_class_of_integers_after_the_freeze_is_not_compiled(gpu: Any) -> None:
    from fake_triton.kernels import add

    x, y, out = _floats(512), _floats(512), _floats(512)
    runtime = _runtime()
    with runtime.warmup():
        add[(1,)](x, y, out, 512, 32)
    runtime.freeze()
    for n in (1, 2, 15, 16, 17, 511, 513, 2**31 - 1):
        launch = _seen(gpu, lambda n=n: add[(1,)](x, y, out, n, 32))
        assert launch.arguments[3] == n
        again = _seen(gpu, lambda n=n: add[(1,)](x, y, out, n, 32))
        assert again == launch
    counters = runtime.counters()
    assert counters["late_compiles"] == counters["late_tunes"] == counters["file_ops"] == 0
    assert counters["served_general"] > 0


@isolated
def test_numbers_that_change_with_every_call_do_not_cost_a_launcher_each(gpu: Any) -> None:
    """Each is a class of its own: memory and time must not grow with the steps of a job."""
    from fake_triton.kernels import plain
    from fla_safe.runtime.launching import launch

    x, out = _floats(64), _floats(64)
    runtime = _runtime()
    with runtime.warmup():
        plain[(1,)](x, out, 16, BLOCK=64)
    runtime.freeze()
    made, generate = [], launch.generate

    def counted(*args: Any, **options: Any) -> Any:
        made.append(1)
        return generate(*args, **options)

    launch.generate = counted
    for n in range(1, 500):
        assert _seen(gpu, lambda n=n: plain[(1,)](x, out, 16 * n, BLOCK=64)).arguments[2] == 16 * n
    assert len(made) <= 64
    runtime.launching.misses = 0
    plain[(1,)](x, out, 16, BLOCK=64)
    assert runtime.counters()["unplanned_launches"] == 0


@isolated
def test_integers_beyond_32_bits_are_not_cut(gpu: Any) -> None:
    from fake_triton.kernels import biased
    from fla_safe.runtime import LateCompileError

    x, out = _floats(512), _floats(512)
    runtime = _runtime()
    with runtime.warmup():
        biased[(1,)](x, None, out, 0.5, 100, NB=1)
    runtime.freeze()
    assert _seen(gpu, lambda: biased[(1,)](x, None, out, 0.5, 2**31 - 1, NB=1)).arguments[-1] == 2**31 - 1
    assert _seen(gpu, lambda: biased[(1,)](x, None, out, 0.5, -5, NB=1)).arguments[-1] == -5
    with pytest.raises(LateCompileError, match="i64"):
        biased[(1,)](x, None, out, 0.5, 2**31, NB=1)
    runtime.guard.mode = "warn"
    launch = _seen(gpu, lambda: biased[(1,)](x, None, out, 0.5, 2**31, NB=1))
    assert launch.arguments[-1] == 2**31
    assert "i64" in launch.specialisation


@isolated
def test_another_dtype_or_none_pattern_never_runs_the_planned_binary(gpu: Any) -> None:
    import torch

    from fake_triton.kernels import biased, plain
    from fla_safe.runtime import LateCompileError, LateTuneError

    x, out = _floats(512), _floats(512)
    runtime = _runtime()
    with runtime.warmup():
        plain[(1,)](x, out, 512, BLOCK=64)
        biased[(1,)](x, None, out, 0.5, 100, NB=1)
    runtime.freeze()
    with pytest.raises(LateCompileError, match="plain"):
        plain[(1,)](x.to(torch.float16), out, 512, BLOCK=64)
    with pytest.raises(LateCompileError, match="plain"):
        plain[(1,)](x, out, 512, BLOCK=128)
    with pytest.raises(LateTuneError, match="HAS_BIAS=True"):
        biased[(1,)](x, x, out, 0.5, 100, NB=1)
    assert runtime.counters()["late_compiles"] == 2
    assert runtime.counters()["late_tunes"] == 1
    assert gpu.launches[-1].kernel == "biased"


@isolated
def test_each_device_has_its_own_binary(gpu: Any) -> None:
    from fake_triton.kernels import plain
    from fla_safe.runtime import LateCompileError

    runtime = _runtime()
    made = [(_on(_floats(64), d), _on(_floats(64), d)) for d in range(3)]
    with runtime.warmup():
        plain[(1,)](*made[0], 64, BLOCK=64)
    runtime.freeze(devices=(0, 1))
    loaded = gpu.loaded
    binaries = []
    for device in (0, 1):
        gpu.set_device(device)
        binaries.append(plain[(1,)](*made[device], 64, BLOCK=64))
        assert (gpu.launches[-1].device, gpu.launches[-1].stream) == (device, 7000 + device)
    assert binaries[0] is not binaries[1]
    assert gpu.loaded == loaded
    assert runtime.counters()["unplanned_launches"] == 0
    # Tensors of another device than the current one are not launched blindly: Triton's own path judges them.
    gpu.set_device(0)
    plain[(1,)](*made[1], 64, BLOCK=64)
    assert runtime.counters()["unplanned_launches"] == 1
    gpu.set_device(2)
    with pytest.raises(LateCompileError, match="device 2"):
        plain[(1,)](*made[2], 64, BLOCK=64)


@isolated
@pytest.mark.parametrize("installed", ["enter", "exit", "replaced", "pre_run"])
def test_launch_hooks_are_called_even_when_installed_after_the_freeze(gpu: Any, installed: str) -> None:
    from triton import knobs

    from fake_triton.kernels import plain

    x, out = _floats(64), _floats(64)
    runtime = _runtime()
    with runtime.warmup():
        plain[(1,)](x, out, 64, BLOCK=64)
    runtime.freeze()
    called: list[Any] = []

    def hook(*args: Any, **_: Any) -> None:
        called.append(args)

    plain[(1,)](x, out, 64, BLOCK=64)
    assert not called
    before = knobs.runtime.launch_enter_hook
    if installed == "enter":
        before.add(hook)
    elif installed == "exit":
        knobs.runtime.launch_exit_hook.add(hook)
    elif installed == "replaced":
        knobs.runtime.launch_enter_hook = hook
    else:
        plain.add_pre_run_hook(hook)
    launch = _seen(gpu, lambda: plain[(1,)](x, out, 64, BLOCK=64))
    assert len(called) == 1
    if installed in {"enter", "exit", "replaced"}:
        assert called[0][0].get()["name"] == "plain"
    assert launch.kernel == "plain"
    assert runtime.counters()["late_compiles"] == 0


@isolated
def test_a_heuristic_that_looks_into_tensors_is_asked_on_every_call(gpu: Any) -> None:
    from fake_triton.kernels import odd_heuristic

    out, x = _floats(64), _floats(64)
    wide = _floats(128)[::2]
    runtime = _runtime()
    with runtime.warmup():
        for tensor in (x, wide):
            odd_heuristic[(1,)](tensor, out, 64, BLOCK=64)
    runtime.freeze()
    names = {(False,): x, (True,): wide}
    for expected, tensor in names.items():
        binary = odd_heuristic[(1,)](tensor, out, 64, BLOCK=64)
        constants = {odd_heuristic.arg_names[k[0]]: v for k, v in binary.src.constants.items()}
        assert constants["WIDE"] is expected[0]
    assert "real arguments" in runtime.report()["launches"]["indirect"]["fake_triton.kernels.odd_heuristic"]
    assert runtime.counters()["late_compiles"] == 0


@isolated
def test_wrong_calls_fail_as_in_triton(gpu: Any) -> None:
    from fake_triton.kernels import add, plain

    x, out = _floats(64), _floats(64)
    wrong = {
        "missing argument": lambda: plain[(1,)](x, out, BLOCK=64),
        "unknown keyword": lambda: plain[(1,)](x, out, 64, BLOCK=64, nonsense=1),
        "too many": lambda: plain[(1,)](x, out, 64, 64, 1, 2),
        "config argument given twice": lambda: add[(1,)](x, x, out, 64, 32, BLOCK=64),
    }
    plain[(1,)](x, out, 64, BLOCK=64)
    add[(1,)](x, x, out, 64, 32)

    def failure(call: Any) -> Any:
        try:
            call()
        except Exception as error:
            return type(error), str(error)
        return None

    stock = {name: failure(call) for name, call in wrong.items()}
    runtime = _runtime()
    with runtime.warmup():
        plain[(1,)](x, out, 64, BLOCK=64)
        add[(1,)](x, x, out, 64, 32)
    runtime.freeze()
    assert all(stock.values())
    for name, call in wrong.items():
        assert failure(call) == stock[name], name


@isolated
def test_parameter_names_cannot_shadow_the_launcher(gpu: Any) -> None:
    import importlib.util
    import os
    import sys
    import tempfile

    source = (
        "import triton\nimport triton.language as tl\n@triton.jit\n"
        "def shadow(grid, device, key, n, run, miss, meta, usual, variant: tl.constexpr):\n"
        "    tl.store(grid + n, tl.load(device + n) + key + run + miss + meta + usual)\n"
    )
    path = os.path.join(tempfile.mkdtemp(), "shadow_kernels.py")
    with open(path, "w") as file:
        file.write(source)
    spec = importlib.util.spec_from_file_location("shadow_kernels", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["shadow_kernels"] = module
    spec.loader.exec_module(module)
    x = _floats(64)

    def call() -> None:
        module.shadow[(2, 3, 4)](x, x, 2, 3, 4, 5, 6, 7, variant=8)

    runtime = _runtime()
    with runtime.warmup():
        call()
        expected = _seen(gpu, call)
    runtime.freeze()
    assert _seen(gpu, call) == expected
    assert runtime.counters()["unplanned_launches"] == 0
