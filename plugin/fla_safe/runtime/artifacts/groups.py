"""The record that ties the files of one compiled kernel together, and the checks that a group on disk must pass.

Triton names an entry by a hash of everything that went into it (source, options, target, its own code), but never by
what came out, so it cannot see a torn, mixed or damaged group (Triton pull request 11319, vLLM issue 52413). The record
written here holds size and SHA-256 of every file, the entry's key and the Triton that wrote it.
"""

import base64
import binascii
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fla_safe.runtime.tuning.table_json import strict_json

__all__ = [
    "RECORD",
    "DamageError",
    "FileSeal",
    "GroupRecord",
    "check_group",
    "check_metadata",
    "is_entry_key",
    "is_file_name",
    "is_text_stage",
    "read_groups",
]

log = logging.getLogger("fla_safe")


RECORD = "fla_safe.group.json"
SCHEMA = "fla-safe/group/1"
MAX_FILE_BYTES = 256 * 2**20

_TEXT_SUFFIXES = (".source", ".ttir", ".ttgir", ".llir", ".ptx", ".amdgcn", ".glir")
_KEY = re.compile(r"[A-Z2-7]{52}")
_SHA = re.compile(r"[0-9a-f]{64}")


class DamageError(ValueError):
    """Why an entry is not used. It becomes a log line and a miss, and never reaches the caller of a kernel."""


@dataclass(frozen=True, slots=True)
class FileSeal:
    """Size in bytes and SHA-256 of one file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> "FileSeal":
        """Seal these bytes."""
        return cls(len(data), hashlib.sha256(data).hexdigest())

    def require(self, data: bytes, name: str) -> None:
        """Raise `DamageError` unless `data` is what was sealed."""
        if len(data) != self.size:
            raise DamageError(f"{name} has {len(data)} bytes, {self.size} were written")
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise DamageError(f"{name} has other contents than were written")


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One compiled kernel: the entry's key, the name that Triton looks up, its Triton, and the seal of each file."""

    key: str
    name: str
    triton: str
    files: tuple[tuple[str, FileSeal], ...]

    def to_json(self) -> str:
        """Text of the record file."""
        files = {name: [seal.size, seal.sha256] for name, seal in self.files}
        body = {"schema": SCHEMA, "key": self.key, "name": self.name, "triton": self.triton, "files": files}
        return json.dumps(body, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: bytes) -> "GroupRecord":
        """Parse a record.

        Raises:
            DamageError: it is not exactly such a record.
        """
        try:
            data = strict_json(text)
        except ValueError as error:
            raise DamageError(f"{RECORD} is not JSON ({error})") from None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise DamageError(f"{RECORD} is not of schema {SCHEMA}")
        key, name, triton, files = (data.get(k) for k in ("key", "name", "triton", "files"))
        if not (isinstance(key, str) and isinstance(name, str) and isinstance(triton, str)) or not is_entry_key(key):
            raise DamageError(f"{RECORD} has fields of the wrong type")
        if not isinstance(files, dict) or name not in files:
            raise DamageError(f"{RECORD} does not list {name!r:.80}")
        seals = []
        for file, seal in files.items():
            if not is_file_name(file) or not isinstance(seal, list) or len(seal) != 2:
                raise DamageError(f"{RECORD} lists the impossible file {file!r:.80}")
            size, sha = seal
            if type(size) is not int or not 0 < size <= MAX_FILE_BYTES or not isinstance(sha, str):
                raise DamageError(f"{RECORD} has no size and hash for {file!r:.80}")
            if not _SHA.fullmatch(sha):
                raise DamageError(f"{RECORD} has no SHA-256 for {file!r:.80}")
            seals.append((file, FileSeal(size, sha)))
        return cls(key, name, triton, tuple(seals))


def is_entry_key(text: str) -> bool:
    """Whether this is a name that Triton gives to an entry: 256 bits in base 32."""
    return _KEY.fullmatch(text) is not None


def is_file_name(text: object) -> bool:
    """Whether this is a plain file name, without any way out of its directory."""
    return (
        isinstance(text, str)
        and 0 < len(text.encode(errors="replace")) <= 240
        and text not in (".", "..", RECORD)
        and not any(c in "/\\\0" or ord(c) < 32 for c in text)
    )


def is_text_stage(name: str) -> bool:
    """Whether a file is one of the compiler's intermediate texts, which no launch needs."""
    return name.endswith(_TEXT_SUFFIXES)


def check_group(directory: Path, key: str, name: str | None, triton: str) -> GroupRecord | None:
    """Read and check every file of an entry; None when the entry has no such group.

    Args:
        directory: the entry.
        key: base-32 key that the caller computed.
        name: metadata file that the caller looks up; None to accept the record's own.
        triton: version of the running Triton.

    Raises:
        DamageError: anything is missing, empty, truncated, of another kernel, another Triton or otherwise changed.
    """
    try:
        record = GroupRecord.from_json((directory / RECORD).read_bytes())
    except FileNotFoundError:
        if directory.is_dir() and any(directory.iterdir()):
            raise DamageError(f"{RECORD} is missing") from None
        return None
    except OSError as error:
        raise DamageError(f"{RECORD} cannot be read ({error.strerror})") from None
    if record.key != key:
        raise DamageError("it is the group of another entry")
    if name is not None and record.name != name:
        raise DamageError(f"it holds {record.name!r:.80}, not {name!r:.80}")
    if record.triton != triton:
        raise DamageError(f"Triton {record.triton} wrote it and {triton} runs")
    contents: dict[str, bytes] = {}
    for file, seal in record.files:
        try:
            contents[file] = (directory / file).read_bytes()
        except OSError as error:
            raise DamageError(f"{file} cannot be read ({error.strerror})") from None
        seal.require(contents[file], file)
    check_metadata(contents, record)
    return record


def check_metadata(contents: Mapping[str, bytes], record: GroupRecord) -> None:
    """Check that the metadata is this kernel's and that there is a binary beside it; `DamageError` otherwise."""
    try:
        metadata = strict_json(contents[record.name])
    except ValueError as error:
        raise DamageError(f"{record.name} is not JSON ({error})") from None
    if not isinstance(metadata, dict):
        raise DamageError(f"{record.name} is not an object")
    if metadata.get("hash") != _hex(record.key):
        raise DamageError(f"{record.name} is the metadata of another kernel")
    if metadata.get("triton_version", record.triton) != record.triton:
        raise DamageError(f"{record.name} is of Triton {metadata.get('triton_version')!r:.40}")
    if not isinstance(metadata.get("target"), dict) or not isinstance(metadata.get("name"), str):
        raise DamageError(f"{record.name} has fields of the wrong type")
    if all(file.endswith(".json") for file in contents):
        raise DamageError("there is no binary")


def read_groups(directory: Path, triton: str) -> Iterator[tuple[GroupRecord, dict[str, bytes]]]:
    """Whole groups below a directory, without changing anything: it may be a living job's. Others are left out."""
    for entry in sorted(directory.iterdir()):
        if not is_entry_key(entry.name):
            continue
        try:
            record = check_group(entry, entry.name, None, triton)
            if record is not None:
                contents = {file: (entry / file).read_bytes() for file, _ in record.files}
                for file, seal in record.files:
                    seal.require(contents[file], file)
                yield record, contents
        except (OSError, DamageError) as error:
            log.warning("fla-safe: artifact %s is left out: %s", entry.name, error)


def _hex(key: str) -> str:
    try:
        return base64.b32decode(key + "====").hex()
    except (binascii.Error, ValueError):
        return ""
