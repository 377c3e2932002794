"""Files that are written completely or not at all, and into another directory when the first one takes no more."""

import errno
import logging
import os
import socket
import tempfile
import threading
import uuid
from contextlib import suppress
from pathlib import Path

from fla_safe.runtime.artifacts.directories import JobIdentity, RankDirectory
from fla_safe.runtime.artifacts.roots import ArtifactError, ArtifactSpaceError

__all__ = ["NO_LINKS", "NO_ROOM", "Spill", "write_new"]

log = logging.getLogger("fla_safe")

NO_ROOM = frozenset(
    (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EIO,
        errno.ENOENT,
        errno.ENOTDIR,
    )
)
"""Errors of a full, read-only, quota-limited, failing or vanished directory; any other one is a defect."""

NO_LINKS = frozenset((errno.EPERM, errno.EMLINK, errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP))
"""Errors of a file system on which a file cannot have two names."""


def write_new(path: Path, data: bytes) -> Path:
    """Write a new file completely or not at all."""
    try:
        path.write_bytes(data)
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise
    return path


class Spill:
    """The smaller choice when `directory` takes no more files: a temporary one, for this process only.

    It is locked like a rank's directory, so `remove_stale` of the temporary directory clears it after a killed process.

    Args:
        directory: what it stands in for.
        root: where to make it; the system's temporary directory by default.
    """

    def __init__(self, directory: Path, root: Path | None = None) -> None:
        self._directory = directory
        self._root = root
        self._place: RankDirectory | None = None
        self._lock = threading.Lock()

    def write(self, name: str, data: bytes, reason: OSError) -> Path:
        """Write a file that `directory` refused with `reason`.

        Raises:
            OSError: `reason` itself, when it does not speak of a full or read-only directory.
            ArtifactSpaceError: there is no room here either.
        """
        if reason.errno not in NO_ROOM:
            raise reason
        try:
            with self._lock:
                if self._place is None:
                    mine = JobIdentity(f"spill-{os.getpid()}", socket.gethostname(), "spill")
                    self._place = RankDirectory.acquire(self._root or Path(tempfile.gettempdir()), mine)
                    log.warning(
                        "fla-safe: %s takes no more files (%s); kernels compiled from now on are not kept",
                        self._directory,
                        reason.strerror,
                    )
            return write_new(self._place.path / f"{uuid.uuid4().hex}-{name}", data)
        except (OSError, ArtifactError) as error:
            raise ArtifactSpaceError(
                f"{self._directory} cannot hold a compiled kernel ({reason.strerror}), "
                f"and neither can the temporary directory ({getattr(error, 'strerror', error)})",
                "some free space in one of them",
                "free space, raise the quota, or name another place with --gdn_cache_root",
            ) from error

    def remove(self) -> None:
        """Delete the files and the directory."""
        if self._place is not None:
            self._place.remove()
            self._place = None
