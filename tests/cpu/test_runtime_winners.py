"""Wrong, irreproducible, raising, crashing and hanging configs never win and never take the job down."""

import collections
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from fla_safe.runtime.tuning.decisions import Decision, DecisionTable, Stamp, TuningKey
from fla_safe.runtime.tuning.winners import NoWinnerError, RepeatCheck, TrialError, elect

KEY = TuningKey("m.k", ())
GOOD = Decision((("mode", "good"),))
FACTORY = f"{Path(__file__).stem}:make"

sys.path.insert(0, str(Path(__file__).parent))


class Planted:
    """An "addition" whose config says how it misbehaves; every misbehaving config claims to be the fastest."""

    def __init__(self):
        self.x = torch.arange(8.0)
        self.runs_of = collections.Counter()

    def run(self, decision):
        mode = dict(decision.kwargs)["mode"]
        self.runs_of[mode] += 1
        runs = self.runs_of[mode]
        y = self.x + 1
        if mode == "wrong":
            y[3] = 0
        elif mode == "nan":
            y[3] = float("nan")
        elif mode == "one bit at repeat 15" and runs == 15:
            y[0] = torch.nextafter(y[0], torch.tensor(9.0))
        elif mode == "minus zero at repeat 2":
            y = torch.cat([y, torch.tensor([-0.0 if runs == 2 else 0.0])])
        elif mode == "raises at launch":
            raise RuntimeError("Triton Error [CUDA]: invalid argument")
        elif mode == "segfault":
            ctypes.string_at(0)
        elif mode == "abort":
            os.abort()
        elif mode == "exit":
            os._exit(7)
        elif mode == "hangs":
            while True:
                time.sleep(0.01)
        return [y]

    def check(self, outputs):
        return None if torch.equal(outputs[0][:8], self.x + 1) else f"largest error {(outputs[0] - self.x - 1).max()}"

    def time(self, decision):
        mode = dict(decision.kwargs)["mode"]
        if mode == "raises at compile":
            raise ValueError("operand #2 does not dominate this use")
        if mode == "time is not a number":
            return float("nan")
        if mode == "crash while timed":
            os.kill(os.getpid(), signal.SIGBUS)
        return {"good": 50.0, "slow": 90.0}.get(mode, 1.0)


def make(fail=None):
    if fail:
        raise ImportError(fail)
    print("noise on standard output must not disturb the protocol")
    return Planted()


BAD = {
    "wrong": "wrong: largest error",
    "nan": "wrong",
    "one bit at repeat 15": "not reproducible: output 0 of repeat 14",
    "minus zero at repeat 2": "not reproducible: output 0 of repeat 1",
    "raises at launch": "RuntimeError: Triton Error [CUDA]: invalid argument",
    "raises at compile": "does not dominate",
    "time is not a number": "time",
    "segfault": "was killed by SIGSEGV",
    "abort": "was killed by SIGABRT",
    "exit": "ended the process with status 7",
    "crash while timed": "was killed by SIGBUS",
}


def planted(*modes):
    return [Decision((("mode", m),)) for m in modes]


@pytest.mark.parametrize("modes", [list(BAD)[:7], list(BAD)[7:]], ids=["wrong or raising", "deadly"])
def test_planted_configs_never_win(modes, caplog):
    table = DecisionTable(Stamp("sm_90", "3.8.0", "0.6.0"))
    election = elect(FACTORY, {}, [*planted(*modes, "slow", "good")], start_seconds=100)
    assert election.winner == GOOD
    reasons = {dict(v.decision.kwargs)["mode"]: v.reason for v in election.verdicts}
    assert reasons["good"] is None
    for mode in modes:
        assert BAD[mode] in reasons[mode]
    election.enter(table, KEY)
    assert table.entry(KEY).verified
    assert table.get(KEY) == GOOD
    assert table.entry(KEY).median_us == 50.0
    assert len(caplog.records) == len(modes)


def test_a_hanging_config_is_ended():
    started = time.monotonic()
    election = elect(FACTORY, {}, planted("hangs", "good"), seconds=4, start_seconds=100)
    assert election.winner == GOOD
    assert "did not answer in 4 s" in election.verdicts[0].reason
    assert time.monotonic() - started < 120


def test_no_config_passes():
    with pytest.raises(NoWinnerError, match=r"none of 2 configs.*wrong.*Expected"):
        elect(FACTORY, {}, planted("wrong", "raises at compile"), start_seconds=100)


def test_a_factory_that_fails_is_not_a_configs_fault():
    with pytest.raises(TrialError, match="no such kernel"):
        elect(FACTORY, {"fail": "no such kernel"}, planted("good"), start_seconds=100)


def test_the_child_ends_with_a_killed_parent(tmp_path):
    """A config in an endless loop must not keep a GPU busy after the job was killed."""
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r});"
        "from fla_safe.runtime.tuning import winners, trial_child;"
        "from fla_safe.runtime.tuning.decisions import Decision;"
        f"c = winners._Child({__name__ + ':make'!r}, {{}}, 100); c._start(); print(c._process.pid, flush=True);"
        "c.ask({'do': 'examine', 'decision': Decision((('mode', 'hangs'),)).as_dict(), 'repeats': 1}, 100)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child survived its parent")


# -- inside the job ---------------------------------------------------------------------------------------------------


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
