"""A rank's own store of compiled kernels: groups appear whole, are checked at every read, and heal by recompilation.

    directory = RankDirectory.acquire(choose_root(settings_root).path, JobIdentity.read(environ))
    store = ArtifactStore(directory.path)
    restore = triton_cache.install(store)       # Triton asks this store ...
    with triton_cache.scope():                  # ... for what this thread compiles in here, and only for that
        kernel.warmup(...)
    restore()

A damaged entry is moved to `quarantine/`, reported in one log line, and is then a miss: Triton compiles it again.
"""

import errno
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from fla_safe.runtime.artifacts.groups import (
    RECORD,
    DamageError,
    FileSeal,
    GroupRecord,
    check_group,
    check_metadata,
    is_entry_key,
    is_file_name,
)
from fla_safe.runtime.artifacts.roots import ArtifactError, ArtifactSpaceError, private_directory
from fla_safe.runtime.artifacts.spill import NO_LINKS, NO_ROOM, Spill, write_new

__all__ = ["ArtifactStore", "StoreCounts"]

log = logging.getLogger("fla_safe")

_QUARANTINE_COPIES = 32


@dataclass(slots=True)
class StoreCounts:
    """What a store did since it was made."""

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    written: int = 0
    seeded: int = 0
    unsaved: int = 0


class ArtifactStore:
    """Compiled kernels in one directory that no other process writes.

    Args:
        directory: private directory of this rank (see `directories.RankDirectory`).
        triton: version of the running Triton; entries of another one are damage.
        spill: directory for files that do not fit into `directory` any more; the temporary directory by default.
    """

    def __init__(self, directory: Path, *, triton: str | None = None, spill: Path | None = None) -> None:
        if triton is None:
            import triton as module

            triton = str(module.__version__)
        self.directory = directory
        self.triton = triton
        self.counts = StoreCounts()
        self._spill = Spill(directory, spill)
        self._lock = threading.Lock()
        self._entries = directory / "entries"
        self._modules = directory / "modules"
        self._staging = directory / "staging"
        self._quarantine = directory / "quarantine"
        try:
            # What a killed process was still writing is in staging, and nowhere else.
            shutil.rmtree(self._staging, ignore_errors=True)
            for part in (self._entries, self._modules, self._staging, self._quarantine):
                private_directory(part)
        except OSError as error:
            raise ArtifactSpaceError(
                f"cannot write to {directory} ({error.strerror})",
                "a writable directory with free space",
                "name another place with --gdn_cache_root",
            ) from error

    # -- reading ------------------------------------------------------------------------------------------------

    def load_group(self, key: str, name: str) -> dict[str, str] | None:
        """Paths of a checked group by file name, or None: not there, or damaged and now in quarantine."""
        record = self._checked(key, name)
        if record is None:
            self.counts.misses += 1
            return None
        self.counts.hits += 1
        return {file: str(self._entries / key / file) for file, _ in record.files}

    def load_module(self, key: str, name: str) -> str | None:
        """Path of a checked single file (a compiled launcher), or None."""
        try:
            found = sorted((self._modules / key).glob(f"*-{_escape(name)}"))
        except OSError:
            found = []
        for path in found:
            sha = path.name.removesuffix(f"-{name}")
            try:
                data = path.read_bytes()
                FileSeal(len(data), sha).require(data, name)
            except (OSError, DamageError) as error:
                self._set_aside(path, key, str(error))
                continue
            self.counts.hits += 1
            return str(path)
        self.counts.misses += 1
        return None

    def groups(self) -> Iterator[GroupRecord]:
        """Every whole group; damaged ones are set aside on the way."""
        for entry in sorted(self._entries.iterdir()):
            if is_entry_key(entry.name) and (record := self._checked(entry.name, None)) is not None:
                yield record

    def read(self, record: GroupRecord) -> dict[str, bytes]:
        """Contents of a group's files, checked.

        Raises:
            ArtifactError: a file changed since the record was made.
        """
        contents = {}
        for file, seal in record.files:
            try:
                contents[file] = (self._entries / record.key / file).read_bytes()
                seal.require(contents[file], file)
            except (OSError, DamageError) as error:
                raise ArtifactError(
                    f"{record.key}/{file}: {error}", "the file that was written", "run the warm-up again"
                ) from error
        return contents

    def manifest(self) -> dict[str, object]:
        """Everything in the store with its hashes, JSON-serialisable."""
        return {
            "triton": self.triton,
            "counts": asdict(self.counts),
            "groups": {r.key: {file: asdict(seal) for file, seal in r.files} for r in self.groups()},
        }

    # -- writing ------------------------------------------------------------------------------------------------

    def stage(self, writer: str, name: str, data: bytes) -> Path:
        """Write one file of a group that is not whole yet; `writer` is any name no other group in the making has.

        Raises:
            ArtifactSpaceError: neither the store nor the spill directory can hold it.
        """
        try:
            place = self._staging / writer
            place.mkdir(mode=0o700, exist_ok=True)
            return write_new(place / name, data)
        except OSError as error:
            return self._spill.write(name, data, error)

    def publish(self, writer: str, record: GroupRecord) -> bool:
        """Make a staged group visible, all at once. False when it could not be kept (it then lives in this process)."""
        staged, ready = self._staging / writer, self._staging / f"{writer}.ready"
        try:
            ready.mkdir(mode=0o700)
            for file, _ in record.files:
                # Triton goes on to read the staged path, so the file needs both names.
                os.link(staged / file, ready / file)
            (ready / RECORD).write_text(record.to_json())
            return self._rename_in(ready, record.key)
        except OSError as error:
            if error.errno not in NO_ROOM | NO_LINKS:
                raise
            self._unsaved(record.key, error)
            return False
        finally:
            shutil.rmtree(ready, ignore_errors=True)

    def store_module(self, key: str, name: str, data: bytes) -> Path:
        """Keep a single file under a name that carries its own hash, so that file and seal cannot come apart.

        Raises:
            ArtifactSpaceError: neither the store nor the spill directory can hold it.
        """
        target = self._modules / key / f"{FileSeal.of(data).sha256}-{name}"
        try:
            target.parent.mkdir(mode=0o700, exist_ok=True)
            staged = write_new(self._staging / uuid.uuid4().hex, data)
            os.replace(staged, target)
        except OSError as error:
            return self._spill.write(name, data, error)
        self.counts.written += 1
        return target

    def seed(self, groups: Iterable[tuple[GroupRecord, Mapping[str, bytes]]]) -> int:
        """Copy groups in (from a bundle); returns how many. Wrong ones are left out with a log line.

        Stops at the first sign of a full disk: what is missing is compiled.
        """
        taken = 0
        for record, contents in groups:
            ready = self._staging / f"{uuid.uuid4().hex}.ready"
            try:
                if record.triton != self.triton:
                    raise DamageError(f"Triton {record.triton} wrote it and {self.triton} runs")
                for file, seal in record.files:
                    if not is_file_name(file) or file not in contents:
                        raise DamageError(f"{file!r:.80} is missing")
                    seal.require(contents[file], file)
                check_metadata(contents, record)
                ready.mkdir(mode=0o700)
                for file, _ in record.files:
                    write_new(ready / file, contents[file])
                (ready / RECORD).write_text(record.to_json())
                if self._rename_in(ready, record.key):
                    taken += 1
                    self.counts.seeded += 1
            except DamageError as error:
                log.warning("fla-safe: entry %s of the bundle is not used: %s", record.key, error)
            except OSError as error:
                self._unsaved(record.key, error)
                break
            finally:
                shutil.rmtree(ready, ignore_errors=True)
        return taken

    def prune(self, keep: Collection[str] | None = None) -> int:
        """After the warm-up: forget groups whose key is not in `keep` (None keeps all), and the compiler's texts.

        Kernels loaded in this process are not affected: they live in memory. Returns the bytes given back.
        """
        before = self.size()
        if keep is not None:
            for entry in list(self._entries.iterdir()):
                if entry.name not in keep:
                    shutil.rmtree(entry, ignore_errors=True)
        for staged in list(self._staging.iterdir()):
            shutil.rmtree(staged, ignore_errors=True)
        return before - self.size()

    def size(self) -> int:
        """Bytes on disk; a file with two names counts once."""
        seen = {}
        for place, _, names in os.walk(self.directory):
            for name in names:
                with suppress(OSError):
                    found = os.lstat(os.path.join(place, name))
                    seen[found.st_dev, found.st_ino] = found.st_size
        return sum(seen.values())

    def close(self) -> None:
        """Remove the spill directory, if there is one."""
        self._spill.remove()

    # -- inside -------------------------------------------------------------------------------------------------

    def _checked(self, key: str, name: str | None) -> GroupRecord | None:
        entry = self._entries / key
        try:
            return check_group(entry, key, name, self.triton)
        except DamageError as error:
            self._set_aside(entry, key, str(error))
        except OSError as error:
            log.warning("fla-safe: artifact %s cannot be read (%s); compiling it again", key, error.strerror)
        return None

    def _rename_in(self, ready: Path, key: str) -> bool:
        try:
            os.rename(ready, self._entries / key)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False  # another thread was first; the key says that its group is the same kernel
            raise
        self.counts.written += 1
        return True

    def _set_aside(self, path: Path, key: str, reason: str) -> None:
        """Move a damaged entry out of the way: one log line, a copy to look at, and a miss from now on."""
        self.counts.damaged += 1
        where = "it could not be moved"
        with self._lock, suppress(OSError):
            copies = sorted(self._quarantine.iterdir(), key=lambda p: p.lstat().st_mtime_ns)
            for oldest in copies[: max(0, len(copies) - _QUARANTINE_COPIES + 1)]:
                shutil.rmtree(oldest, ignore_errors=True) if oldest.is_dir() else oldest.unlink()
            target = self._quarantine / f"{key}.{uuid.uuid4().hex[:8]}"
            os.rename(path, target)
            where = f"copy in {target}"
        log.warning("fla-safe: damaged artifact %s: %s; compiling it again (%s)", key, reason, where)

    def _unsaved(self, key: str, error: OSError) -> None:
        self.counts.unsaved += 1
        if self.counts.unsaved == 1:
            log.warning("fla-safe: artifact %s is not kept (%s); later ones may not be either", key, error.strerror)


def _escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
