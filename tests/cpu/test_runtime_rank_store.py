"""What a rank does at start: every way in which a bundle can be wrong ends in a job that tunes."""

import os
import subprocess
import sys
import tempfile

import pytest

triton = pytest.importorskip("triton")

from test_runtime_bundle import group  # noqa: E402

from fla_safe.runtime.artifacts import bundle, triton_cache  # noqa: E402
from fla_safe.runtime.artifacts.rank_store import open_rank_store  # noqa: E402
from fla_safe.runtime.tuning.decisions import Decision, DecisionTable, Stamp, TuningKey  # noqa: E402

STAMP = Stamp("sm_90", "3.8.0", "0.6.0")
KEY = TuningKey("m.k", ())


def table(warps=2, stamp=STAMP):
    made = DecisionTable(stamp)
    made.put(KEY, Decision(num_warps=warps))
    return made


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path, monkeypatch):
    """What other processes left in the machine's temporary directory is none of these tests' business."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


@pytest.fixture
def opened(tmp_path):
    places = []

    def open_one(**options):
        root = tmp_path / "root"
        places.append(open_rank_store({"LOCAL_RANK": "1"}, STAMP, cache_root=root, **options))
        return places[-1]

    yield open_one
    for place in places:
        place.close()


def test_a_bundle_gives_decisions_and_kernels(opened, tmp_path):
    made = bundle.pack(tmp_path / "b", table(), [group(1), group(2)])
    rank = opened(bundle=tmp_path / "b")
    assert rank.table.hash() == table().hash()
    assert rank.bundle_id == made.id
    assert len(list(rank.store.groups())) == 2
    assert triton_cache.installed() is rank.store
    rank.close()
    assert triton_cache.installed() is None
    assert not rank.directory.path.exists()


@pytest.mark.parametrize("how", ["absent", "damaged", "other GPU", "other Triton"])
def test_a_refused_bundle_is_told_and_the_job_tunes(how, opened, tmp_path, caplog):
    path = tmp_path / "b"
    stamps = {"other GPU": Stamp("sm_100", "3.8.0", "0.6.0"), "other Triton": Stamp("sm_90", "3.6.0", "0.6.0")}
    if how != "absent":
        bundle.pack(path, table(stamp=stamps.get(how, STAMP)))
    if how == "damaged":
        path.write_bytes(path.read_bytes()[:-50])
    rank = opened(bundle=path)
    assert rank.table is None
    assert str(path) in rank.refused
    assert len(caplog.records) == 1
    assert "the job tunes" in caplog.text


def test_tables_are_tried_in_order_and_only_fitting_ones_used(opened, tmp_path, caplog):
    (tmp_path / "bad.json").write_text("{")
    table(8, Stamp("sm_100", "3.8.0", "0.6.0")).save(tmp_path / "b200.json")
    table(4).save(tmp_path / "h200.json")
    table(16).save(tmp_path / "later.json")
    rank = opened(tables=[tmp_path / n for n in ("bad.json", "b200.json", "h200.json", "later.json")])
    assert rank.table.get(KEY).num_warps == 4
    assert rank.table.entry(KEY).source == "shipped"
    assert list(rank.refused) == [str(tmp_path / "bad.json")]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("ranks", "place"), [("1", "small"), ("8", "large"), ("64", "small"), ("x", "small")])
def test_there_is_room_for_all_ranks_of_the_host(ranks, place, tmp_path, monkeypatch):
    """They start together: room for one would be filled by all, and taken from what else lies in memory.

    Where no place has room for all, a place with room for one must do.
    """
    from fla_safe.runtime.artifacts import rank_store, roots

    places = {"small": 1 << 30, "large": 8 << 30}
    [(tmp_path / name).mkdir() for name in places]
    real = os.statvfs

    def statvfs(path):
        values = list(real(path))
        values[4] = places[path.name] // values[1]  # f_bavail, in units of f_frsize
        return os.statvfs_result(values)

    choose = roots.choose_root
    monkeypatch.setattr(roots.os, "statvfs", statvfs)
    monkeypatch.setattr(
        rank_store, "choose_root", lambda root, **o: choose(root, candidates=[tmp_path / n for n in places], **o)
    )
    made = open_rank_store({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": ranks}, STAMP)
    made.close()
    assert made.root.path == tmp_path / place


def test_a_bundle_comes_before_tables(opened, tmp_path):
    bundle.pack(tmp_path / "b", table(2))
    table(4).save(tmp_path / "t.json")
    assert opened(bundle=tmp_path / "b", tables=[tmp_path / "t.json"]).table.get(KEY).num_warps == 2


def test_a_restart_adopts_kernels_and_clears_other_jobs(tmp_path):
    """Kill a rank after it was seeded; its successor finds the kernels, and another job's successor removes them."""
    bundle.pack(tmp_path / "b", table(), [group(1)])
    script = (
        "import os, pathlib, sys; from fla_safe.runtime.artifacts.rank_store import open_rank_store;"
        "from fla_safe.runtime.tuning.decisions import Stamp; p = pathlib.Path(sys.argv[1]);"
        "open_rank_store({'SLURM_JOB_ID': '1', 'LOCAL_RANK': '0'}, Stamp('sm_90', '3.8.0', '0.6.0'),"
        " cache_root=p / 'r', bundle=p / 'b'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=100).returncode == -9
    again = open_rank_store({"SLURM_JOB_ID": "1", "LOCAL_RANK": "0"}, STAMP, cache_root=tmp_path / "r")
    assert again.directory.adopted
    assert len(list(again.store.groups())) == 1
    again.close(remove=False)
    other = open_rank_store({"SLURM_JOB_ID": "2", "LOCAL_RANK": "0"}, STAMP, cache_root=tmp_path / "r")
    assert other.removed == (again.directory.path,)
    other.close()
    assert os.listdir(tmp_path / "r" / f"fla-safe-{os.geteuid()}") == []


def test_a_failed_start_leaves_no_lock(opened, tmp_path):
    first = opened()
    with pytest.raises(triton_cache.CacheInstallError):
        opened()
    first.close(remove=False)
    assert opened().directory.path == first.directory.path
