"""`fla-safe`: the doctor names each trap and nothing else, the bundle commands work and refuse by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fla_safe.cli import app
from fla_safe.doctor import checks
from fla_safe.doctor import facts as environment
from fla_safe.doctor.checks import CHECKS
from fla_safe.doctor.facts import Environment, probe_import
from fla_safe.doctor.report import Finding, examine
from fla_safe.runtime.artifacts import bundle
from fla_safe.runtime.artifacts.directories import JobIdentity, RankDirectory
from fla_safe.runtime.artifacts.roots import Root
from fla_safe.runtime.tuning.decisions import Decision, DecisionTable, Stamp, TuningKey

H200 = Stamp("sm_90", "3.8.0", "0.6.0", "580.159", "NVIDIA H200")
B200 = Stamp("sm_100", "3.8.0", "0.5.1")
GOOD_VERSIONS = {
    "torch": "2.11.0+cu130",
    "triton": "3.8.0",
    "fla-core": "0.6.0",
    "megatron-core": "0.19.2",
    "mcore-bridge": "1.6.5",
    "ms-swift": "4.6.0",
}


class Fake(Environment):
    """A machine on which all is well, except for what a test says."""

    def __init__(
        self, environ=None, stamp=H200, tilelang="absent", flash_qla="absent", points=("fla_safe",), **versions
    ):
        merged = GOOD_VERSIONS | {k.replace("_", "-"): v for k, v in versions.items()}
        super().__init__(environ or {}, {k: v for k, v in merged.items() if v}, points, Path("/nonexistent"))
        self.__dict__.update(stamp=stamp, tilelang=tilelang, flash_qla=flash_qla)


@pytest.fixture(autouse=True)
def well_equipped(monkeypatch, tmp_path):
    """Room in memory and a fitting table, whatever the machine that runs the tests has."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(checks, "choose_root", lambda *a: Root(tmp_path / "shm", "tmpfs", 8 << 30))
    monkeypatch.setattr(checks, "__file__", str(tmp_path / "checks.py"))
    (tmp_path / "tables").mkdir()
    DecisionTable(H200).save(tmp_path / "tables" / "h200.json")
    return tmp_path


def findings(env):
    """Level and text of everything that is not well, by check."""
    return {name: f for name, f, _ in examine(env, CHECKS).findings if f.level != "ok"}


def test_nothing_to_say_about_a_good_machine():
    assert findings(Fake()) == {}
    assert examine(Fake(), CHECKS).status == 0


TRAPS = {
    "autoload off": (Fake({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}), "autoload", "error", "--gdn_impl is unknown"),
    "not registered": (Fake(points=("habana",)), "autoload", "error", "not registered"),
    "FLA 0.5.1": (Fake(fla_core="0.5.1", stamp=B200), "fla-probe", "warn", "every GDN call"),
    "FLA 0.5.0, tilelang off": (
        Fake({"FLA_TILELANG": "0"}, fla_core="0.5.0"), "fla-probe", "warn", "FLA_TILELANG=0 does not help",
    ),
    "broken tilelang, FLA 0.6": (Fake(tilelang="ImportError: no z3"), "tilelang", "error", "ImportError: no z3"),
    "broken tilelang, FLA 0.5.1, AttributeError": (
        Fake(tilelang="AttributeError: x", fla_core="0.5.1"), "tilelang", "error", "AttributeError",
    ),
    "broken tilelang, FLA 0.4.2": (Fake(tilelang="OSError: libnvrtc", fla_core="0.4.2"), "tilelang", "warn", "OSError"),
    "Hopper, Triton 3.6": (Fake(triton="3.6.0"), "hopper-triton", "error", "refuses its backward"),
    "Hopper, Triton 3.7.0": (Fake(triton="3.7.0"), "hopper-triton", "error", "3.7.0"),
    "Hopper, Triton 3.6, FLA 0.4.2": (Fake(triton="3.6.0", fla_core="0.4.2"), "hopper-triton", "warn", "gradients"),
    "GDN outside Megatron": (Fake({"USE_MCORE_GDN": "0"}), "mcore-gdn", "error", "no packing"),
    "FlashQLA": (Fake(flash_qla="works"), "flash-qla", "warn", "silently"),
    "FlashQLA broken": (Fake(flash_qla="OSError: x"), "flash-qla", "warn", "does not import: OSError: x"),
    "always compile": (Fake({"TRITON_ALWAYS_COMPILE": "1"}), "variables", "error", "every kernel"),
    "old swift switch": (Fake({"SWIFT_USE_MCORE_GDN": "1"}), "variables", "warn", "does nothing"),
    "cache mode": (Fake({"FLA_CACHE_MODE": "fuzzy"}), "variables", "warn", "FLA_CACHE_MODE=fuzzy"),
    "shared cache": (Fake({"TRITON_CACHE_DIR": "/tmp"}), "triton-cache", "warn", "shared by all ranks"),
    "Triton 3.9's default": (Fake(triton="3.9.0"), "fp-fusion", "warn", "default"),
    "FLA 0.5.2 with Triton 3.9": (Fake(triton="3.9.0", fla_core="0.5.2"), "versions", "error", "does not import"),
    "Triton 3.10": (Fake(triton="3.10.0"), "versions", "error", "triton 3.10.0 is not supported"),
    "no FLA": (Fake(fla_core=None), "versions", "error", "fla-core is not installed"),
    "old bridge": (Fake(mcore_bridge="1.2.0"), "versions", "error", "mcore-bridge 1.2.0"),
    "CPU stand-in on a GPU": (Fake({"FLA_SAFE_CPU": "1"}), "gpu", "error", "with a GPU"),
    "interpreter on a GPU": (Fake({"TRITON_INTERPRET": "1"}), "gpu", "error", "in Python"),
    "no GPU": (Fake(stamp=Stamp("cpu", "3.8.0", "0.6.0")), "gpu", "warn", "no GPU"),
    "no table": (Fake(stamp=Stamp("sm_120", "3.8.0", "0.6.0")), "shipped-table", "warn", "sm_120"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAPS)
def test_each_trap_is_named(name):
    env, check, level, text = TRAPS[name]
    found = findings(env)[check]
    assert found.level == level
    assert text in found.seen
    assert found.expected
    assert found.remedy


HARMLESS = {
    "Blackwell with Triton 3.6": Fake(triton="3.6.0", stamp=Stamp("sm_100", "3.6.0", "0.6.0")),
    "Hopper with Triton 3.7.1": Fake(triton="3.7.1", stamp=H200),
    "Hopper, Triton 3.6, FLA 0.5, working tilelang": Fake(triton="3.6.0", fla_core="0.5.2", tilelang="works"),
    "FLA 0.5.2": Fake(fla_core="0.5.2"),
    "FlashQLA kept off": Fake({"FLA_FLASH_QLA": "0"}, flash_qla="works"),
    "variables off": Fake({"TRITON_ALWAYS_COMPILE": "0", "FLA_CACHE_MODE": "disabled", "USE_MCORE_GDN": "true"}),
    "fusion chosen": Fake({"TRITON_DEFAULT_FP_FUSION": "1"}, triton="3.9.0"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_machines_get_no_error(name):
    assert {k: f for k, f in findings(HARMLESS[name]).items() if f.level == "error"} == {}


@pytest.mark.parametrize("check", ["fla-probe", "flash-qla", "variables", "fp-fusion", "mcore-gdn", "hopper-triton"])
def test_no_check_cries_wolf(check):
    quiet = {
        "fla-probe": "FLA 0.5.2",
        "flash-qla": "FlashQLA kept off",
        "variables": "variables off",
        "mcore-gdn": "variables off",
        "fp-fusion": "fusion chosen",
        "hopper-triton": "Hopper with Triton 3.7.1",
    }
    assert check not in findings(HARMLESS[quiet[check]])


def test_network_and_foreign_caches(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "filesystem_type", lambda path: "lustre")
    env = Fake({"TRITON_CACHE_DIR": str(tmp_path)})
    texts = [f.seen for n, f, _ in examine(env, CHECKS).findings if n == "triton-cache"]
    assert any("lustre" in t for t in texts)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    report = examine(env, [("triton-cache", checks.triton_cache)])
    assert report.status == 2


def test_little_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "choose_root", lambda *a: Root(tmp_path, "ext4", 8 << 30))
    assert "/dev/shm has too little room" in findings(Fake())["artifact-root"].seen


def test_foreign_artifact_directory(well_equipped):
    (well_equipped / "shm" / f"fla-safe-{os.geteuid()}").symlink_to("/tmp")
    assert findings(Fake())["artifact-root"].level == "error"


def test_stale_directories_are_told_and_left_alone(well_equipped):
    made = RankDirectory.acquire(well_equipped / "shm", JobIdentity("dead", "h", "0"))
    assert "stale" not in findings(Fake())
    made.close()
    assert "dead" in findings(Fake())["stale"].seen
    assert made.path.exists()


def test_a_user_without_a_home_gets_a_report(monkeypatch):
    """No HOME, and a user id without an account: the command must not end with the status of a warning."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    examine(environment.Environment(), [("triton-cache", checks.triton_cache)])


def test_a_check_that_raises_stops_no_other():
    def broken(env):
        raise KeyError("x")

    report = examine(Fake(), [("broken", broken), ("after", lambda env: Finding("ok", "fine"))])
    assert [(n, f.level) for n, f, _ in report.findings] == [("broken", "warn"), ("after", "ok")]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("raise ImportError('no psutil')", "ImportError: no psutil"),
        ("raise AttributeError('ffi')", "AttributeError: ffi"),
        ("raise OSError('libnvrtc.so')", "OSError: libnvrtc.so"),
        ("import os; os.abort()", "status"),
        ("x = 1", "works"),
        (None, "absent"),
    ],
    ids=["ImportError", "AttributeError", "OSError", "crash", "works", "absent"],
)
def test_half_installed_packages_are_probed_in_another_process(body, found, tmp_path, monkeypatch):
    if body is not None:
        (tmp_path / "half_installed").mkdir()
        (tmp_path / "half_installed" / "__init__.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert found in probe_import("half_installed")
    assert "half_installed" not in sys.modules


def test_doctor_command(monkeypatch):
    monkeypatch.setattr(environment, "Environment", lambda: Fake({"USE_MCORE_GDN": "0"}))
    done = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(done.stdout)
    assert done.exit_code == report["status"] == 2
    assert {f["check"]: f for f in report["findings"]}["mcore-gdn"]["level"] == "error"
    assert all(f["milliseconds"] >= 0 for f in report["findings"])
    text = CliRunner().invoke(app, ["doctor"])
    assert text.exit_code == 2
    assert "to do: unset USE_MCORE_GDN" in text.stdout
    monkeypatch.setattr(environment, "Environment", lambda: Fake(flash_qla="works"))
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1
    monkeypatch.setattr(environment, "Environment", lambda: Fake())
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0


def test_installed_command_starts():
    done = subprocess.run([sys.executable, "-m", "fla_safe.cli", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "doctor" in done.stdout
    assert "bundle" in done.stdout


@pytest.fixture
def table_file(tmp_path):
    table = DecisionTable(Stamp("sm_90", "3.8.0", "0.6.0"))
    table.put(TuningKey("m.k", ("H=1",)), Decision(num_warps=2))
    table.save(tmp_path / "table.json")
    return tmp_path / "table.json"


def run(*arguments):
    return CliRunner().invoke(app, ["bundle", *map(str, arguments)])


def test_bundle_commands(table_file, tmp_path):
    out = tmp_path / "b"
    assert run("pack", out, "--table", table_file).exit_code == 0
    found = bundle.read(out)
    assert json.loads(run("show", out, "--json").stdout)["id"] == found.id
    assert DecisionTable.from_json(run("show", out, "--decisions").stdout).hash() == found.table.hash()
    assert "m.k" in run("show", out).stdout
    assert run("verify", out, "--no-here", "--expect", found.id[:12]).exit_code == 0
    assert run("unpack", out, tmp_path / "dir").exit_code == 0
    assert (tmp_path / "dir" / "table.json").exists()


def test_an_unpacked_bundle_can_be_packed_again(table_file, tmp_path):
    from test_runtime_bundle import group

    first = bundle.pack(tmp_path / "a", DecisionTable.load(table_file), [group(1)])
    run("unpack", tmp_path / "a", tmp_path / "dir")
    done = run("pack", tmp_path / "b", "--table", tmp_path / "dir" / "table.json", "--cache", tmp_path / "dir")
    assert done.exit_code == 0
    assert [r.key for r, _ in bundle.read(tmp_path / "b").groups] == [r.key for r, _ in first.groups]


def test_pack_takes_the_kernels_of_a_living_rank_and_leaves_them_alone(table_file, tmp_path):
    from test_runtime_bundle import group

    from fla_safe.runtime.artifacts.store import ArtifactStore

    store = ArtifactStore(tmp_path / "shm", triton="3.8.0")
    store.seed([group(1), group(2)])
    half = store.stage("writer", "k.cubin", b"x")
    (store.directory / "entries" / group(2)[0].key / "k.cubin").write_bytes(b"")
    assert run("pack", tmp_path / "b", "--table", table_file, "--cache", store.directory).exit_code == 0
    assert [r.key for r, _ in bundle.read(tmp_path / "b").groups] == [group(1)[0].key]
    assert half.exists()
    assert (store.directory / "entries" / group(2)[0].key).exists()


def test_bundle_errors_are_named_and_have_status_2(table_file, tmp_path):
    out, other = tmp_path / "b", tmp_path / "other"
    run("pack", out, "--table", table_file)
    done = run("verify", out)  # no H200 here
    if done.exit_code:
        assert "StampMismatchError" in done.stderr
        assert "to do:" in done.stderr
    data = bytearray(out.read_bytes())
    data[len(data) // 2] ^= 1
    out.write_bytes(data)
    for arguments in (("verify", out), ("show", out), ("unpack", out, tmp_path / "x"), ("merge", other, out)):
        done = run(*arguments)
        assert done.exit_code == 2
        assert "Bundle" in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "x").exists()
    assert not other.exists()
    assert run("show", tmp_path / "absent").exit_code == 2
    assert run("pack", other, "--table", tmp_path / "absent").exit_code == 2
    assert run("pack", other, "--table", table_file, "--cache", tmp_path).exit_code == 2


def test_merge_command(table_file, tmp_path):
    run("pack", tmp_path / "a", "--table", table_file)
    table = DecisionTable.load(table_file)
    table.put(TuningKey("m.k", ("H=1",)), Decision(num_warps=8))
    table.save(table_file)
    run("pack", tmp_path / "b", "--table", table_file)
    assert run("merge", tmp_path / "c", tmp_path / "a", tmp_path / "b").exit_code == 2
    done = run("merge", tmp_path / "c", tmp_path / "a", tmp_path / "b", "--policy", "replace")
    assert done.exit_code == 0
    assert "num_warps=8" in done.stdout
    assert bundle.read(tmp_path / "c").table.get(TuningKey("m.k", ("H=1",))).num_warps == 8
