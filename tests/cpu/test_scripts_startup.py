"""scripts/measure_startup.py counts what processes did: its two ways of counting agree, and know shared from local."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fla")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import measure_startup  # noqa: E402

PLACES = {"/w/shared": "shared", "/w/node0": "local", "/w/node1": "local"}
TRACE = """\
openat(AT_FDCWD</w>, "/w/shared/a", O_RDONLY|O_CLOEXEC) = 5</w/shared/a>
newfstatat(5</w/shared/a>, "", {st_mode=S_IFREG|0644, st_size=70, ...}, AT_EMPTY_PATH) = 0
read(5</w/shared/a>, ""..., 71)         = 70
read(5</w/shared/a>, ""..., 1)          = 0
newfstatat(AT_FDCWD</w>, "/w/shared/b", 0x7f, 0) = -1 ENOENT (No such file or directory)
access("/w/shared/b", F_OK)             = -1 ENOENT (No such file or directory)
openat(AT_FDCWD</w>, "/w/shared/b", O_RDONLY) = -1 ENOENT (No such file or directory)
mkdir("/w/shared/c", 0777)              = 0
write(6</w/node1/x>, ""..., 30)         = 30
rename("/w/node1/x", "/w/node1/y")      = 0
getdents64(7</w/node0>, 0x55 /* 3 entries */, 32768) = 80
openat(AT_FDCWD</w>, "/usr/lib/z", O_RDONLY) = 5</usr/lib/z>
+++ exited with 0 +++
"""


def test_lines_of_strace_are_counted_by_place() -> None:
    found = measure_startup.parse(TRACE.splitlines(), PLACES)
    assert found["shared"] == {"opens": 2, "stats": 2, "changes": 1, "read_bytes": 70}
    assert found["local"] == {"written_bytes": 30, "changes": 1, "listings": 1}


def test_threads_and_children_of_a_rank_are_counted_with_it(tmp_path: Path) -> None:
    opened = 'openat(AT_FDCWD</w>, "/w/shared/a", O_RDONLY) = 5</w/shared/a>\n'
    traces = {
        "pid.7": opened + "clone3({flags=CLONE_VM|CLONE_THREAD, ...} => {parent_tid=[9]}, 88) = 9\n",
        "pid.8": opened,  # another rank's
        "pid.9": opened + "vfork() = 10\n",
        "pid.10": opened + "+++ exited with 0 +++\n",
    }
    for name, text in traces.items():
        (tmp_path / name).write_text(text)
    result = measure_startup.Result("stock", 1, 1, "strace")
    measure_startup._read_traces(tmp_path, [7], PLACES, result)
    assert result.shared["opens"] == 3


def strace_works(folder: Path) -> bool:
    strace = shutil.which("strace")
    command = [str(strace), "--seccomp-bpf", "-f", "-o", str(folder / "probe"), "true"]
    return bool(strace) and not subprocess.run(command, capture_output=True, check=False).returncode


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, measure_startup.Result]:
    """Two real processes in three modes, on one shared storage; of the layer's kernels the convolution alone."""
    work = tmp_path_factory.mktemp("startup")
    os.environ[measure_startup._ONE_KERNEL] = "1"
    method = "strace" if strace_works(work) else "audit"
    try:
        results = measure_startup.measure(("stock", "isolated", "bundle"), 2, work / "files", method)
    finally:
        del os.environ[measure_startup._ONE_KERNEL]
    return {result.mode: result for result in results}


def counted(result: measure_startup.Result) -> dict[str, int]:
    return result.shared or result.audit


def test_stock_ranks_meet_on_the_shared_storage(two_ranks: dict[str, Any]) -> None:
    stock = counted(two_ranks["stock"])
    assert stock["opens"] > 100
    assert stock["changes"] > 100
    assert stock["read_bytes"] > 2**20


def test_isolated_ranks_write_one_bundle_there_and_nothing_else(two_ranks: dict[str, Any]) -> None:
    result = two_ranks["isolated"]
    assert counted(result)["opens"] == 1
    assert counted(result).get("read_bytes", 0) == 0
    assert not result.shared or result.local["changes"] > 100


def test_each_rank_opens_the_bundle_once(two_ranks: dict[str, Any]) -> None:
    result = two_ranks["bundle"]
    assert counted(result)["opens"] == 2
    assert counted(result).get("changes", 0) == 0
    assert counted(result)["read_bytes"] > 2 * 40_000
    assert not result.shared or result.local["changes"] < two_ranks["isolated"].local["changes"] / 2


@pytest.mark.parametrize("mode", ["stock", "isolated", "bundle"])
def test_strace_and_the_audit_hook_see_the_same(two_ranks: dict[str, Any], mode: str) -> None:
    result = two_ranks[mode]
    if not result.shared:
        pytest.skip("strace is not installed or may not trace here")
    for name in ("opens", "changes"):
        assert result.shared[name] == result.audit.get(name, 0), name


def test_imports_are_counted_apart(two_ranks: dict[str, Any]) -> None:
    result = two_ranks["stock"]
    if not result.shared:
        pytest.skip("strace is not installed or may not trace here")
    assert result.imports["opens"] > 1000
    assert result.imports["read_bytes"] > 100 * 2**20, "Triton reads its own libraries"


@pytest.mark.parametrize("when", ["before the start", "after the start"])
def test_a_rank_that_dies_is_missed_and_holds_nobody_up(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def rank_main(mode: str, rank: int, work: Path, ready: int, wait: int) -> dict[str, int]:
        if rank == 1 and when == "before the start":
            raise OSError("planted")
        os.write(ready, b".")
        os.close(ready)
        assert os.read(wait, 1) == b"."
        if rank == 1:
            raise OSError("planted")
        return {"rank": rank}

    monkeypatch.setattr(measure_startup, "rank_main", rank_main)
    lines = measure_startup._start("stock", 3, tmp_path)
    assert sorted(json.loads(line)["rank"] for line in lines) == [0, 2]
    assert "planted" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "8", "0"], "--ranks 0: expected at least 1"),
        (["--modes", "bundle"], "--modes bundle: it needs what isolated leaves"),
        (["--modes", "stock-again", "stock"], "--modes stock-again: it needs what stock leaves"),
        (["--work", "/no/such/folder"], "--work: there is no folder /no/such/folder"),
        (["--json", "/no/such/folder/counts.json"], "--json: there is no folder /no/such/folder"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_what_cannot_be_measured_is_refused_before_ranks_start(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["measure_startup.py", *arguments])
    with pytest.raises(SystemExit):
        measure_startup.main()
    assert text in capsys.readouterr().err
