"""A config whose results do not repeat is found out, and what it wrote is put back."""

import threading

import pytest
import torch

from fla_safe.runtime.tuning.decisions import TuningKey
from fla_safe.runtime.tuning.repeats import RepeatCheck, same_bits

KEY = TuningKey("m.k", ())


def test_the_same_bits_are_the_same_bits():
    zero, nan = torch.tensor([0.0]), torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(torch.ones(2), torch.ones(2, 1))
    assert not same_bits(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert same_bits(torch.ones(0), torch.ones(0))


def judge_addition(launch, named, **options):
    return RepeatCheck(**options)(KEY, None, launch, named)


def test_repeat_check_accepts_and_restores_in_place_updates():
    x = torch.arange(4.0)
    state = torch.zeros(4)
    assert judge_addition(lambda: state.add_(x), {"x": x, "state": state, "n": 4, "none": None}) is None
    assert torch.equal(state, torch.zeros(4))


def test_repeat_check_sees_one_bit_in_repeat_20_but_not_what_equals_nan():
    y, count = torch.zeros(4), iter(range(100))

    def launch():
        y.fill_(float("nan"))
        if next(count) == 20:
            y[2] = 1.0

    assert judge_addition(launch, {"y": y}) == "not reproducible: y of repeat 20 has other bits"
    assert judge_addition(lambda: y.fill_(float("nan")), {"y": y}) is None


def test_repeat_check_asks_the_oracle_first():
    y = torch.zeros(4)
    check = lambda key, named: None if bool((named["y"] == 2).all()) else "y is not 2"  # noqa: E731
    assert judge_addition(lambda: y.fill_(1), {"y": y}, check=check) == "wrong: y is not 2"
    assert judge_addition(lambda: y.fill_(2), {"y": y}, check=check) is None


def test_repeat_check_restores_after_an_exception_and_leaves_expanded_inputs_alone():
    y, one = torch.zeros(4), torch.ones(1).expand(4)

    def launch():
        y.add_(one)
        raise RuntimeError("launch failed")

    with pytest.raises(RuntimeError):
        judge_addition(launch, {"y": y, "one": one})
    assert torch.equal(y, torch.zeros(4))


def test_repeat_check_in_threads():
    results = []

    def work():
        y = torch.zeros(64)
        results.append(judge_addition(lambda: y.add_(1), {"y": y}))

    threads = [threading.Thread(target=work) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert results == [None] * 8
