"""`fla-safe trace` and `report`: what a process did to files is counted once, under the right cause, and explained."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fake_triton.isolated import child
from fla_safe.cli import app
from fla_safe.trace import strace
from fla_safe.trace.causes import classify
from fla_safe.trace.merge import Process, Run, read_run
from fla_safe.trace.report import summarise, write_report
from fla_safe.trace.sites import Sites

FLA = "/x/site-packages/fla/ops/"
PROBE = (FLA + "common/backends/tilelang/__init__.py", 30, "is_available")
WRAPPER = (FLA + "backends/__init__.py", 185, "wrapper")
JIT = ("/x/site-packages/triton/runtime/jit.py", 9, "run")


@pytest.mark.parametrize(
    ("path", "frames", "importing", "cause"),
    [
        ("/x/tilelang/__init__.py", (PROBE, WRAPPER), True, "FLA backend probing"),
        ("/x/lazy.py", (WRAPPER,), True, "Python imports"),
        ("/data/a.JPG", (("/x/PIL/Image.py", 3, "open"),), False, "image loading"),
        ("/somewhere/.triton/cache/AB/k.cubin", (), False, "Triton cache"),
        ("/x/libtriton.so", (JIT,), False, "Triton cache"),
        ("/x/libtriton.so", (JIT,), True, "Python imports"),
        ("/cache/AB/file", (), False, "Triton cache"),
        ("/cache", (), False, "Triton cache"),
        ("/cache_of_images/train.csv", (), False, "data set"),
        ("/out/model.safetensors", (), False, "checkpoint"),
        ("/data/train.jsonl", (), False, "data set"),
        ("/x/pkg/mod.py", (), False, "Python imports"),
        ("/etc/hosts", (), False, "other"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_cause_of_a_path_and_a_stack(path: str, frames: Any, importing: bool, cause: str) -> None:
    assert classify(path, frames, importing=importing, cache="/cache") == cause


def test_thousands_of_paths_from_one_place_share_an_entry() -> None:
    sites = Sites()
    frames = (("/x/loader.py", 1, "load"),)
    for i in range(10_000):
        sites.find("opens", f"/data/{i}.jpg", frames, False).count += 1
    taken = sites.take()
    assert len(taken) < 50
    assert sum(site["count"] for site in taken) == 10_000
    assert any(site["path"] == "/data/*.jpg" for site in taken)
    assert sites.take() == []


def test_the_table_is_bounded_and_starts_afresh() -> None:
    sites = Sites()
    for i in range(10_000):
        sites.find("stats", "/p", ((f"/x/{i}.py", 1, "f"),), False).count += 1
    assert sites.full
    assert sum(site["count"] for site in sites.take()) == 10_000
    assert not sites.full


# Three steps that each open one image, ask FLA's way for a package that is half there, and stat a file; then a fork.
JOB = """
import os, shutil, sys
sys.path.insert(0, sys.argv[1])
import torch
from PIL import Image
from fla.ops.common.backends import Backend
from fla_safe.trace import record
assert os.stat in os.supports_dir_fd and os.stat in os.supports_follow_symlinks
if sys.argv[3] == 'optimizer':
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter])
Image.init()
for step in range(int(sys.argv[2])):
    with Image.open(sys.argv[1] + '/picture.png') as image:
        image.convert('RGB')
    assert not Backend.is_available()
    os.path.exists('/nowhere/file')
    if sys.argv[3] == 'optimizer':
        parameter.grad = torch.ones(1)
        optimizer.step()
    if sys.argv[3] == 'marked':
        record.step()
if sys.argv[3] == 'optimizer':
    print('announced', record.active().steps)
    record.step()
    record.step()
open(sys.argv[1] + '/late.jsonl').read()
os.makedirs(sys.argv[1] + '/tree/a')
shutil.rmtree(sys.argv[1] + '/tree')
if os.fork() == 0:
    import time
    open('/etc/hostname').close()
    time.sleep(1.3)
    os._exit(0)
os.wait()
sys.exit(7)
"""
BACKEND = """
class Backend:
    @classmethod
    def is_available(cls):
        try:
            import half_there
            return True
        except ImportError:
            return False
"""


def make_job(folder: Path) -> list[str]:
    """A folder with a stand-in for FLA, a package that does not import, a picture, and the script."""
    from PIL import Image

    for package in ("fla", "fla/ops", "fla/ops/common"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("")
    (folder / "fla/ops/common/backends.py").write_text(BACKEND)
    (folder / "half_there").mkdir()
    (folder / "half_there/__init__.py").write_text("from half_there import deeper\n")
    (folder / "half_there/deeper.py").write_text("import not_there_at_all\n")
    (folder / "late.jsonl").write_text("{}\n" * 10)
    Image.new("RGB", (64, 64)).save(folder / "picture.png")
    (folder / "job.py").write_text(JOB)
    return [sys.executable, str(folder / "job.py"), str(folder)]


def traced(folder: Path, command: list[str], *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("FLA_SAFE", "TORCH_DEVICE"))}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    arguments = [sys.executable, "-m", "fla_safe.cli", "trace", "--out", str(folder), *flags, "--", *command]
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("traced")
    done = traced(folder / "trace", [*make_job(folder / "job"), "8", "marked"])
    assert done.returncode == 7, done.stderr  # the command's own status
    return read_run(folder / "trace")


def test_each_step_is_counted_exactly_by_cause(run: Run) -> None:
    rates = summarise(run)["steady"]["per_rank_and_step"]
    size = (run.folder.parent / "job" / "picture.png").stat().st_size
    assert rates["image loading"] == {"opens": 1, "bytes": size}
    probing = {k: rates["FLA backend probing"][k] for k in ("searches", "opens", "missing")}
    # half_there, half_there.deeper and not_there_at_all are looked for; two sources are read, there being no .pyc.
    assert probing == {"searches": 3, "opens": 4, "missing": 2}
    assert rates["FLA backend probing"]["stats"] > 5
    assert rates["other"] == {"stats": 1}
    assert set(rates) == {"image loading", "FLA backend probing", "other"}


def test_what_comes_after_the_last_step_is_not_steady(run: Run) -> None:
    report = summarise(run)
    assert report["counts"]["data set"]["opens"] == 1
    assert "data set" not in report["steady"]["counts"]
    assert report["steady"]["steps"] == 4


def test_a_cause_is_sustained_by_steps_and_not_by_time() -> None:
    """One slow step beside three quick ones; a cause of one of them alone; a process with one interval."""

    def interval(begin: float, end: float, *causes: str) -> dict[str, Any]:
        return {"t0": begin, "t1": end, "step": 1, "ops": {cause: {"opens": 1} for cause in causes}}

    quick = [interval(t, t + 0.1, "checkpoint") for t in (9.0, 9.1, 9.2)]
    process = Process({}, [interval(0, 9, "checkpoint", "other"), *quick])
    assert Run(Path(), [process], [process], (0, 9.3)).sustained() == ["checkpoint"]
    short = Process({}, [interval(0, 1, "other")])
    assert Run(Path(), [short], [short], (0, 1)).sustained() == ["other"]


def test_places_have_the_stack_of_who_asked(run: Run) -> None:
    site = next(s for s in run.sites(steady=True) if s["path"] == "half_there.deeper")
    assert site["cause"] == "FLA backend probing"
    assert site["count"] == 8
    assert site["stack"].startswith("fla/ops/common/backends.py:6 is_available < ")
    assert "job.py" in site["stack"]
    assert "importlib" not in site["stack"]


def test_a_forked_child_writes_its_own_file(run: Run) -> None:
    parent, forked = sorted(run.processes, key=lambda p: -p.steps)
    assert forked.head["parent"] == parent.head["pid"]
    opened = [s["path"] for s in forked.sites.values()] or [i["ops"] for i in forked.intervals if i["ops"]]
    assert "hostname" in str(opened) or opened[0]["other"]["opens"] == 1
    assert parent.ended
    assert run.trainers == [parent]


CHILDREN = """
import multiprocessing, sys
import torch

def work():
    open('/etc/hostname').close()

if __name__ == '__main__':
    for method in sys.argv[1:]:
        context = multiprocessing.get_context(method)
        if method == 'forkserver':
            context.set_forkserver_preload(['torch'])
        child = context.Process(target=work)
        child.start()
        child.join()
"""


def test_children_of_every_start_method_are_recorded_to_their_end(tmp_path: Path) -> None:
    """Workers of a data loader are such children; most of what a short one did is in its last interval."""
    (tmp_path / "job.py").write_text(CHILDREN)
    done = traced(tmp_path / "trace", [sys.executable, str(tmp_path / "job.py"), "fork", "forkserver"])
    assert done.returncode == 0, done.stderr
    opened = [p for p in read_run(tmp_path / "trace").processes if "/etc/hostname" in {s[1] for s in p.sites}]
    assert len(opened) == 2
    assert all(process.ended for process in opened)


ODD = """
import os, pathlib, sys
import torch
from fla_safe.trace import record
os.chdir(sys.argv[1])
name = b'caf\\xe9 | x\\n.bin'
open(name, 'w').close()
for _ in range(4):
    open(os.fsdecode(name)).close()
    os.stat(next(os.scandir()))
    os.stat(pathlib.Path('away') / '..')
    record.step()
"""


def test_names_of_any_bytes_and_type_are_reported_as_paths(tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "away").mkdir()
    (tmp_path / "job.py").write_text(ODD)
    done = traced(tmp_path / "trace", [sys.executable, str(tmp_path / "job.py"), str(tmp_path / "odd")])
    assert done.returncode == 0, done.stderr
    write_report(tmp_path / "trace")
    page = (tmp_path / "trace" / "report.md").read_text()
    assert "| `caf\\udce9 \\| x .bin` |" in page
    assert "| `away/..` |" in page
    assert "<DirEntry" not in page


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_without_a_steady_half_is_not_called_clean(tmp_path: Path, killed: bool) -> None:
    lines = [{"kind": "process", "version": 1, "t": 1.0, "pid": 1, "host": "h", "rank": None, "parent": 0}]
    lines[0] |= {"python": "", "torch": "", "argv": [], "environment": {}}
    if not killed:  # all steps in the one line that was written at the end
        ops = {"FLA backend probing": {"opens": 900}}
        lines.append({"kind": "interval", "t0": 1.0, "t1": 1.5, "step": 10, "ops": ops, "io": {}})
    (tmp_path / "main.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (said,) = write_report(tmp_path)["verdict"]
    assert said.startswith("The run was too short to tell what lasts")


def test_the_cause_is_stated_in_words(run: Run) -> None:
    said = summarise(run)["verdict"]
    assert said[0].startswith("Cause: FLA backend probing.")
    assert "4 opens" in said[0]
    assert "half_there, half_there.deeper, not_there_at_all" in said[0]
    assert any(s.startswith("Normal data loading, a rank and step: image loading 1 opens") for s in said)


def test_reports_with_and_without_matplotlib(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    made = CliRunner().invoke(app, ["report", str(run.folder)])
    assert made.exit_code == 0, made.output
    assert "Cause: FLA backend probing" in made.output
    report = json.loads((run.folder / "report.json").read_text())
    assert report["plots"] == ["operations.png", "steps.png"]
    assert all((run.folder / name).stat().st_size > 5000 for name in report["plots"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "fla_safe.trace.plots", raising=False)
    assert write_report(run.folder)["plots"] is None
    assert "No plots: matplotlib is not installed" in (run.folder / "report.md").read_text()


def test_steps_of_an_optimizer_count_until_steps_are_marked(tmp_path: Path) -> None:
    done = traced(tmp_path / "trace", [*make_job(tmp_path / "job"), "5", "optimizer"])
    assert "announced 5" in done.stdout
    assert max(p.steps for p in read_run(tmp_path / "trace").processes) == 2


def test_strace_counts_what_python_cannot_see(tmp_path: Path) -> None:
    found = shutil.which("strace")
    if found is None or subprocess.run([found, "-o", os.devnull, "true"], capture_output=True, check=False).returncode:
        pytest.skip("strace is not installed or may not trace here")
    done = traced(tmp_path / "trace", [*make_job(tmp_path / "job"), "8", "marked"], "--strace")
    assert done.returncode == 7, done.stderr
    rates = summarise(read_run(tmp_path / "trace"))["strace"]["per_rank_and_step"]
    assert rates["image loading"]["opens"] == 1
    assert rates["image loading"]["reads"] >= 1
    assert rates["image loading"]["bytes"] == (tmp_path / "job" / "picture.png").stat().st_size
    assert rates["FLA backend probing"]["opens"] == 4
    assert rates["FLA backend probing"]["missing"] == 2
    assert rates["FLA backend probing"]["reads"] == 4  # a file's text, and its end


LINES = """\
10.5 openat(AT_FDCWD</w>, "/d/a.jpg", O_RDONLY|O_CLOEXEC) = 5</d/a.jpg>
11.5 read(5</d/a.jpg>, ""..., 4096) = 4096
11.6 read(7<pipe:[99]>, ""..., 10) = 10
12.0 newfstatat(5</d/a.jpg>, "", {st_mode=S_IFREG|0644, st_size=1, ...}, AT_EMPTY_PATH) = 0
12.5 openat(AT_FDCWD</w>, "/lib/tilelang/x.py", O_RDONLY) = -1 ENOENT (No such file or directory)
13.0 getdents64(4</lib>, 0x55 /* 3 entries */, 32768) = 80
13.5 read(9</proc/7/io>, ""..., 4096) = 90
14.0 read(5</d/a.jpg>,  <unfinished ...>) = ?
"""


def test_lines_of_strace(tmp_path: Path) -> None:
    (tmp_path / "strace.7").write_text(LINES)
    total, steady = strace.counts(tmp_path, (11.0, 12.6), {"/lib/tilelang/x.py": "FLA backend probing"}) or ({}, {})
    assert total["image loading"] == {"opens": 1, "reads": 1, "bytes": 4096}
    assert total["FLA backend probing"] == {"opens": 1, "missing": 1}
    assert total["other"] == {"listings": 1}
    assert steady == {
        "image loading": {"reads": 1, "bytes": 4096},
        "FLA backend probing": {"opens": 1, "missing": 1},
    }
    assert strace.counts(tmp_path / "nothing", (0, 1), {}) is None


def test_a_trace_that_was_cut_off_counts_up_to_its_last_line(run: Run, tmp_path: Path) -> None:
    source = next(p for p in run.folder.glob("*.jsonl") if f"-{run.trainers[0].head['pid']}-" in p.name)
    whole = source.read_text()
    (tmp_path / source.name).write_text(whole[: int(len(whole) * 0.6)])
    (tmp_path / "main-empty.jsonl").write_text("")
    process = read_run(tmp_path).trainers[0]
    assert not process.ended
    assert process.intervals


def test_a_report_that_cannot_be_written_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "trace")
    (tmp_path / "trace" / "report.md").unlink(missing_ok=True)
    (tmp_path / "trace" / "report.md").mkdir()
    refused = CliRunner().invoke(app, ["report", str(tmp_path / "trace")])
    assert refused.exit_code == 2
    assert "TraceError" in refused.output


def launches(gpu: Any, frozen: bool) -> None:
    import torch

    from fake_triton.kernels import add
    from fla_safe.runtime import RuntimeSettings, activate
    from fla_safe.trace import record

    x = torch.empty(1024)

    def call(width: int) -> None:
        add[(1,)](x, x, x, 1024, width)

    if frozen:
        runtime = activate(RuntimeSettings(guard="strict"))
        with runtime.warmup():
            call(16)
        runtime.freeze()
    record.step()
    gpu.launches.clear()
    for width in (16, 16, 16) if frozen else (16, 32, 16):
        call(width)
    record.step()
    gpu.launches.clear()
    for _ in range(5):
        call(16)
    assert len(gpu.launches) == 5
    record.step()


@pytest.mark.parametrize("frozen", [False, True], ids=["stock", "frozen"])
def test_tunes_compilations_launches_and_gaps(tmp_path: Path, frozen: bool) -> None:
    """A second process finds the first one's kernels on disk; direct launches of a frozen runtime are seen, too."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        environ = {
            "FLA_SAFE_TRACE": str(tmp_path / name),
            "FLA_SAFE_TRACE_KERNELS": "ad",
            "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        }
        child(launches, {"frozen": frozen}, environ=environ)
        (process,) = read_run(tmp_path / name).processes
        events = {kind: sum(sum(i.get(kind, {}).values()) for i in process.intervals) for kind in ("compiles", "loads")}
        assert (events["compiles"] > 0) == (name == "first")
        assert (events["loads"] > 0) == (name == "second")
        last = next(i for i in process.intervals if i["step"] == 3)
        assert last["launches"] == 5
        assert len(last["gaps"]["add"]) == 5
        assert all(0 < microseconds < 1e6 for microseconds in last["gaps"]["add"])
        # Two widths, one tuning key and six configs each; frozen: one width, in the warm-up.
        for kind, number in (("tunes", 1), ("benchmarks", 6)):
            total = sum(i.get(kind, {}).get("add", 0) for i in process.intervals)
            assert total == (number if frozen else 2 * number)
            assert kind not in last
