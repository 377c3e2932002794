"""One private directory for each job, host and local rank: chosen, locked, and cleared of those that dead jobs left.

Layout: `<root>/fla-safe-<uid>/<job>/<host>-<local rank>/`. A living process holds an exclusive `flock` on the file
`lock` in its directory, so a directory whose lock can be taken belongs to nobody, whatever killed its owner. The lock
works across PID namespaces, which process ids do not (containers that share `/dev/shm`).
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fla_safe.runtime.artifacts.roots import (
    NETWORK_FILESYSTEMS,
    ArtifactError,
    ArtifactSpaceError,
    UnsafeDirectoryError,
    filesystem_type,
    private_directory,
    require_own_directory,
)

__all__ = ["JobIdentity", "RankDirectory", "find_stale", "remove_stale"]

_STAGING_SECONDS = 3600.0
_JOB_VARIABLES = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "JOB_ID", "TORCHELASTIC_RUN_ID")
_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """Whose directory it is.

    Args:
        job: identifier of the job; the same on all its ranks, different for two jobs on one host.
        host: this machine.
        local_rank: rank within the host, or `"p<pid>"` while it is not known.
    """

    job: str
    host: str
    local_rank: str

    @classmethod
    def read(cls, environ: Mapping[str, str], local_rank: int | None = None) -> "JobIdentity":
        """Read job and rank from what launchers set. Call it in the worker process, when the ranks are known.

        A process whose rank is not known gets a directory of its own by process id, never rank 0's.
        """
        rank = str(local_rank) if local_rank is not None else _first(environ, _RANK_VARIABLES)
        job = _first(environ, _JOB_VARIABLES)
        if job is None and "MASTER_PORT" in environ:
            job = f"{environ.get('MASTER_ADDR', 'localhost')}-{environ['MASTER_PORT']}"
        return cls(job or f"p{os.getpid()}", socket.gethostname(), rank or f"p{os.getpid()}")


class RankDirectory:
    """A locked private directory. The lock goes with the process, however it ends; `close` gives it back earlier."""

    __slots__ = ("_lock", "_owner", "adopted", "path")

    def __init__(self, path: Path, lock: int, adopted: bool) -> None:
        self.path = path
        self.adopted = adopted
        self._lock = lock
        self._owner = os.getpid()

    @classmethod
    def acquire(cls, root: Path, identity: JobIdentity) -> "RankDirectory":
        """Make this rank's directory, or adopt the one that an earlier, dead process of the same rank left.

        If a living process holds the name (two jobs with one identifier), a numbered one is made beside it.

        Raises:
            UnsafeDirectoryError: see `private_directory`; also where the file system has no locks.
            ArtifactSpaceError: the directory cannot be written.
        """
        try:
            user = private_directory(root / f"fla-safe-{os.geteuid()}")
            for attempt in range(256):
                suffix = f"+{attempt}" if attempt else ""
                with suppress(FileNotFoundError):  # a cleaner removed the empty job directory in between
                    job = private_directory(user / _plain(identity.job))
                    path = job / f"{_plain(identity.host)}-{_plain(identity.local_rank)}{suffix}"
                    if made := cls._create(user, path) or cls._adopt(path):
                        return made
        except OSError as error:
            raise ArtifactSpaceError(
                f"cannot make a directory under {root} ({error.strerror})",
                "a writable directory",
                "free some space or name another place with --gdn_cache_root",
            ) from error
        raise ArtifactError(
            f"256 living processes hold directories of {identity}", "one process for each rank", "end the others"
        )

    @classmethod
    def _create(cls, user: Path, path: Path) -> "RankDirectory | None":
        # The lock is taken before the directory gets its name, so nobody ever sees the name without the lock.
        staging = user / f".new-{uuid.uuid4().hex}"
        os.mkdir(staging, 0o700)
        lock = None
        try:
            lock = _lock(staging / "lock", create=True)
            assert lock is not None
            os.rename(staging, path)
        except OSError as error:
            if lock is not None:
                os.close(lock)
            shutil.rmtree(staging, ignore_errors=True)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                return None
            raise
        except UnsafeDirectoryError:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return cls(path, lock, adopted=False)

    @classmethod
    def _adopt(cls, path: Path) -> "RankDirectory | None":
        try:
            require_own_directory(path)
            lock = _lock(path / "lock")
        except (FileNotFoundError, NotADirectoryError):
            return None  # it went away, or it is nothing that this code made: take the next name
        if lock is None:
            return None
        if not _same(lock, path / "lock"):
            os.close(lock)
            return None
        return cls(path, lock, adopted=True)

    def close(self) -> None:
        """Give the lock back and leave the contents; a later process may adopt or remove them."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """Delete the directory and give the lock back. A forked child runs exit handlers too, and deletes nothing."""
        if os.getpid() != self._owner:
            self.close()
            return
        if not _delete(self.path):
            shutil.rmtree(self.path, ignore_errors=True)
        self.close()
        with suppress(OSError):
            self.path.parent.rmdir()


def remove_stale(root: Path, *, keep_job: str) -> tuple[Path, ...]:
    """Remove the directories of jobs that no longer run (their lock can be taken); returns what was removed.

    Directories of `keep_job` stay: a restarted rank adopts its own. Never raises for what it cannot remove.
    """
    removed: list[Path] = []
    user = root / f"fla-safe-{os.geteuid()}"
    try:
        private_directory(user)
        names = sorted(os.listdir(user))
    except (OSError, UnsafeDirectoryError):
        return ()
    for name in names:
        job = user / name
        with suppress(OSError):
            found = os.lstat(job)
            if name.startswith(".trash-") or (
                name.startswith(".new-") and time.time() - found.st_mtime > _STAGING_SECONDS
            ):
                shutil.rmtree(job, ignore_errors=True)
            elif not name.startswith(".") and name != _plain(keep_job) and stat.S_ISDIR(found.st_mode):
                for rank in sorted(job.iterdir()):
                    if _sees_locks(root, rank) and _discard_dead(rank):
                        removed.append(rank)
                job.rmdir()
    return tuple(removed)


def find_stale(root: Path) -> tuple[Path, ...]:
    """Directories that `remove_stale` would remove, without touching them."""
    user = root / f"fla-safe-{os.geteuid()}"
    found: list[Path] = []
    with suppress(OSError, UnsafeDirectoryError):
        for job in sorted(require_own_directory(user).iterdir()):
            for rank in sorted(job.iterdir()) if not job.name.startswith(".") and job.is_dir() else ():
                with suppress(OSError):
                    lock = _lock(rank / "lock") if _sees_locks(root, rank) else None
                    if lock is not None:
                        os.close(lock)
                        found.append(rank)
    return tuple(found)


def _sees_locks(root: Path, rank: Path) -> bool:
    """Whether a lock that can be taken means a dead owner: on many network file systems a lock is its machine's own."""
    return rank.name.rpartition("-")[0] == _plain(socket.gethostname()) or (
        filesystem_type(root) not in NETWORK_FILESYSTEMS
    )


def _discard_dead(path: Path) -> bool:
    try:
        lock = _lock(path / "lock")
    except FileNotFoundError:
        return _empty_lockless(path)
    except (OSError, UnsafeDirectoryError):
        return False
    if lock is None:
        return False
    try:
        return _same(lock, path / "lock") and _delete(path)
    finally:
        os.close(lock)


def _delete(path: Path) -> bool:
    """Delete a rank's directory whose lock this process holds.

    Renamed first, so that under its name there never is half a directory: others would adopt it, or find no lock in it,
    take it for nobody's, and by then remove the one that a new owner put in its place.
    """
    trash = path.parent.parent / f".trash-{uuid.uuid4().hex}"
    try:
        os.rename(path, trash)
    except OSError:
        return False
    shutil.rmtree(trash, ignore_errors=True)
    return True


def _empty_lockless(path: Path) -> bool:
    """Delete a directory without a lock: directories get their names with locks inside, so it has no owner.

    A new owner may replace it at any time, by a rename that wants it empty: deleted is what lies in the directory that
    was looked into, whatever has its name by now.
    """
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        names = os.listdir(folder)
        if "lock" in names:
            return False
        for name in names:
            try:
                os.unlink(name, dir_fd=folder)
            except IsADirectoryError:
                shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
        path.rmdir()
    except OSError:
        return False
    finally:
        os.close(folder)
    return True


def _lock(path: Path, *, create: bool = False) -> int | None:
    """Descriptor of the locked file, or None when a living process holds it."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
    handle = os.open(path, flags, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError as error:
        os.close(handle)
        raise UnsafeDirectoryError(
            f"{path.parent} is on a file system without locks ({error.strerror})",
            "a file system with flock",
            "name a local directory with --gdn_cache_root",
        ) from error
    return handle


def _same(handle: int, path: Path) -> bool:
    """Whether the locked file still is the one at `path` (the directory may have been replaced meanwhile)."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except OSError:
        return False


def _first(environ: Mapping[str, str], names: Sequence[str]) -> str | None:
    # torchrun writes the literal "none" when no run id was given.
    return next((environ[n] for n in names if environ.get(n, "").strip() not in ("", "none")), None)


def _plain(name: str) -> str:
    """A file name that says the same: unusual characters replaced, and then told apart by a short hash."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:80].lstrip(".") or "_"
    return plain if plain == name else f"{plain}~{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:8]}"
