"""A config that crashes, hangs or kills the device's context costs a child process; the job gets the next best one."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fake_triton.isolated import isolated

BEHAVIOUR: dict[int, str] = {}
"""What a launch with this BLOCK does; empty in the job's own process."""
DEVICE = {"lives": True}


def _misbehave(named: dict[str, Any]) -> None:
    what = BEHAVIOUR.get(named["BLOCK"])
    if what == "abort":
        os.abort()
    elif what == "exit":
        os._exit(7)
    elif what == "hang":
        time.sleep(1000)
    elif what == "raise":
        raise ValueError("operand #2 does not dominate this use")
    elif what == "context":
        DEVICE["lives"] = False
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    elif what == "context at one row" and named["n"] == 1:
        DEVICE["lives"] = False  # as on a GPU: nothing is raised where it happens


def _steps(kernel: Any) -> list[Any]:
    import torch

    from fake_triton.kernels import add

    x = torch.zeros(512)
    # The first call decides; the key of this kernel does not tell the second one from it. The third is innocent.
    return [
        lambda: kernel[(1,)](x, x, 512),
        lambda: kernel[(1,)](x, x, 1),
        lambda: add[(1,)](x, x, x, 512, 32),
    ]


def work(behaviour: dict[str, str], fail: str = "", compiler: str = "") -> Any:
    """The child's factory."""
    import fake_triton
    from fla_safe.runtime.tuning import autotune, tuning_child

    if fail:
        raise ImportError(fail)
    print("noise on standard output must not disturb the protocol")
    gpu = fake_triton.install("record")
    gpu.bench_ms = lambda: float(gpu.benchmarks)
    if compiler == "abort":
        autotune._compilation = lambda *_: os.abort
    BEHAVIOUR.update({int(block): what for block, what in behaviour.items()})
    tuning_child.device_lives = lambda: DEVICE["lives"]
    return tuning_child.Work(_steps(_kernel()))


def _kernel() -> Any:
    """A kernel whose configs may misbehave; in both processes it has one name."""
    import triton

    from fake_triton.kernels import plain

    configs = [triton.Config({"BLOCK": block}, pre_hook=_misbehave) for block in (64, 128, 256)]
    return triton.autotune(configs=configs, key=[])(plain)


def _job(gpu: Any, behaviour: dict[int, str], tmp_path: str, **options: Any) -> tuple[Any, Any, list[str]]:
    from fla_safe.runtime import RuntimeSettings, activate
    from fla_safe.runtime.tuning.outside import OutsideTuning

    runtime = activate(RuntimeSettings(guard="strict", isolate=True, cache_root=Path(tmp_path), agree=False))
    told: list[str] = []
    gpu.bench_ms = lambda: float(gpu.benchmarks)
    outside = OutsideTuning(
        runtime.tuning,
        f"{Path(__file__).stem}:work",
        {"behaviour": behaviour, **options.pop("arguments", {})},
        {"size_arguments": runtime.settings.size_arguments},
        directory=runtime.store.store.directory,
        tell=told.append,
        **options,
    )
    runtime.tuning.elsewhere = outside
    with runtime.warmup():
        for step in _steps(_kernel()):
            step()
    return runtime, outside, told


def _key(runtime: Any) -> Any:
    (key,) = [key for key in runtime.table if key.kernel.endswith("plain")]
    return key


def _decided(runtime: Any) -> int:
    key = _key(runtime)
    return dict(runtime.table.get(key).kwargs)["BLOCK"]


@isolated
def test_the_job_benchmarks_nothing_and_finds_the_childs_binaries(gpu: Any, tmp_path: str) -> None:
    runtime, outside, told = _job(gpu, {}, tmp_path)
    assert outside.children == 1
    assert _decided(runtime) == 64
    assert gpu.benchmarks == 0
    assert runtime.tuning.rounds == 2
    counts = runtime.store.store.counts
    assert counts.hits > 0
    assert [text.split(" (")[0] for text in told] == ["tuning in a process of its own", "tuned plain", "tuned add"]
    runtime.freeze()
    assert runtime.counters()["late_tunes"] == 0
    key = _key(runtime)
    runtime.tuning.ban(key, runtime.table.get(key), "wrong")
    assert _decided(runtime) == 128, "the child's timings of the others are known"


@isolated
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("abort", "was killed by SIGABRT"),
        ("exit", "ended the process with status 7"),
        ("hang", "said nothing for 3 s"),
        ("context", "killed the device's context"),
        ("context at one row", "killed the device's context"),
    ],
)
def test_a_deadly_config_is_banned_and_the_next_best_wins(gpu: Any, tmp_path: str, what: str, reason: str) -> None:
    runtime, outside, told = _job(gpu, {64: what}, tmp_path, seconds=3.0)
    assert outside.children == 2
    assert _decided(runtime) == 128
    assert gpu.benchmarks == 0
    (rejected,) = runtime.report()["rejected"].values()
    ((config, why),) = rejected.items()
    assert config.startswith("BLOCK=64")
    assert reason in why
    assert any("must not run with [BLOCK=64" in text for text in told)


@isolated
def test_a_config_that_only_raises_is_rejected_by_the_child(gpu: Any, tmp_path: str) -> None:
    runtime, outside, _ = _job(gpu, {64: "raise", 128: "abort"}, tmp_path)
    assert outside.children == 2
    assert _decided(runtime) == 256
    (rejected,) = runtime.report()["rejected"].values()
    assert "does not dominate" in str(rejected)
    assert "SIGABRT" in str(rejected)


@isolated
def test_a_child_that_cannot_start_leaves_tuning_to_the_job(gpu: Any, tmp_path: str) -> None:
    runtime, outside, _ = _job(gpu, {}, tmp_path, arguments={"fail": "no such kernel"})
    assert outside.children == 1
    assert gpu.benchmarks == 3 + 6
    assert _decided(runtime) == 64


@isolated
@pytest.mark.parametrize("what", ["process", "temporary file"])
def test_a_child_that_the_system_refuses_leaves_tuning_to_the_job(gpu: Any, tmp_path: str, what: str) -> None:
    from fla_safe.runtime.tuning import outside as module

    start, temporary_file = module.subprocess.Popen, module.tempfile.TemporaryFile

    def refused(*args: Any, **options: Any) -> Any:
        if what == "process" and "fla_safe.runtime.tuning.tuning_child" not in args[0]:
            return start(*args, **options)  # Triton asks ptxas for its version
        module.tempfile.TemporaryFile = temporary_file
        raise OSError(12, "Cannot allocate memory")

    if what == "process":
        module.subprocess.Popen = refused
    else:
        module.tempfile.TemporaryFile = refused
    before = len(os.listdir("/proc/self/fd"))
    runtime, outside, _ = _job(gpu, {}, tmp_path)
    assert outside.children == 1
    assert gpu.benchmarks == 3 + 6
    assert _decided(runtime) == 64
    assert len(os.listdir("/proc/self/fd")) == before + 1, "the lock of the rank's directory, and nothing else"


@isolated
def test_a_compiler_that_dies_among_many_configs_condemns_none(gpu: Any, tmp_path: str) -> None:
    runtime, outside, told = _job(gpu, {}, tmp_path, arguments={"compiler": "abort"}, compile_threads=4)
    assert outside.children == 2
    assert outside.compile_threads == 1
    assert any("SIGABRT" in text and "one config at a time" in text for text in told)
    assert gpu.benchmarks == 0, "the second child tunes all"
    assert not runtime.report()["rejected"]


@isolated
def test_children_that_die_without_end_are_not_started_without_end(gpu: Any, tmp_path: str) -> None:
    from fla_safe.runtime import NoWorkingConfigError

    with pytest.raises(NoWorkingConfigError, match=r"none of the 3 configs.*SIGABRT"):
        _job(gpu, {64: "abort", 128: "abort", 256: "abort"}, tmp_path)


@isolated
def test_the_child_dies_with_the_job(gpu: Any, tmp_path: str) -> None:
    """A hanging config must not keep a GPU busy after the job was killed."""
    import subprocess
    import sys

    code = (
        "import fake_triton; gpu = fake_triton.install('record'); import test_runtime_outside as t;"
        f"t._job(gpu, {{64: 'hang'}}, {tmp_path!r}, seconds=600.0)"
    )
    path = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
    job = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    child = _wait_for(lambda: _children(job.pid))[0]
    _wait_for(lambda: "tuning_child" in Path(f"/proc/{child}/cmdline").read_text() or None)
    time.sleep(1)
    job.kill()
    job.wait()
    try:
        _wait_for(lambda: not _runs(child) or None)
    finally:
        if _runs(child):
            os.kill(child, signal.SIGKILL)


def _wait_for(found: Any) -> Any:
    for _ in range(600):
        if result := found():
            return result
        time.sleep(0.1)
    pytest.fail("waited for a minute")


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def _runs(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z"
