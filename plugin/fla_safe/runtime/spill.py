"""Files that are written completely or not at all, and into another directory when the first one takes no more."""

import errno
import logging
import shutil
import tempfile
import threading
import uuid
from contextlib import suppress
from pathlib import Path

from fla_safe.runtime.roots import ArtifactSpaceError

__all__ = ["NO_ROOM", "Spill", "write_new"]

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

    Args:
        directory: what it stands in for.
        root: where to make it; the system's temporary directory by default.
    """

    def __init__(self, directory: Path, root: Path | None = None) -> None:
        self._directory = directory
        self._root = root
        self._place: Path | None = None
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
                    self._place = Path(tempfile.mkdtemp(prefix="fla-safe-spill-", dir=self._root))
                    log.warning(
                        "fla-safe: %s takes no more files (%s); kernels compiled from now on are not kept",
                        self._directory,
                        reason.strerror,
                    )
            return write_new(self._place / f"{uuid.uuid4().hex}-{name}", data)
        except OSError as error:
            raise ArtifactSpaceError(
                f"{self._directory} cannot hold a compiled kernel ({reason.strerror}), "
                f"and neither can the temporary directory ({error.strerror})",
                "some free space in one of them",
                "free space, raise the quota, or name another place with --gdn_cache_root",
            ) from error

    def remove(self) -> None:
        """Delete the files and the directory."""
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)
            self._place = None
