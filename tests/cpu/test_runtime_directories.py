"""Each rank has a private directory; nobody else's link is followed, dead jobs' leftovers go, living ones' stay."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fla_safe.runtime.artifacts import directories, roots
from fla_safe.runtime.artifacts.directories import JobIdentity, RankDirectory, remove_stale
from fla_safe.runtime.artifacts.roots import ArtifactSpaceError, UnsafeDirectoryError, choose_root, filesystem_type

ME = JobIdentity("job 7", "host", "3")


def test_directory_is_private_and_named_after_the_rank(tmp_path):
    made = RankDirectory.acquire(tmp_path, ME)
    assert made.path.name == "host-3"
    for part in (made.path, made.path.parent, made.path.parent.parent):
        assert stat.S_IMODE(part.stat().st_mode) == 0o700
    made.close()


def test_open_modes_are_closed_again(tmp_path):
    made = RankDirectory.acquire(tmp_path, ME)
    made.close()
    made.path.chmod(0o777)
    again = RankDirectory.acquire(tmp_path, ME)
    assert again.adopted
    assert stat.S_IMODE(again.path.stat().st_mode) == 0o700
    again.close()


def test_two_living_processes_never_share(tmp_path):
    first, second = RankDirectory.acquire(tmp_path, ME), RankDirectory.acquire(tmp_path, ME)
    assert first.path != second.path
    first.close()
    third = RankDirectory.acquire(tmp_path, ME)
    assert (third.path, third.adopted) == (first.path, True)
    second.close()
    third.close()


CHILD = """
import sys, pathlib
from fla_safe.runtime.artifacts.directories import JobIdentity, RankDirectory
made = RankDirectory.acquire(pathlib.Path(sys.argv[1]), JobIdentity(sys.argv[2], "host", "3"))
(made.path / "x").write_text("x")
print(made.path, flush=True)
sys.stdin.read()
"""


def child(root, job):
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root), job], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, Path(process.stdout.readline().strip())


def test_dead_jobs_are_removed_and_living_ones_kept(tmp_path):
    dead, dead_path = child(tmp_path, "dead")
    living, living_path = child(tmp_path, "living")
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    try:
        assert remove_stale(tmp_path, keep_job="mine") == (dead_path,)
        assert not dead_path.parent.exists()
        assert (living_path / "x").read_text() == "x"
        assert remove_stale(tmp_path, keep_job="mine") == ()
    finally:
        living.communicate("")


def test_a_restarted_rank_adopts_what_its_killed_predecessor_left(tmp_path):
    dead, path = child(tmp_path, ME.job)
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    assert remove_stale(tmp_path, keep_job=ME.job) == ()
    mine = RankDirectory.acquire(tmp_path, ME)
    assert (mine.path, mine.adopted) == (path, True)
    mine.remove()
    assert not path.exists()


def test_eight_processes_at_once_get_eight_directories(tmp_path):
    started = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), "same"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    paths = {p.stdout.readline().strip() for p in started}
    [p.communicate("") for p in started]
    assert len(paths) == 8


def test_a_link_in_the_place_of_our_directory_is_refused(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / f"fla-safe-{os.geteuid()}").symlink_to(tmp_path / "target")
    with pytest.raises(UnsafeDirectoryError, match="symbolic link"):
        RankDirectory.acquire(tmp_path, ME)
    assert list((tmp_path / "target").iterdir()) == []
    assert remove_stale(tmp_path, keep_job="x") == ()


def test_a_linked_lock_is_not_opened(tmp_path):
    made = RankDirectory.acquire(tmp_path, ME)
    made.close()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (made.path / "lock").unlink()
    (made.path / "lock").symlink_to(victim)
    with pytest.raises(ArtifactSpaceError):
        RankDirectory.acquire(tmp_path, ME)
    assert victim.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
@pytest.mark.parametrize("what", ["directory", "link"])
def test_what_another_user_made_first_is_refused(what, tmp_path):
    ours = tmp_path / f"fla-safe-{os.geteuid()}"
    if what == "directory":
        ours.mkdir()
        os.chown(ours, 12345, 12345)
        with pytest.raises(UnsafeDirectoryError, match="user 12345"):
            RankDirectory.acquire(tmp_path, ME)
    else:
        (tmp_path / "real").mkdir()
        link = tmp_path / "link"
        link.symlink_to(tmp_path / "real")
        os.chown(link, 12345, 12345, follow_symlinks=False)
        with pytest.raises(UnsafeDirectoryError, match="symbolic link of user 12345"):
            choose_root(link / "x")


def test_a_place_that_anyone_may_rearrange_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(UnsafeDirectoryError, match="every user"):
        choose_root(tmp_path / "cache")
    tmp_path.chmod(0o1777)
    assert choose_root(tmp_path / "cache").path == tmp_path / "cache"


def test_the_first_place_with_room_is_taken(tmp_path, monkeypatch):
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir(), large.mkdir()
    real = os.statvfs

    def statvfs(path):
        values = list(real(path))
        if Path(path) == small:
            values[4] = 10  # f_bavail
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert choose_root(candidates=[tmp_path / "absent", small, large], needed_bytes=1 << 20).path == large
    with pytest.raises(ArtifactSpaceError, match=r"MiB free.*--gdn_cache_root"):
        choose_root(candidates=[small], needed_bytes=1 << 20)


@pytest.mark.parametrize(
    "kind", ["lustre", "nfs4", "gpfs", "wekafs", "fuse.glusterfs", "fuse.ceph-fuse", "9p", "virtiofs"]
)
def test_network_file_systems_only_on_request(kind, tmp_path, monkeypatch):
    """Names as the kernel's mount table has them."""
    monkeypatch.setattr(roots, "filesystem_type", lambda path: kind)
    with pytest.raises(ArtifactSpaceError, match=kind):
        choose_root(candidates=[tmp_path], needed_bytes=1)
    assert choose_root(tmp_path, needed_bytes=1).is_network


def test_filesystem_type_reads_the_innermost_mount():
    assert filesystem_type(Path("/proc/self")) == "proc"


@pytest.mark.parametrize(
    ("environ", "job", "rank"),
    [
        ({"SLURM_JOB_ID": "12", "SLURM_LOCALID": "5", "LOCAL_RANK": ""}, "12", "5"),
        (
            {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "h", "MASTER_PORT": "29500", "LOCAL_RANK": "0"},
            "h-29500",
            "0",
        ),
        ({}, f"p{os.getpid()}", f"p{os.getpid()}"),
        ({"RANK": "3", "MASTER_PORT": "1"}, "localhost-1", f"p{os.getpid()}"),
    ],
    ids=["slurm", "torchrun without run id", "no launcher", "rank not known yet: never rank 0's"],
)
def test_identity_is_read_from_the_launcher(environ, job, rank):
    found = JobIdentity.read(environ)
    assert (found.job, found.local_rank) == (job, rank)


@pytest.mark.parametrize("job", ["../../etc", "a/b", "", ".", "x" * 500, "job\0x", "täg"], ids=repr)
def test_no_job_name_leads_out_of_the_directory(job, tmp_path):
    made = RankDirectory.acquire(tmp_path, JobIdentity(job, "host", "0"))
    assert made.path.parent.parent == tmp_path / f"fla-safe-{os.geteuid()}"
    made.close()


def test_different_odd_names_stay_different(tmp_path):
    a = RankDirectory.acquire(tmp_path, JobIdentity("a/b", "host", "0"))
    b = RankDirectory.acquire(tmp_path, JobIdentity("a_b", "host", "0"))
    assert a.path.parent != b.path.parent
    a.close(), b.close()


def test_other_machines_directories_on_a_network_file_system_are_nobodys_leftovers(tmp_path, monkeypatch):
    """There a lock may be visible on its own machine only: that it can be taken here says nothing."""
    from fla_safe.runtime.artifacts import directories

    monkeypatch.setattr(directories.socket, "gethostname", lambda: "here")
    kept = [JobIdentity("a", "there", "0"), JobIdentity("a", "here-too", "1"), JobIdentity("b", "there", "p12")]
    others = [RankDirectory.acquire(tmp_path, identity) for identity in kept]
    mine = RankDirectory.acquire(tmp_path, JobIdentity("b", "here", "2"))
    [made.close() for made in (*others, mine)]
    monkeypatch.setattr(directories, "filesystem_type", lambda path: "lustre")
    assert directories.find_stale(tmp_path) == (mine.path,)
    assert remove_stale(tmp_path, keep_job="mine") == (mine.path,)
    assert all(made.path.exists() for made in others)
    # On one machine's own file system names say nothing: containers get new host names, and see each other's locks.
    monkeypatch.setattr(directories, "filesystem_type", lambda path: "tmpfs")
    assert set(remove_stale(tmp_path, keep_job="mine")) == {made.path for made in others}


FORKER = """
import atexit, os, pathlib, sys
from fla_safe.runtime.artifacts.directories import JobIdentity, RankDirectory
made = RankDirectory.acquire(pathlib.Path(sys.argv[1]), JobIdentity("j", "h", "0"))
atexit.register(made.remove)
child = os.fork()
if child == 0:
    sys.exit()
os.waitpid(child, 0)
print("there" if made.path.exists() else "gone")
"""


def test_a_forked_child_does_not_take_its_parents_directory_away(tmp_path):
    done = subprocess.run([sys.executable, "-c", FORKER, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["there"], done.stderr
    assert os.listdir(tmp_path / f"fla-safe-{os.geteuid()}") == [], "the parent removed it at its end"


def test_a_relative_place_stays_where_it_was_when_the_job_changes_its_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = choose_root(Path("cache"), needed_bytes=1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert root.path == tmp_path / "cache"
    assert root.path.is_dir()


@pytest.mark.parametrize("lacks", ["home", "temporary directory"])
def test_what_the_machine_lacks_is_no_place_and_no_error(lacks, tmp_path, monkeypatch):
    """A user id without an account and no HOME; a container in which only /dev/shm can be written."""
    from fla_safe.runtime.artifacts import rank_store
    from fla_safe.runtime.tuning.decisions import Stamp

    def none(*args):
        raise RuntimeError("Could not determine home directory.") if lacks == "home" else FileNotFoundError(2, "none")

    monkeypatch.setattr(*((Path, "home", none) if lacks == "home" else (roots.tempfile, "gettempdir", none)))
    assert choose_root(needed_bytes=1).path.is_dir()
    with pytest.raises(ArtifactSpaceError, match="no place"):
        choose_root(needed_bytes=1 << 60)
    store = rank_store.open_rank_store({"LOCAL_RANK": "0"}, Stamp("sm_90", "3.8.0", "0.6.0"), cache_root=tmp_path / "r")
    store.close()


def test_mounts_with_unusual_names_are_recognised(monkeypatch):
    lines = "21 1 0:2 / / rw - ext4 /dev/sda rw\n22 21 0:3 / /mnt/donn\u00e9es\\040x rw - nfs4 server:/x rw\n"
    monkeypatch.setattr(Path, "read_text", lambda self, **options: lines)
    assert filesystem_type(Path("/mnt/donn\u00e9es x/cache")) == "nfs4"
    assert filesystem_type(Path("/mnt")) == "ext4"


def test_a_cleaner_between_two_steps_of_a_start_is_no_error(tmp_path, monkeypatch):
    """It removes the job's directory while that is still empty."""
    cleaned, check = [], roots.require_own_directory

    def clean_first(path):
        if path.name == "job" and not cleaned:
            cleaned.append(path)
            path.rmdir()
        return check(path)

    monkeypatch.setattr(roots, "require_own_directory", clean_first)
    made = RankDirectory.acquire(tmp_path, JobIdentity("job", "host", "0"))
    assert cleaned == [made.path.parent]
    assert made.path.is_dir()
    made.close()


def test_a_cleaner_that_found_no_lock_spares_who_took_the_place_meanwhile(tmp_path, monkeypatch):
    """Seen among jobs that start and end at once: its next step renamed and deleted a living owner's directory."""
    identity, lock = JobIdentity("job", "host", "0"), directories._lock
    first = RankDirectory.acquire(tmp_path, identity)
    path, made = first.path, []
    first.close()
    (path / "lock").unlink()

    def replaced(file, **options):
        try:
            return lock(file, **options)
        except FileNotFoundError:
            made.append(RankDirectory.acquire(tmp_path, identity))
            raise

    monkeypatch.setattr(directories, "_lock", replaced)
    assert remove_stale(tmp_path, keep_job="another") == ()
    (second,) = made
    assert second.path == path
    assert (path / "lock").exists()
    second.close()


@pytest.mark.parametrize("content", ["nothing", "a file", "a directory"])
def test_a_directory_without_a_lock_goes(tmp_path, content):
    made = RankDirectory.acquire(tmp_path, JobIdentity("job", "host", "0"))
    made.close()
    (made.path / "lock").unlink()
    if content == "a file":
        (made.path / "x").write_text("x")
    elif content == "a directory":
        (made.path / "group" / "inner").mkdir(parents=True)
        (made.path / "group" / "x").write_text("x")
    assert remove_stale(tmp_path, keep_job="another") == (made.path,)
    assert not made.path.parent.exists()


def test_half_a_directory_is_never_seen_under_its_name(tmp_path, monkeypatch):
    """A cleaner would find it without its lock, and a restarted rank would adopt it."""
    made, seen, delete = RankDirectory.acquire(tmp_path, ME), [], directories.shutil.rmtree

    def watched(path, **options):
        seen.append(made.path.exists())
        delete(path, **options)

    monkeypatch.setattr(directories.shutil, "rmtree", watched)
    made.remove()
    assert seen == [False]
    assert not any((tmp_path / f"fla-safe-{os.geteuid()}").iterdir())


BUSY = """
import os, pathlib, random, sys, time
from fla_safe.runtime.artifacts.directories import JobIdentity, RankDirectory, remove_stale
root, draw, end = pathlib.Path(sys.argv[1]), random.Random(int(sys.argv[2])), float(sys.argv[3])
while time.time() < end:
    job = f"job{draw.randrange(3)}"
    remove_stale(root, keep_job=job)
    made = RankDirectory.acquire(root, JobIdentity(job, "host", str(draw.randrange(2))))
    text = f"{os.getpid()} {time.time()}"
    (made.path / "mine").write_text(text)
    for _ in range(draw.randrange(4)):
        time.sleep(draw.random() / 300)
        assert (made.path / "mine").read_text() == text, "another job took a living one's directory"
    end_of_job = draw.random()
    if end_of_job < 0.1:
        os.kill(os.getpid(), 9)
    made.close() if end_of_job < 0.4 else made.remove()
"""


def test_jobs_that_start_end_and_die_at_once_leave_each_other_alone(tmp_path):
    end, seeds, started = time.time() + 4, iter(range(10_000)), []
    while time.time() < end:
        while sum(process.poll() is None for process in started) < 5:
            command = [sys.executable, "-c", BUSY, str(tmp_path), str(next(seeds)), str(end)]
            started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        time.sleep(0.02)
    errors = [process.communicate()[1] for process in started]
    assert {process.returncode for process in started} == {0, -signal.SIGKILL}, max(errors, key=len)
