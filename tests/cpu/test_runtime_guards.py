"""After the freeze no call runs a binary that was compiled for another kind of call, whatever makes the difference."""

from typing import Any

import pytest

from fake_triton.isolated import isolated


def _runtime(**settings: Any) -> Any:
    from fla_safe.runtime import RuntimeSettings, activate

    return activate(RuntimeSettings(**{"guard": "warn", "audit": "process", **settings}))


def _floats(count: int, shift: int = 0) -> Any:
    """`count` float32 numbers that start `4 * shift` bytes after a 16-byte boundary."""
    import torch

    return torch.zeros(count + shift, dtype=torch.float32)[shift:]


def _constants(binary: Any) -> dict[str, Any]:
    names = binary.src.fn.arg_names
    return {names[path[0]]: getattr(value, "value", value) for path, value in binary.src.constants.items()}


def _kinds(gpu: Any, call: Any) -> list[str]:
    """Types of the one launch's arguments, as the compiler was told."""
    gpu.launches.clear()
    call()
    (launch,) = gpu.launches
    kinds: list[str] = eval(launch.specialisation)
    return kinds


@isolated
def test_a_value_of_another_python_type_does_not_run_the_planned_binary(gpu: Any) -> None:
    """1, 1.0 and True are one key of a dictionary."""
    from fake_triton.kernels import biased, scaled

    x, out = _floats(64), _floats(64)
    runtime = _runtime()
    with runtime.warmup():
        scaled[(1,)](x, out, 64, 2, BLOCK=64)
        biased[(1,)](x, None, out, 0.5, 100, NB=1)
    runtime.freeze()
    for _ in range(2):
        assert _kinds(gpu, lambda: scaled[(1,)](x, out, 64, 2.0, BLOCK=64))[3] == "fp32"
        assert _kinds(gpu, lambda: scaled[(1,)](x, out, 64, True, BLOCK=64))[3] == "u1"
        assert _kinds(gpu, lambda: scaled[(1,)](x, out, 64, 2, BLOCK=64))[3] == "i32"
        assert _kinds(gpu, lambda: biased[(1,)](x, None, out, 3, 100, NB=1))[3] == "i32"
        assert _kinds(gpu, lambda: biased[(1,)](x, None, out, None, 100, NB=1))[3] == "constexpr"


@isolated
@pytest.mark.parametrize("number", [2**33, 2**63, -(2**40)])
def test_numbers_beyond_32_bits_are_not_cut_when_a_pointer_is_misaligned(gpu: Any, number: int) -> None:
    from fake_triton.kernels import plain

    out = _floats(64)
    runtime = _runtime()
    with runtime.warmup():
        kind = _kinds(gpu, lambda: plain[(1,)](_floats(64), out, number, BLOCK=64))[2]
    assert kind in {"i64", "u64"}
    runtime.freeze()
    assert _kinds(gpu, lambda: plain[(1,)](_floats(64, 1), out, number, BLOCK=64))[2] == kind
    assert gpu.launches[0].arguments[2] == number


@isolated
def test_arguments_that_are_left_out_have_their_defaults(gpu: Any) -> None:
    from fake_triton.kernels import defaulted

    x, out = _floats(64), _floats(64)

    def grid(meta: Any) -> Any:
        return (meta["n"] // meta["BLOCK"],)

    def calls() -> list[Any]:
        gpu.launches.clear()
        defaulted[(1,)](x, out, 15)
        defaulted[(1,)](x, out, 15, 48)
        defaulted[grid](x, out, 256, 48, BLOCK=32)
        defaulted[grid](x, out, 256, 48)
        return list(gpu.launches)

    stock = calls()
    assert [launch.arguments[3] for launch in stock] == [32, 48, 48, 48]
    assert [launch.grid[0] for launch in stock] == [1, 1, 8, 4]
    runtime = _runtime()
    with runtime.warmup():
        calls()
    runtime.freeze()
    for _ in range(2):
        assert calls() == stock


@isolated
def test_heuristics_see_what_the_caller_gave_however_they_read_it(gpu: Any) -> None:
    from fake_triton.kernels import helped

    x, out = _floats(64), _floats(64)
    runtime = _runtime()

    def seen(n: int, blocks: int) -> tuple[bool, bool]:
        found = _constants(helped[(1,)](x, out, n, NB=blocks, BLOCK=64))
        return found["LONG"], found["MANY"]

    cases = {(15, 1): (False, False), (15, 5): (False, True)}
    with runtime.warmup():
        assert {case: seen(*case) for case in cases} == cases
    runtime.freeze()
    cases |= {(5000, 1): (True, False), (16, 5): (False, True), (1000, 9): (True, True)}
    for _ in range(2):
        assert {case: seen(*case) for case in cases} == cases


@isolated
def test_hooks_of_configs_run_before_every_call_and_see_what_the_caller_gave(gpu: Any) -> None:
    from fake_triton.kernels import HOOKED, hooked

    x, out = _floats(64), _floats(64)
    runtime = _runtime()
    with runtime.warmup():
        hooked[(1,)](x, out, 15, FLAG=5)
    assert set(HOOKED) == {5}
    runtime.freeze()
    HOOKED.clear()
    hooked[(1,)](x, out, 15, FLAG=5)
    assert HOOKED == [5]


@isolated
def test_a_kernel_first_called_after_the_freeze_is_examined_like_any_other(gpu: Any) -> None:
    from fake_triton.kernels import odd_heuristic, plain

    out, narrow, wide = _floats(64), _floats(64), _floats(128)[::2]
    runtime = _runtime()
    runtime.freeze()
    for _ in range(2):
        assert _constants(odd_heuristic[(1,)](narrow, out, 64, BLOCK=64))["WIDE"] is False
        assert _constants(odd_heuristic[(1,)](wide, out, 64, BLOCK=64))["WIDE"] is True
        plain[(1,)](narrow, out, 64, BLOCK=64)
    assert "odd_heuristic" in str(runtime.report()["launches"]["indirect"])
    assert "plain" in str(runtime.report()["launches"]["planned"])
    assert runtime.counters()["late_compiles"] == 3


@isolated
def test_a_general_binary_stands_in_only_for_the_same_constants(gpu: Any) -> None:
    import triton.language as tl

    from fake_triton.kernels import applied, paired, shift_by

    runtime = _runtime()
    x, out = _floats(64, 1), _floats(64, 1)
    three, five = shift_by(tl.constexpr(3)), shift_by(tl.constexpr(5))
    with runtime.warmup():
        paired[(1,)]((x, tl.constexpr(3)), out, BLOCK=64)
        applied[(1,)](x, out, FUNCTION=three, BLOCK=64)
    runtime.freeze()
    binary = paired[(1,)]((x, tl.constexpr(5)), out, BLOCK=64)
    assert [getattr(v, "value", v) for path, v in binary.src.constants.items() if len(path) > 1] == [5]
    assert _constants(applied[(1,)](x, out, FUNCTION=five, BLOCK=64))["FUNCTION"] is five


@isolated
def test_kernels_that_are_not_ours_compile_what_they_need_after_the_freeze(gpu: Any) -> None:
    from fake_triton.kernels import plain

    runtime = _runtime(guard="strict", guarded=("another.library",))
    with runtime.warmup():
        plain[(1,)](_floats(64, 1), _floats(64, 1), 7, BLOCK=64)
    runtime.freeze()
    binary = plain[(1,)](_floats(64), _floats(64), 64, BLOCK=64)
    assert any(binary.src.attrs.values()), "it does not assume the alignment that it has"
    assert runtime.counters()["served_general"] == runtime.counters()["late_compiles"] == 0


@isolated
def test_a_kernel_without_its_python_function_loads(gpu: Any) -> None:
    """As Inductor's kernels are when torch.compile loads them: it has sent them through a pickle."""
    from fake_triton.kernels import scaled

    runtime = _runtime()
    with runtime.warmup():
        scaled[(1,)](_floats(64), _floats(64), 64, 2, BLOCK=64)
    (binary,) = next(iter(scaled.device_caches.values()))[0].values()
    function, scaled.fn, binary.module = scaled.fn, None, None
    try:
        binary._init_handles()
    finally:
        scaled.fn = function
    assert binary.module is not None
