"""The GPU machine's one command: its steps name what exists, are limited, and are not repeated when done."""

import json
import shlex
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import verify_gpu  # noqa: E402
from training_job import Job, JobError  # noqa: E402


def step(name: str, command: str, gpus: int = 0, limit: int = 30) -> verify_gpu.Step:
    return verify_gpu.Step(name, gpus, limit, "nothing", command)


def test_every_step_calls_a_script_of_the_repository_or_an_installed_command() -> None:
    for each in verify_gpu.read_steps().values():
        words = [
            word for word in shlex.split(each.command.format(out="out", all="all")) if word.strip() not in ("", "!")
        ]
        if words[0] in ("python", "bash"):
            assert (ROOT / words[1]).is_file(), each
        else:
            assert words[0] in ("pytest", "fla-safe"), each


def test_every_job_of_a_step_is_one_that_bench_train_knows() -> None:
    jobs = []
    for each in verify_gpu.read_steps().values():
        words = shlex.split(each.command)
        jobs += [words[i + 1] for i, word in enumerate(words) if word == "--job"]
    assert "default:tp2-pp2-ep2" in jobs
    for job in jobs:
        Job.parse(job)


def test_a_job_of_unknown_implementation_or_size_is_refused() -> None:
    for name in ("stock:tp2", "default:xp2", "default:tp", "default:tp0", "fla_safe:tp2_pp2"):
        with pytest.raises(JobError):
            Job.parse(name)


def test_a_layout_starts_as_many_processes_as_its_sizes_need() -> None:
    counts = {"tp1": 1, "tp2-ep2": 2, "pp2": 2, "cp2": 2, "tp2-pp2-ep2": 4, "ep2": 2, "tp2-cp2": 4}
    for layout, processes in counts.items():
        assert Job.parse(f"fla_safe:{layout}").environment()["NPROC_PER_NODE"] == str(processes), layout
    assert Job.parse("default").environment() == {"GDN_IMPL": "default"}


def test_results_are_kept_and_a_finished_step_is_not_repeated(tmp_path: Path) -> None:
    steps = [step("good", f"echo x >> {tmp_path}/ran"), step("bad", "exit 3"), step("later", "true", gpus=2)]
    for _ in range(2):
        outcomes = verify_gpu.verify(steps, tmp_path, 1, 60)
    assert (tmp_path / "ran").read_text() == "x\n"
    assert [outcomes[each.name].status for each in steps] == ["ok", "failed", "not run"]
    evidence = json.loads((tmp_path / "evidence.json").read_text())
    assert evidence["steps"]["bad"]["why"] == "status 3"
    assert evidence["machine"]["versions"]["torch"]


def test_a_step_at_its_limit_is_ended_with_everything_that_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    endless = step("endless", f"(while true; do date > {mark}; sleep 0.05; done) & wait", limit=1)
    assert verify_gpu.verify([endless], tmp_path, 0, 60)["endless"].status == "out of time"
    mark.unlink()
    time.sleep(0.5)
    assert not mark.exists()


def test_no_step_starts_that_could_run_past_the_time(tmp_path: Path) -> None:
    outcomes = verify_gpu.verify([step("long", "true", limit=100), step("short", "true", limit=5)], tmp_path, 0, 50)
    assert [outcome.status for outcome in outcomes.values()] == ["not run", "ok"]
