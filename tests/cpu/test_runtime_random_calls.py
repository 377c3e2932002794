"""Random calls from several threads: whatever the freeze planned, each launch runs a binary that is right for it."""

import random
import threading
import traceback
from collections.abc import Callable
from typing import Any

from fake_triton.isolated import isolated

POINTERS = {"float32": "*fp32", "float16": "*fp16", "int32": "*i32"}


def _check(binary: Any, named: dict[str, Any]) -> None:
    """Types, constants and assumed alignments of a binary hold for the arguments by name."""
    import torch

    jit = binary.src.fn
    constants = {jit.arg_names[path[0]]: v for path, v in binary.src.constants.items() if len(path) == 1}
    for i, (parameter, kind) in enumerate(zip(jit.params, binary.src.signature.values(), strict=True)):
        name, value = parameter.name, named.get(parameter.name)
        if name not in named or name == "NB":  # what heuristics, configs and defaults give; dead
            continue
        aligned = any(attribute[0] == "tt.divisibility" for attribute in binary.src.attrs.get((i,), []))
        if parameter.is_constexpr or value is None:
            assert constants[name] == value, name
        elif isinstance(value, torch.Tensor):
            assert kind == POINTERS[str(value.dtype).removeprefix("torch.")], name
            assert not aligned or value.data_ptr() % 16 == 0, name
        elif type(value) is float:
            assert kind == "fp32", name
        elif type(value) is bool:
            assert kind == "u1", name
        elif kind == "constexpr":
            assert constants[name] == value == 1, name
        else:
            assert kind == ("i32" if -(2**31) <= value < 2**31 else "i64"), name
            assert not aligned or value % 16 == 0, name


def _caller(seed: int) -> Callable[[], None]:
    """Makes a random call and checks the binary that it ran."""
    import torch

    from fake_triton import kernels

    draw = random.Random(seed)
    integers = (1, 2, 7, 16, 17, 64, 0, -1, -16, 2**31 - 1, 2**31, 2**40, True, False, 100)
    numbers = (0.5, 0.5, 1.0, 0.0, 2, 1, None, True, 3.25)

    def tensor() -> Any:
        dtype = draw.choice((torch.float32, torch.float32, torch.float32, torch.float16, torch.int32))
        shift = draw.choice((0, 0, 0, 1, 2, 4))
        return torch.zeros(64 + shift, dtype=dtype)[shift:]

    def arguments(name: str) -> dict[str, Any]:
        made: dict[str, Any] = {"x": tensor(), "out": tensor(), "n": draw.choice(integers)}
        if name == "add":
            return {"x": made["x"], "y": tensor(), "out": made["out"], "n": made["n"], "width": draw.choice((32, 64))}
        if name == "biased":
            scale, blocks = draw.choice(numbers), draw.randrange(9)
            bias = draw.choice((None, tensor()))
            return {"x": made["x"], "bias": bias, "out": made["out"], "scale": scale, "n": made["n"], "NB": blocks}
        if name == "helped":
            return made | {"n": draw.choice((5, 16, 999, 1000, 2**33)), "NB": draw.randrange(9), "BLOCK": 64}
        if name == "defaulted":
            return made | draw.choice(({}, {"offset": draw.choice(integers)}, {"BLOCK": 32}))
        if name == "scaled":
            return made | {"factor": draw.choice(numbers), "BLOCK": 64}
        return made | {"BLOCK": draw.choice((32, 64))}

    def call() -> None:
        name = draw.choice(("add", "biased", "plain", "scaled", "helped", "defaulted"))
        named = arguments(name)
        grid = draw.choice(((1,), (2, 3), [4], lambda meta: (meta["BLOCK"],), lambda meta: (1, abs(meta["n"]) % 9)))
        cut = draw.choice((0, 2, 3))
        items = list(named.items())
        binary = getattr(kernels, name)[grid](*(value for _, value in items[:cut]), **dict(items[cut:]))
        _check(binary, named)
        if name == "helped":
            constants = {binary.src.fn.arg_names[path[0]]: v for path, v in binary.src.constants.items()}
            assert (constants["LONG"], constants["MANY"]) == (named["n"] >= 1000, named["NB"] > 4)

    return call


@isolated
def test_every_launch_runs_a_binary_that_is_right_for_it(gpu: Any) -> None:
    from fla_safe.runtime import RuntimeSettings, activate

    runtime = activate(RuntimeSettings(guard="warn", agree=False))
    call = _caller(0)
    with runtime.warmup():
        for _ in range(60):
            call()
    runtime.freeze()
    failures: list[str] = []

    def body(seed: int) -> None:
        own = _caller(seed)
        try:
            for _ in range(100):
                own()
        except Exception:
            failures.append(traceback.format_exc())

    threads = [threading.Thread(target=body, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert runtime.counters()["unplanned_launches"] < len(gpu.launches) - 100, "some calls were planned"
