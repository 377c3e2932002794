"""Reads a bundle without trusting it: names, sizes, hashes, schema and groups are checked before anything is used."""

import hashlib
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fla_safe.errors import FlaSafeError
from fla_safe.runtime.artifacts.groups import (
    MAX_FILE_BYTES,
    RECORD,
    DamageError,
    FileSeal,
    GroupRecord,
    check_metadata,
    is_entry_key,
    is_file_name,
)
from fla_safe.runtime.tuning.decisions import DecisionTable, Stamp, TableError
from fla_safe.runtime.tuning.table_json import strict_json

__all__ = [
    "MANIFEST",
    "REMEDY",
    "SCHEMA",
    "TABLE",
    "Bundle",
    "BundleDamagedError",
    "BundleError",
    "BundleUnsafeError",
    "Group",
    "damaged",
    "read",
    "require_whole",
]

SCHEMA = "fla-safe/bundle/1"
MAX_MEMBERS = 100_000
MAX_TOTAL_BYTES = 4 * 2**30
MAX_MANIFEST_BYTES = 64 * 2**20

MANIFEST = "MANIFEST.json"
TABLE = "table.json"
REMEDY = "get an undamaged copy of the bundle, or start without it: the job then tunes and compiles"

Group = tuple[GroupRecord, Mapping[str, bytes]]


class BundleError(FlaSafeError, ValueError):
    """Base of every reason not to use a bundle. The job tunes instead."""


class BundleDamagedError(BundleError):
    """The file is no bundle, is incomplete, or its contents are not those that its manifest states."""


class BundleUnsafeError(BundleError):
    """A member's name leads out of the bundle, is a link, or is larger than it says."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A verified bundle in memory: `table`, `groups` (each with its files' contents), and the `id` of its manifest."""

    table: DecisionTable
    groups: tuple[Group, ...]
    id: str

    @property
    def stamp(self) -> Stamp:
        """What the bundle was made for."""
        return self.table.stamp

    def describe(self) -> dict[str, Any]:
        """Summary for people and JSON."""
        return {
            "id": self.id,
            "stamp": self.stamp.as_dict(),
            "table_hash": self.table.hash(),
            "decisions": len(self.table),
            "verified_decisions": sum(bool((e := self.table.entry(k)) and e.verified) for k in self.table),
            "kernels": sorted({k.kernel for k in self.table}),
            "artifacts": len(self.groups),
            "artifact_bytes": sum(seal.size for record, _ in self.groups for _, seal in record.files),
        }


def read(path: str | Path, *, expect_id: str | None = None) -> Bundle:
    """Read and verify a whole bundle; nothing is written and nothing in it is trusted before it was checked.

    Args:
        path: the bundle.
        expect_id: refuse any other bundle than the one with this id (or a prefix of 12 or more characters).

    Raises:
        BundleDamagedError: see the class.
        BundleUnsafeError: see the class.
    """
    with _opened(Path(path)) as archive:
        names = _safe_names(path, archive)
        if names.count(MANIFEST) != 1:
            raise damaged(path, f"it has no {MANIFEST}")
        raw = _member(path, archive, MANIFEST, MAX_MANIFEST_BYTES)
        found_id = hashlib.sha256(raw).hexdigest()
        if expect_id is not None and not (len(expect_id) >= 12 and found_id.startswith(expect_id.lower())):
            raise BundleDamagedError(f"{path}: bundle {found_id:.16}", f"bundle {expect_id:.64}", REMEDY)
        stamp, table_hash, seals = _parse_manifest(path, raw)
        if extra := sorted(set(names) - seals.keys() - {MANIFEST}):
            raise damaged(path, f"it holds {extra[0]!r:.120}, which the manifest does not list")
        contents: dict[str, bytes] = {}
        for name, seal in seals.items():
            if name not in names:
                raise damaged(path, f"{name!r:.120} is missing")
            contents[name] = _member(path, archive, name, seal.size)
            try:
                seal.require(contents[name], name)
            except DamageError as error:
                raise damaged(path, str(error)) from None
    table = _table(path, contents, stamp, table_hash)
    return Bundle(table, tuple(_groups(path, contents, stamp)), found_id)


def _parse_manifest(path: str | Path, raw: bytes) -> tuple[Stamp, str, dict[str, FileSeal]]:
    try:
        data = strict_json(raw)
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ValueError(f"schema is not {SCHEMA}")
        if not isinstance(data.get("stamp"), dict) or not isinstance(data.get("files"), dict):
            raise ValueError("stamp or files is not an object")
        stamp = Stamp.from_mapping(data["stamp"])
        seals: dict[str, FileSeal] = {}
        for name, seal in data["files"].items():
            if not isinstance(seal, list) or len(seal) != 2:
                raise ValueError(f"no size and hash for {name!r:.80}")
            size, sha = seal
            if type(size) is not int or not 0 <= size <= MAX_FILE_BYTES or not isinstance(sha, str):
                raise ValueError(f"no size and hash for {name!r:.80}")
            seals[name] = FileSeal(size, sha)
        if sum(seal.size for seal in seals.values()) > MAX_TOTAL_BYTES:
            raise ValueError(f"more than {MAX_TOTAL_BYTES} bytes in all")
        if not isinstance(data.get("table_hash"), str):
            raise ValueError("table_hash is not text")
    except ValueError as error:
        raise damaged(path, f"{MANIFEST}: {error}") from None
    return stamp, data["table_hash"], seals


def _table(path: str | Path, contents: Mapping[str, bytes], stamp: Stamp, table_hash: str) -> DecisionTable:
    try:
        table = DecisionTable.from_json(contents.get(TABLE, b""), source="bundle")
    except TableError as error:
        raise damaged(path, f"{TABLE}: {error.seen}") from error
    if table.stamp != stamp or table.hash() != table_hash:
        raise damaged(path, f"{TABLE} is not the table that the manifest names")
    return table


def _groups(path: str | Path, contents: Mapping[str, bytes], stamp: Stamp) -> Iterator[Group]:
    entries: dict[str, dict[str, bytes]] = {}
    for name, data in contents.items():
        if name != TABLE:
            _, key, file = name.split("/")
            entries.setdefault(key, {})[file] = data
    for key, files in entries.items():
        try:
            record = GroupRecord.from_json(files.pop(RECORD, b""))
            if record.key != key or set(files) != {file for file, _ in record.files}:
                raise DamageError("its record is of another entry")
            require_whole(record, files, stamp)
        except (DamageError, BundleDamagedError) as error:
            raise damaged(path, f"artifact {key}: {getattr(error, 'seen', error)}") from None
        yield record, files


def require_whole(record: GroupRecord, contents: Mapping[str, bytes], stamp: Stamp) -> None:
    try:
        if record.triton != stamp.triton:
            raise DamageError(f"it is of Triton {record.triton}, the table of {stamp.triton}")
        for file, seal in record.files:
            seal.require(contents.get(file, b""), file)
        check_metadata(contents, record)
    except DamageError as error:
        raise BundleDamagedError(
            f"artifact {record.key}: {error}", "a whole group of the table's Triton", REMEDY
        ) from (error)


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except FileNotFoundError as error:
        raise BundleError(f"there is no bundle {path}", "an existing file", "correct the path") from error
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror})", "a readable file", "see to its mode") from error
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        NotImplementedError,
        UnicodeError,
        ValueError,
        OverflowError,
    ) as e:
        if isinstance(e, FlaSafeError):
            raise
        raise damaged(path, str(e)) from e


def _safe_names(path: str | Path, archive: zipfile.ZipFile) -> list[str]:
    infos = archive.infolist()
    if len(infos) > MAX_MEMBERS:
        raise BundleUnsafeError(f"{path} has {len(infos)} members", f"at most {MAX_MEMBERS}", REMEDY)
    names = [info.filename for info in infos]
    if len(set(names)) != len(names):
        raise BundleUnsafeError(f"{path} holds a name twice", "each name once", REMEDY)
    for info in infos:
        # orig_filename: zipfile cuts `filename` at a null byte.
        parts = info.orig_filename.split("/")
        artifact = len(parts) == 3 and parts[0] == "artifacts" and is_entry_key(parts[1])
        plain = artifact and (parts[2] == RECORD or is_file_name(parts[2]))
        if not plain and info.orig_filename not in (MANIFEST, TABLE):
            raise BundleUnsafeError(
                f"{path} holds {info.orig_filename!r:.120}", "only table.json and artifacts/<key>/<file>", REMEDY
            )
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # Others ask for memory as they like, and their decoders raise errors of their own.
            raise BundleUnsafeError(
                f"{path}: {info.filename} is compressed by method {info.compress_type}", "deflate, or none", REMEDY
            )
        if (info.external_attr >> 28) not in (0, 0o10) or info.flag_bits & 1:
            raise BundleUnsafeError(f"{path}: {info.filename} is a link or encrypted", "plain files", REMEDY)
    return names


def _member(path: str | Path, archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    # Not more than announced, whatever the archive claims: a small file can inflate to any size.
    with archive.open(name) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise BundleUnsafeError(f"{path}: {name} is larger than {limit} bytes", "the announced size", REMEDY)
    return data


def damaged(path: str | Path, reason: str) -> BundleDamagedError:
    return BundleDamagedError(f"{path} is not a whole bundle: {reason}", f"a file of schema {SCHEMA}", REMEDY)
