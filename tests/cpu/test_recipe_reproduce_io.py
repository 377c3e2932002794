"""The reproduction shows stock FLA 0.5.1 reading the disk in steady state, and fla_safe at zero in the same job."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fla_versions import fla_directory

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = REPOSITORY / "recipes" / "reproduce_io"
sys.path.insert(0, str(RECIPE))

import matrix_report  # noqa: E402
import tilelang_states  # noqa: E402


def python(code: str, path: Path | None) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("state", "expected"),
    [("absent", "False False 0"), ("half", "False False 14"), ("working", "True True 2")],
)
def test_the_states_of_tilelang(state: tilelang_states.State, expected: str, tmp_path: Path) -> None:
    """What two imports say, and how many files they open: a failed import reads all of its chain again."""
    code = (
        "import sys\n"
        "opened = []\n"
        "sys.addaudithook(lambda e, a: opened.append(a[0]) if e == 'open' and 'tilelang' in str(a[0]) and "
        "str(a[0]).endswith(('.py', 'METADATA')) else None)\n"
        "def available():\n"
        "    try:\n"
        "        import tilelang, tilelang.language\n"
        "        return True\n"
        "    except ImportError:\n"
        "        return False\n"
        "import importlib.metadata\n"
        "sys.dont_write_bytecode = True\n"
        "print(available(), available(), len(opened))"
    )
    assert python(code, tilelang_states.write(state, tmp_path)) == expected


def test_stock_reads_the_disk_and_fla_safe_does_not(tmp_path: Path) -> None:
    if fla_directory("0.5.1") is None:
        pytest.skip("fla-core 0.5.1 is not there and cannot be fetched")
    pytest.importorskip("skimage")
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    # What the user has set must not decide about a cell.
    environment |= {"FLA_DISABLE_BACKEND_DISPATCH": "1", "FLA_SAFE_TRACE": str(tmp_path / "not here")}
    small = [
        "--share-cache",
        "--steps",
        "6",
        "--layers",
        "1",
        "--micro-batches",
        "1",
        "--tokens",
        "512",
        "--exact-steps",
        "0",
    ]
    command = ["bash", str(RECIPE / "reproduce.sh"), "--out", str(tmp_path / "out"), "--fla", "0.5.1"]
    done = subprocess.run(
        [*command, "--tilelang", "half", *small], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    stock, ours = report["cells"]
    assert (stock["stack"], ours["stack"]) == ("stock", "fla_safe")
    assert stock["steps"] == ours["steps"] == 3
    # Three dispatched calls a layer and step, each of them opens six modules and the metadata.
    probing = stock["per_step"]["FLA backend probing"]
    assert probing["opens"] == 3 * 7
    assert probing["searches"] == 3 * 7
    assert probing["bytes"] > 3 * 40_000
    assert ours["abnormal"] == 0
    assert set(ours["per_step"]) == {"image loading"}
    assert ours["per_step"]["image loading"] == stock["per_step"]["image loading"]
    # The backward pass computes the states again.
    assert [next(iter(cell["gaps"].values()))["steady"]["n"] for cell in (stock, ours)] == [2 * 3, 2 * 3]
    page = (tmp_path / "out" / "report.md").read_text()
    assert "Cause: FLA backend probing" in page
    assert "fla_safe: no file operation but data loading" in page
    assert "fla/ops/common/backends/tilelang/__init__.py:30 is_available" in page
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "is not empty" in again.stderr


def cell(stack: str, **changes: object) -> dict[str, object]:
    return {
        "fla": "0.5.1",
        "tilelang": "half",
        "stack": stack,
        "name": f"0.5.1-half-{stack}",
        "status": "trained",
        "error": "",
        "verdict": ["Cause: x."],
        "per_step": {"image loading": {"opens": 2}},
        "sustained": [],
        "abnormal": 0,
        "gaps": {},
        "step": {"milliseconds": {"median": 1.0}, "drift": None},
        "steps": 3,
        "tunes": [3, 0],
        "compiles": [3, 0],
        "sites": [],
        "strace": None,
        "over_time": [{"step": 1, "ops": {"image loading": 2}, "tunes": 3, "compiles": 3, "loads": 0}],
        **changes,
    }


FACTS = {"versions": {}, "command": "c", "date": "d", "device": "none", "cores": 2, "load": 0, "python": "3"}
FACTS |= {"steps": 2, "ranks": 1, "workload": "w", "half_installed": "stand-in", "bytecode": True}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "no file operation but data loading"),
        ({"abnormal": 1}, "NOT clean in: 0.5.1-half-fla_safe"),
        ({"tunes": [3, 1]}, "NOT clean in: 0.5.1-half-fla_safe"),
        ({"compiles": [3, 1]}, "NOT clean in: 0.5.1-half-fla_safe"),
        ({"steps": 0}, "NOT clean in: 0.5.1-half-fla_safe"),
        ({"status": "failed", "error": "OSError: gone"}, "fla_safe did not train: OSError: gone"),
    ],
    ids=["clean", "files", "tunes", "compilations", "nothing measured", "failed"],
)
def test_the_report_does_not_praise_what_was_not_clean(changes: dict[str, object], text: str, tmp_path: Path) -> None:
    report = matrix_report.write(tmp_path, [cell("stock"), cell("fla_safe", **changes)], FACTS)
    page = (tmp_path / "report.md").read_text()
    assert text in page
    assert report["ours_is_clean"] == (not changes)
    assert ("fla_safe: no file operation" in page) == (not changes)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--out", "occupied"], "occupied cannot be made or read"),
        (["--out", "occupied/below"], "below cannot be made or read"),
        (["--data", "missing.jsonl"], "--data missing.jsonl: no such file"),
        (["--half-installed", "missing"], "--half-installed missing: no folder tilelang"),
        (["--steps", "3"], "'3' is not a whole number of at least 4"),
        (["--layers", "0"], "'0' is not a whole number of at least 1"),
        (["--heads", "3", "4"], "--heads 3 4: expected a multiple of the key heads"),
        (["--set", "FLA_TILELANG"], "--set FLA_TILELANG: expected NAME=VALUE"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_input_that_cannot_work_is_refused_before_any_cell(arguments: list[str], text: str, tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("")
    command = ["bash", str(RECIPE / "reproduce.sh"), *arguments]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert text in done.stderr
    assert not (tmp_path / "runs").exists()


def test_layers_of_another_fla_are_not_mixed_into_the_matrix(tmp_path: Path) -> None:
    """flash-linear-attention adds `fla.layers`, which import operators that another version's fla-core has not."""
    found = tmp_path / "site" / "flash_linear_attention-0.6.0.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-linear-attention\nVersion: 0.6.0\n")
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(found.parent)}
    command = ["bash", str(RECIPE / "reproduce.sh")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "flash-linear-attention 0.6.0 is installed" in done.stderr
    assert not (tmp_path / "runs").exists()
