"""Where compiled kernels may live: a local, private place with room, that no other user can turn elsewhere."""

import os
import re
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fla_safe.errors import FlaSafeError

__all__ = [
    "NEEDED_BYTES",
    "NETWORK_FILESYSTEMS",
    "ArtifactError",
    "ArtifactSpaceError",
    "Root",
    "UnsafeDirectoryError",
    "choose_root",
    "filesystem_type",
    "private_directory",
    "require_own_directory",
    "temporary_directory",
]

NETWORK_FILESYSTEMS = frozenset(
    (
        "nfs",
        "nfs4",
        "lustre",
        "gpfs",
        "beegfs",
        "cifs",
        "smb3",
        "smbfs",
        "wekafs",
        "panfs",
        "pvfs2",
        "dvs",
        "ceph",
        "glusterfs",
        "afs",
        "9p",
        "ocfs2",
        "gfs2",
        "orangefs",
        "virtiofs",
        "fuse.sshfs",
        "fuse.s3fs",
        "fuse.gcsfuse",
        "fuse.juicefs",
        "fuse.ceph",
        "fuse.ceph-fuse",
        "fuse.glusterfs",
        "fuse.mfs",
        "fuse.goofys",
        "fuse.cvmfs",
    )
)
"""Types on which Triton's own cache is known to mix or lose files (Triton pull request 11319, issue 2688)."""

NEEDED_BYTES = 512 * 2**20
NEEDED_INODES = 20_000


class ArtifactError(FlaSafeError, RuntimeError):
    """Base of everything that can go wrong with artifact directories."""


class ArtifactSpaceError(ArtifactError):
    """No candidate directory exists, is writable and has room, or the chosen one filled up and no other has room."""


class UnsafeDirectoryError(ArtifactError):
    """A directory, or a link on the way to it, could be changed by another user."""


@dataclass(frozen=True, slots=True)
class Root:
    """A place for rank directories: `free` bytes on a file system of type `filesystem`."""

    path: Path
    filesystem: str
    free: int

    @property
    def is_network(self) -> bool:
        """Whether other machines may write there too."""
        return self.filesystem in NETWORK_FILESYSTEMS


def filesystem_type(path: Path) -> str:
    """Type of the mount that holds `path`, from the kernel's mount table; `"unknown"` where there is none."""
    target = os.path.realpath(path)
    best, kind = "", "unknown"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return kind
    for line in lines:
        left, _, right = line.partition(" - ")
        if len(left.split()) < 5 or not right:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), left.split()[4])
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind


def choose_root(
    explicit: Path | None = None,
    *,
    candidates: Sequence[Path] | None = None,
    needed_bytes: int = NEEDED_BYTES,
) -> Root:
    """The first place with room: memory (`/dev/shm`), the temporary directory, the user's cache directory.

    Args:
        explicit: the user's own choice; then no other place is tried, and a network file system is accepted.
        candidates: replaces the default places.
        needed_bytes: room wanted, by all ranks of this host together.

    Raises:
        ArtifactSpaceError: no place will do; the message says why for each.
        UnsafeDirectoryError: the explicit place could be changed by other users.
    """
    if explicit is not None:
        explicit = explicit.absolute()  # the job may change its working directory
        with suppress(OSError):
            explicit.mkdir(parents=True, exist_ok=True)
        _require_safe_way(explicit)
        places: Sequence[Path] = [explicit]
    elif candidates is not None:
        places = candidates
    else:
        places = [p for p in (Path("/dev/shm"), temporary_directory(), _home_cache()) if p is not None]
    refused: list[str] = []
    for place in places:
        try:
            if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
                refused.append(f"{place}: not a writable directory")
                continue
            if explicit is None:
                _require_safe_way(place)
            usage = os.statvfs(place)
        except (OSError, UnsafeDirectoryError) as error:
            refused.append(f"{place}: {error}")
            continue
        root = Root(place, filesystem_type(place), usage.f_bavail * usage.f_frsize)
        if root.is_network and explicit is None:
            refused.append(f"{place}: on {root.filesystem}, which other machines share")
        elif root.free < needed_bytes:
            refused.append(f"{place}: {root.free >> 20} MiB free")
        elif usage.f_files > 0 and usage.f_favail < NEEDED_INODES:
            refused.append(f"{place}: {usage.f_favail} free inodes")
        else:
            return root
    raise ArtifactSpaceError(
        f"no place for compiled kernels ({'; '.join(refused) or 'no candidate'})",
        f"a local writable directory with {needed_bytes >> 20} MiB and {NEEDED_INODES} inodes free",
        "free some space, enlarge /dev/shm (docker: --shm-size), or name a directory with --gdn_cache_root",
    )


def temporary_directory() -> Path | None:
    """The system's temporary directory; None where no such directory can be written."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return None


def _home_cache() -> Path | None:
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # no HOME, and a user id without an account, as in many containers
        return None


def private_directory(path: Path) -> Path:
    """Create a directory that only this user can enter, or accept one that already is.

    Raises:
        UnsafeDirectoryError: it is a link or somebody else's.
    """
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    return require_own_directory(path)


def require_own_directory(path: Path) -> Path:
    """Accept a directory of this user, and close it to others.

    Raises:
        UnsafeDirectoryError: it is a link or somebody else's.
    """
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else f"owned by user {found.st_uid}"
        raise UnsafeDirectoryError(
            f"{path} is {kind}",
            f"a directory of user {os.geteuid()}",
            "remove it, or name another place with --gdn_cache_root",
        )
    if stat.S_IMODE(found.st_mode) != 0o700:
        os.chmod(path, 0o700)
    return path


def _require_safe_way(path: Path) -> None:
    for part in [*reversed(path.absolute().parents), path.absolute()]:
        try:
            found = os.lstat(part)
        except OSError:
            return
        if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid()):
            raise UnsafeDirectoryError(
                f"{part} is a symbolic link of user {found.st_uid}",
                "no link that another user can turn elsewhere",
                "name the directory without the link",
            )
        others_write = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
        if stat.S_ISDIR(found.st_mode) and others_write:
            raise UnsafeDirectoryError(
                f"every user may replace what is in {part} (mode {stat.S_IMODE(found.st_mode):o})",
                "a directory that is private or has the sticky bit",
                f"chmod +t {part}, or name another directory",
            )
