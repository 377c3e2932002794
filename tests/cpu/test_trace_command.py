"""`fla-safe trace` starts a command, passes signals on, and refuses by name what it cannot trace."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fla_safe.cli import app
from fla_safe.trace import strace
from fla_safe.trace.command import run_traced
from fla_safe.trace.merge import TraceError, read_run


def test_a_trace_that_cannot_be_written_leaves_the_job_alone(tmp_path: Path) -> None:
    environment = {**os.environ, "FLA_SAFE_TRACE": str(tmp_path / "absent")}
    code = "import torch; print('fine')"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "fine"
    assert done.stderr.count("fla_safe: this process is not traced") == 1
    assert "--gdn_impl" not in done.stderr


@pytest.mark.parametrize("flags", [[], ["--strace"]], ids=["plain", "strace"])
def test_a_signal_of_the_scheduler_reaches_the_command(flags: list[str], tmp_path: Path) -> None:
    if flags and strace.command(tmp_path) is None:
        pytest.skip("strace is not installed or may not trace here")
    script = "trap 'echo saved; exit 9' TERM; echo ready; while :; do sleep 0.05; done"
    command = [sys.executable, "-m", "fla_safe.cli", "trace", "--out", str(tmp_path / "a b"), *flags]
    with subprocess.Popen(
        [*command, "--", "bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        job.terminate()
        out, error = job.communicate(timeout=30)
    assert (job.returncode, out) == (9, "saved\n")
    assert f"fla-safe report '{tmp_path}/a b'" in error


@pytest.mark.parametrize("exact", [False, True], ids=["plain", "strace"])
def test_a_signal_that_comes_before_the_command_has_started_ends_it(
    exact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on a loaded machine: the tracer died of the signal, and the command ran on without it."""
    if exact and strace.command(tmp_path) is None:
        pytest.skip("strace is not installed or may not trace here")
    started = subprocess.Popen

    def interrupted(command: list[str], **named: Any) -> Any:
        if "sleep" in command:
            os.kill(os.getpid(), signal.SIGTERM)
        return started(command, **named)

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    ours = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGTERM, ours)
    try:
        status = run_traced(["sleep", "5"], tmp_path / "trace", exact=exact)
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, before)
    assert status in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_what_cannot_be_traced_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "main.jsonl").write_text("")
    for folder, command, text in (
        (tmp_path / "old", "true", "is not empty"),
        (tmp_path / "old" / "main.jsonl", "true", "File exists"),
        (tmp_path / "old" / "main.jsonl" / "new", "true", "Not a directory"),
        (tmp_path / "new", "no-such-command", "no-such-command: No such file"),
    ):
        refused = CliRunner().invoke(app, ["trace", "--out", str(folder), "--", command])
        assert refused.exit_code == 2
        assert text in refused.output
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    refused = CliRunner().invoke(app, ["trace", "--out", str(tmp_path / "n"), "--", "true"])
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in refused.output
    with pytest.raises(TraceError, match="holds no trace"):
        read_run(tmp_path / "n")
    (tmp_path / "old" / "main.jsonl").write_text('{"kind": "process", "version": 99}\n')
    with pytest.raises(TraceError, match="has format 99"):
        read_run(tmp_path / "old")
