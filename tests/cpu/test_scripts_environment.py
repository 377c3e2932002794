"""The shell scripts: which Python they find, and that a missing precondition is one clear line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SYSTEM_PATH = "/usr/bin:/bin"


def bash(script: str, *, path: str = SYSTEM_PATH, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail; . scripts/environment.sh; {script}"],
        cwd=environment.pop("cwd", str(REPOSITORY)),
        env={"PATH": path, "HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def python_of(version: str, path: Path) -> None:
    """A program that answers the version check as that Python would, and runs nothing else."""
    major, minor = version.split(".")
    code = f"import sys; sys.version_info = ({major}, {minor}); exec(sys.argv[1])"
    program(path, f'exec "{sys.executable}" -c "{code}" "$2"')


@pytest.fixture
def empty_path(tmp_path: Path) -> str:
    """A PATH with the shell's tools and no Python."""
    folder = tmp_path / "tools"
    folder.mkdir()
    tools = "bash cat cut dirname sha256sum env df awk rm mkdir sleep tail tr grep head"
    for tool in tools.split():
        found = shutil.which(tool)
        assert found is not None
        (folder / tool).symlink_to(found)
    return str(folder)


def test_a_pyenv_shim_that_fails_leads_to_the_version_behind_it(tmp_path: Path, empty_path: str) -> None:
    program(tmp_path / "shims" / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    python_of("3.11", tmp_path / "shims" / "python3")
    python_of("3.12", tmp_path / "pyenv" / "versions" / "3.12.1" / "bin" / "python3")
    done = bash("find_python", path=f"{tmp_path}/shims:{empty_path}", PYENV_ROOT=f"{tmp_path}/pyenv")
    assert done.stdout.strip() == f"{tmp_path}/pyenv/versions/3.12.1/bin/python3"


def test_python_3_12_is_preferred_and_3_13_taken(tmp_path: Path, empty_path: str) -> None:
    python_of("3.13", tmp_path / "bin" / "python3.13")
    assert bash("find_python", path=f"{tmp_path}/bin:{empty_path}").stdout.strip() == f"{tmp_path}/bin/python3.13"
    python_of("3.12", tmp_path / "bin" / "python3.12")
    assert bash("find_python", path=f"{tmp_path}/bin:{empty_path}").stdout.strip() == f"{tmp_path}/bin/python3.12"


@pytest.mark.parametrize("version", ["3.11", "3.14"])
def test_an_unsupported_python_is_not_taken(version: str, tmp_path: Path, empty_path: str) -> None:
    python_of(version, tmp_path / "bin" / "python3")
    done = bash("find_python || echo none", path=f"{tmp_path}/bin:{empty_path}")
    assert done.stdout.strip() == "none"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What a fresh clone holds, without an environment."""
    folder = tmp_path / "clone"
    for name in ("scripts", "recipes"):
        shutil.copytree(REPOSITORY / name, folder / name)
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    return folder


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("fla-safe: ")
    assert "Traceback" not in done.stdout
    return lines[0]


def run(clone: Path, script: str, path: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", f"scripts/{script}"],
        cwd=clone,
        env={"PATH": path, "HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("script", ["test.sh", "quickstart.sh"])
def test_no_python_is_one_line(script: str, clone: Path, empty_path: str) -> None:
    assert "no Python 3.12 or 3.13 found" in one_line(run(clone, script, empty_path))


def test_a_full_disk_is_one_line(clone: Path, tmp_path: Path) -> None:
    program(tmp_path / "bin" / "df", "echo Filesystem; echo '/dev/x 9 8 2097152 99% /'")
    done = run(clone, "test.sh", f"{tmp_path}/bin:{SYSTEM_PATH}", FLA_SAFE_PYTHON=sys.executable)
    assert "2 GiB free" in one_line(done)
    assert "needs 10 GiB" in done.stderr


def test_no_registry_is_one_line_and_the_next_run_tries_again(clone: Path) -> None:
    environment = {
        "FLA_SAFE_PYTHON": sys.executable,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    for _ in range(2):
        line = one_line(run(clone, "test.sh", SYSTEM_PATH, **environment))
        assert "no package registry" in line
        assert "PIP_INDEX_URL" in line
    assert not (clone / ".venv" / "fla-safe-stamp").exists()


def test_a_given_environment_without_the_package_is_one_line(tmp_path: Path) -> None:
    assert "has no bin/python" in one_line(bash("make_environment dev", FLA_SAFE_VENV=str(tmp_path)))
    program(tmp_path / "bin" / "python", "exit 1")
    assert "does not hold fla-safe" in one_line(bash("make_environment dev", FLA_SAFE_VENV=str(tmp_path)))


def test_a_stamped_environment_is_used_as_it_is(clone: Path) -> None:
    program(clone / ".venv" / "bin" / "python", "echo must not run; exit 1")
    stamp = bash("environment_stamp train,dev", cwd=str(clone)).stdout
    (clone / ".venv" / "fla-safe-stamp").write_text(stamp)
    script = ". scripts/environment.sh; has_gpu() { false; }; make_environment train,dev; echo $PYTHON; echo $PATH"
    done = subprocess.run(
        ["bash", "-euc", script], cwd=clone, env={"PATH": SYSTEM_PATH, "HOME": "/"}, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [f"{clone}/.venv/bin/python", f"{clone}/.venv/bin:{SYSTEM_PATH}"]
    (clone / "scripts" / "constraints.txt").write_text("numpy<1")
    assert bash("environment_stamp train,dev", cwd=str(clone)).stdout != stamp
