"""The quick start's progress and summary, from the files that a run leaves."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import training_summary  # noqa: E402
import watch_training  # noqa: E402

REPORT = {"gdn_impl": "fla_safe", "kernel": "torch", "gdn_layers": 3, "kernel_calls_per_step": 18}


def write_run(folder: Path, losses: list[float], report: dict[str, Any] | None = None) -> Path:
    inner = folder / "v0-20260101"
    (inner / "checkpoint-4").mkdir(parents=True)
    (inner / "checkpoint-4" / "model.safetensors").write_bytes(b"")
    lines = [json.dumps({"loss": loss, "iteration": f"{i + 1}/{len(losses)}"}) for i, loss in enumerate(losses)]
    (inner / "logging.jsonl").write_text("\n".join([*lines, '{"train_dataset": "size=3"}', '{"loss": 1.0, "iter']))
    if report is not None:
        (inner / "gdn_report.json").write_text(json.dumps(report))
    return folder


def falling(count: int) -> list[float]:
    return [12 - i / 10 + (0.3 if i % 2 else 0) for i in range(count)]


def test_a_run_below_a_version_folder_is_read(tmp_path: Path) -> None:
    summary = training_summary.read(write_run(tmp_path, falling(24), REPORT))
    assert summary.losses == tuple(falling(24))
    assert summary.report == REPORT
    assert summary.checkpoint is not None
    assert summary.checkpoint.name == "checkpoint-4"
    training_summary.check(summary)


def test_a_run_with_stock_layers_has_no_report(tmp_path: Path) -> None:
    training_summary.check(training_summary.read(write_run(tmp_path, falling(24))))


@pytest.mark.parametrize(
    ("losses", "report", "reason"),
    [
        (falling(19), REPORT, "19 steps"),
        (falling(24)[::-1], REPORT, "did not fall"),
        ([12.0] * 24, REPORT, "did not fall"),
        ([*falling(23), float("nan")], REPORT, "not finite"),
        ([], REPORT, "0 steps"),
        (falling(24), {**REPORT, "kernel_calls_per_step": 0}, "no GDN call"),
    ],
    ids=["too-few", "rises", "flat", "nan", "none", "no-calls"],
)
def test_what_is_not_a_success_fails(losses: list[float], report: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(training_summary.SummaryError, match=reason):
        training_summary.check(training_summary.read(write_run(tmp_path, losses, report)))


def test_watching_shows_steps_and_returns_the_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", [3.0, 2.0])
    status = watch_training.watch(tmp_path / "run", tmp_path / "log", ["bash", "-c", "sleep 1; echo out; exit 7"])
    assert status == 7
    assert (tmp_path / "log").read_text() == "out\n"
    assert "step   2/2  loss 2.0000" in capsys.readouterr().out


def test_a_command_that_cannot_start_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        watch_training._main(tmp_path / "run", tmp_path / "log", ["no-such-command"])
    assert capsys.readouterr().err == "fla-safe: [Errno 2] No such file or directory: 'no-such-command'\n"


def test_the_first_error_is_the_cause_and_not_a_consequence(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "INFO fine\n"
        "[rank0]: RuntimeError: [gloo/pair.cc:547] Connection closed by peer [127.0.0.1]\n"
        "[rank2]: fla_safe.errors.OffsetsError: offsets decrease at 3\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "====\n"
    )
    assert watch_training.first_error(tmp_path / "log") == "fla_safe.errors.OffsetsError: offsets decrease at 3"
    assert watch_training.first_error(tmp_path / "missing") == "no output"
