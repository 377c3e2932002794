"""A decision table, its compiled kernels and a manifest of hashes in one file, for any path and user.

The file is a zip with fixed times and order, so the same contents give the same bytes:
`MANIFEST.json` (schema, stamp, table hash, size and SHA-256 of every member), `table.json`, `artifacts/<key>/<file>`.
A bundle's id is the SHA-256 of its manifest; whoever must know that nobody exchanged the file compares that id.
"""

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from fla_safe.runtime.artifacts.bundle_read import (
    MANIFEST,
    SCHEMA,
    TABLE,
    Bundle,
    BundleDamagedError,
    BundleError,
    BundleUnsafeError,
    Group,
    read,
    require_whole,
)
from fla_safe.runtime.artifacts.groups import RECORD
from fla_safe.runtime.tuning.decisions import Conflict, ConflictPolicy, DecisionTable, Stamp

__all__ = [
    "Bundle",
    "BundleDamagedError",
    "BundleError",
    "BundleUnsafeError",
    "Group",
    "merge",
    "pack",
    "read",
    "unpack",
    "verify",
]

# The oldest time a zip can carry: equal contents must give equal bytes.
_TIME = (1980, 1, 1, 0, 0, 0)


def pack(path: str | Path, table: DecisionTable, groups: Iterable[Group] = ()) -> Bundle:
    """Write a bundle; a reader finds the old file or the whole new one.

    Args:
        path: file to write.
        table: decisions with their stamp.
        groups: compiled kernels, for example `((r, store.read(r)) for r in store.groups())`.

    Raises:
        BundleError: the file cannot be written; nothing is left behind.
        BundleDamagedError: a group is of another Triton than the table, or not whole.
    """
    kept = tuple(sorted(groups, key=lambda g: g[0].key))
    for record, contents in kept:
        require_whole(record, contents, table.stamp)
    members: dict[str, bytes] = {TABLE: table.to_json().encode()}
    for record, contents in kept:
        members[f"artifacts/{record.key}/{RECORD}"] = record.to_json().encode()
        members |= {f"artifacts/{record.key}/{file}": contents[file] for file, _ in record.files}
    manifest = _manifest(table, members)
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.absolute().parent)
    except OSError as error:
        raise _unwritable(target, error) from error
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w") as archive:
            for name, data in {MANIFEST: manifest, **members}.items():
                info = zipfile.ZipInfo(name, _TIME)
                info.compress_type = zipfile.ZIP_DEFLATED
                info.external_attr = 0o644 << 16
                archive.writestr(info, data, compresslevel=6)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except OSError as error:
        raise _unwritable(target, error) from error
    finally:
        with suppress(OSError):
            os.unlink(temporary)
    return Bundle(table, kept, hashlib.sha256(manifest).hexdigest())


def verify(path: str | Path, running: Stamp | None = None, *, expect_id: str | None = None) -> Bundle:
    """Read a bundle and, with `running`, check that this process can use it.

    Raises:
        BundleError: as `read`.
        StampMismatchError: it was made for another GPU architecture, Triton or FLA.
    """
    bundle = read(path, expect_id=expect_id)
    if running is not None:
        remedy = "make a bundle on this machine with fla-safe warmup, or start without it: the job then tunes"
        bundle.stamp.require(running, f"bundle {path}", remedy)
    return bundle


def unpack(path: str | Path, directory: str | Path, *, expect_id: str | None = None) -> Bundle:
    """Write a verified bundle's contents below `directory` (which must be new or empty), for people to look at.

    Raises:
        BundleError: as `read`; also when the directory is not empty or cannot be written.
    """
    bundle = read(path, expect_id=expect_id)
    target = Path(directory)
    try:
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise BundleError(f"{target} is not empty", "a new or empty directory", "name another directory")
        # Every name below was made from checked parts, none is taken from the archive.
        (target / TABLE).write_text(bundle.table.to_json())
        for record, contents in bundle.groups:
            entry = target / "artifacts" / record.key
            entry.mkdir(parents=True)
            for file, _ in record.files:
                (entry / file).write_bytes(contents[file])
            (entry / RECORD).write_text(record.to_json())
    except OSError as error:
        raise _unwritable(target, error) from error
    return bundle


def merge(
    path: str | Path, sources: Iterable[str | Path], policy: ConflictPolicy = "refuse"
) -> tuple[Bundle, tuple[Conflict, ...]]:
    """Write one bundle with everything in `sources`; the first one is "ours" for `policy` (see `DecisionTable.merge`).

    Raises:
        BundleError: a source is refused, or there is none.
        StampMismatchError: the sources are for different hardware or versions.
        MergeConflictError: decisions differ under policy `"refuse"`.
    """
    bundles = [read(source) for source in sources]
    if not bundles:
        raise BundleError("no bundle to merge", "one or more bundles", "name them")
    table = bundles[0].table.copy()
    groups = {record.key: (record, contents) for record, contents in bundles[0].groups}
    conflicts: tuple[Conflict, ...] = ()
    for bundle in bundles[1:]:
        conflicts += table.merge(bundle.table, policy)
        for record, contents in bundle.groups:
            # An equal key says that all inputs of the compilation were equal: either copy will do.
            groups.setdefault(record.key, (record, contents))
    return pack(path, table, groups.values()), conflicts


def _manifest(table: DecisionTable, members: Mapping[str, bytes]) -> bytes:
    body = {
        "schema": SCHEMA,
        "stamp": table.stamp.as_dict(),
        "table_hash": table.hash(),
        "files": {name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in sorted(members.items())},
    }
    return (json.dumps(body, indent=1) + "\n").encode()


def _unwritable(path: Path, error: OSError) -> BundleError:
    return BundleError(f"cannot write {path} ({error.strerror})", "a writable place with room", "name another place")
