"""Text form of a decision table: JSON with one decision a line, read with every type and range checked."""

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from fla_safe.runtime.stamp import Stamp
from fla_safe.runtime.tuning.keys import Decision, Entry, Source, TableSchemaError, TuningKey

__all__ = ["MAX_BYTES", "SCHEMA", "dump", "load", "read_bytes", "strict_json", "write_text"]

SCHEMA = "fla-safe/decisions/1"
MAX_BYTES = 64 * 2**20
"""A larger file is refused unread: a table of a whole model has some hundred entries of 200 bytes."""

_REMEDY = "take an undamaged copy of the table, or remove it and let the job tune"
_MAX_INT = 2**31 - 1


def dump(stamp: Stamp, entries: Mapping[TuningKey, Entry], table_hash: str) -> str:
    """Write a table; `entries` in the order they shall appear."""
    lines = [f'"schema": {json.dumps(SCHEMA)}', f'"stamp": {json.dumps(stamp.as_dict())}', f'"hash": "{table_hash}"']
    kernels: dict[str, list[str]] = {}
    for key, entry in entries.items():
        row = {
            "key": list(key.parts),
            **entry.decision.as_dict(),
            "median_us": entry.median_us,
            "verified": entry.verified,
            "source": entry.source,
        }
        kernels.setdefault(key.kernel, []).append(json.dumps(row))
    blocks = [f"  {json.dumps(name)}: [\n   " + ",\n   ".join(rows) + "\n  ]" for name, rows in kernels.items()]
    lines.append('"kernels": {' + ("\n" + ",\n".join(blocks) + "\n }" if blocks else "}"))
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def load(text: str | bytes) -> tuple[Stamp, dict[TuningKey, Entry], str | None]:
    """Parse a table into stamp, entries and the hash it states.

    Raises:
        TableSchemaError: with the place and the reason.
    """
    try:
        top = _object(strict_json(text), "table", required=("schema", "stamp", "kernels"), optional=("hash",))
        if top["schema"] != SCHEMA:
            raise ValueError(f"schema {top['schema']!r:.80} where {SCHEMA!r} is read")
        stated = top.get("hash")
        if stated is not None and not isinstance(stated, str):
            raise ValueError("hash is not text")
        if not isinstance(top["stamp"], dict):
            raise ValueError("stamp is not an object")
        stamp = Stamp.from_mapping(top["stamp"])
        if not isinstance(top["kernels"], dict):
            raise ValueError("kernels is not an object")
        entries: dict[TuningKey, Entry] = {}
        for kernel, rows in top["kernels"].items():
            if not kernel or not isinstance(rows, list):
                raise ValueError(f"kernel {kernel!r:.120} does not hold a list")
            for row in rows:
                key, entry = _row(kernel, row)
                if key in entries:
                    raise ValueError(f"two decisions for {key}")
                entries[key] = entry
    except ValueError as error:
        raise TableSchemaError(f"a decision table that is not well formed: {error}", SCHEMA, _REMEDY) from error
    return stamp, entries, stated


def strict_json(text: str | bytes) -> Any:
    """Parse JSON, with `ValueError` also for what the standard parser lets through: duplicate names, NaN, deep nesting,
    lone surrogates, numbers too long to convert."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            raise ValueError(f"a name appears twice among {[k for k, _ in items]!r:.120}")
        return result

    def constant(name: str) -> None:
        raise ValueError(f"{name} is not a JSON number")

    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        data = json.loads(decoded, object_pairs_hook=pairs, parse_constant=constant)
        # "\ud800" is legal JSON text, but no file, socket or hash can carry the string it stands for.
        json.dumps(data, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeError as error:
        raise ValueError(f"not UTF-8: {error}") from None
    return data


def read_bytes(path: Path) -> bytes:
    """Contents of a file no larger than a table may be.

    Raises:
        TableSchemaError: it cannot be read, or is too large.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise TableSchemaError(f"cannot read it ({error.strerror})", "a readable decision table", _REMEDY) from error
    if len(data) > MAX_BYTES:
        raise TableSchemaError(f"more than {MAX_BYTES} bytes", "a decision table", _REMEDY)
    return data


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step: a reader, or a process started after a SIGKILL, sees the old or the new text."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _object(data: Any, what: str, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{what} is not an object")
    required, optional = set(required), set(optional)
    if missing := sorted(required - data.keys()):
        raise ValueError(f"{what} lacks {missing[0]!r}")
    if unknown := sorted(data.keys() - required - optional):
        raise ValueError(f"{what} has the unknown field {unknown[0]!r:.80}")
    return data


def _row(kernel: str, data: Any) -> tuple[TuningKey, Entry]:
    what = f"a decision of {kernel!r:.120}"
    row = _object(
        data,
        what,
        required=("key", "kwargs", "num_warps", "num_stages"),
        optional=("num_ctas", "maxnreg", "median_us", "verified", "source"),
    )
    if not isinstance(row["key"], list) or not all(isinstance(p, str) for p in row["key"]):
        raise ValueError(f"the key of {what} is not a list of texts")
    if not isinstance(row["kwargs"], dict):
        raise ValueError(f"kwargs of {what} is not an object")
    for name, value in row["kwargs"].items():
        if not isinstance(value, bool | int | float | str | None) or (isinstance(value, float) and _bad(value)):
            raise ValueError(f"kwargs[{name!r}] of {what} is no plain value: {value!r:.80}")
    maxnreg = row.get("maxnreg")
    decision = Decision(
        tuple(sorted(row["kwargs"].items())),
        _count(row["num_warps"], "num_warps", what, low=1, high=64),
        # Some vendors' configs say 0 stages to mean "do not pipeline".
        _count(row["num_stages"], "num_stages", what, low=0, high=64),
        _count(row.get("num_ctas", 1), "num_ctas", what, low=1, high=64),
        None if maxnreg is None else _count(maxnreg, "maxnreg", what, low=1, high=65536),
    )
    time = row.get("median_us")
    if time is not None and (isinstance(time, bool) or not isinstance(time, int | float) or _bad(time) or time < 0):
        raise ValueError(f"median_us of {what} is no time: {time!r:.80}")
    verified = row.get("verified", False)
    if not isinstance(verified, bool):
        raise ValueError(f"verified of {what} is neither true nor false")
    source = row.get("source", "tuned")
    if source not in get_args(Source):
        raise ValueError(f"source of {what} is {source!r:.80}, not one of {', '.join(get_args(Source))}")
    entry = Entry(decision, None if time is None else float(time), verified, source)
    return TuningKey(kernel, tuple(row["key"])), entry


def _bad(value: float) -> bool:
    try:
        return not math.isfinite(value)
    except OverflowError:
        return True


def _count(value: Any, name: str, what: str, *, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= min(high, _MAX_INT):
        raise ValueError(f"{name} of {what} is {value!r:.40}, not a whole number from {low} to {high}")
    return value
