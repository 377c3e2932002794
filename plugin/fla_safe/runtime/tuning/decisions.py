"""Tuning keys, the config chosen for each of them, and the table of all choices that a job runs with.

    key = TuningKey.of("fla.ops.common.chunk_o.chunk_fwd_kernel_o", {"H": 16, "BT": 64, "NB": 14},
                       {"q": torch.bfloat16}, size_only={"NB"})     # parts: ("H=16", "BT=64", "NB=*", "q:bfloat16")
    table.put(key, Decision.from_config(config), median_us=41.0, verified=True)
    table.get(key)              # Decision or None, exact
    table.nearest(key)          # Neighbour or None: the closest decision of the same kernel, never a benchmark
    table.get(key).select(autotuner.configs)    # the kernel's own Config object, or UnknownConfigError

`table.hash()` covers the stamp's refusing fields and the decisions, not timings, so ranks that would run the same code
have the same hash. `to_json`, `from_json` live in `table_json` and are reached through the methods of the same name.
"""

import hashlib
import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fla_safe.runtime.stamp import Stamp, StampMismatchError
from fla_safe.runtime.tuning import table_json
from fla_safe.runtime.tuning.keys import (
    SIZE_ONLY,
    Decision,
    Entry,
    MergeConflictError,
    Source,
    TableError,
    TableSchemaError,
    TuningKey,
    UnknownConfigError,
)

__all__ = [
    "Conflict",
    "ConflictPolicy",
    "Decision",
    "DecisionTable",
    "Entry",
    "MergeConflictError",
    "Neighbour",
    "Stamp",
    "StampMismatchError",
    "TableError",
    "TableSchemaError",
    "TuningKey",
    "UnknownConfigError",
]

ConflictPolicy = Literal["refuse", "keep", "replace", "fastest"]


@dataclass(frozen=True, slots=True)
class Conflict:
    """One key for which two merged tables decided differently, and which of the two was kept."""

    key: TuningKey
    ours: Entry
    theirs: Entry
    kept: Entry


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Result of `DecisionTable.nearest`; `exact` when the key itself is in the table."""

    key: TuningKey
    decision: Decision
    exact: bool


class DecisionTable:
    """All decisions of a job, stamped with what they depend on. Any thread may read while another one writes.

    Args:
        stamp: GPU architecture, Triton, FLA and driver versions under which the decisions were taken.
        entries: first contents.
    """

    __slots__ = ("_entries", "_lock", "stamp")

    def __init__(self, stamp: Stamp, entries: Mapping[TuningKey, Entry] | None = None) -> None:
        self.stamp = stamp
        self._entries: dict[TuningKey, Entry] = dict(entries or {})
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[TuningKey]:
        return iter(self.keys())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecisionTable) and self.stamp == other.stamp and self._entries == other._entries

    __hash__ = None  # type: ignore[assignment]  # a table changes; compare with hash(), the method

    def keys(self) -> tuple[TuningKey, ...]:
        """All keys, sorted."""
        with self._lock:
            return tuple(sorted(self._entries))

    def get(self, key: TuningKey) -> Decision | None:
        """The decision for exactly this key, or None. Never waits for a writer."""
        entry = self._entries.get(key)
        return None if entry is None else entry.decision

    def entry(self, key: TuningKey) -> Entry | None:
        """The decision with its origin, or None."""
        return self._entries.get(key)

    def put(
        self,
        key: TuningKey,
        decision: Decision,
        *,
        median_us: float | None = None,
        verified: bool = False,
        source: Source = "tuned",
    ) -> None:
        """Add or replace the decision for one key."""
        with self._lock:
            self._entries[key] = Entry(decision, median_us, verified, source)

    def discard(self, key: TuningKey) -> None:
        """Remove the decision for one key, if there is one."""
        with self._lock:
            self._entries.pop(key, None)

    def nearest(self, key: TuningKey) -> Neighbour | None:
        """The closest decision of the same kernel: same dtypes first, then same flags, then sizes on a log scale.

        Deterministic: equal tables answer equally on every rank. None when the table has no entry for the kernel.
        """
        exact = self._entries.get(key)
        if exact is not None:
            return Neighbour(key, exact.decision, True)
        candidates = [k for k in self.keys() if k.kernel == key.kernel]
        if not candidates:
            return None
        best = min(candidates, key=lambda k: (_distance(k.parts, key.parts), k.parts))
        return Neighbour(best, self._entries[best].decision, False)

    def hash(self) -> str:
        """SHA-256 over architecture, Triton, FLA and every decision; independent of order, timings and origin."""
        with self._lock:
            rows = sorted([key.kernel, key.parts, entry.decision.as_dict()] for key, entry in self._entries.items())
        body = [[self.stamp.arch, self.stamp.triton, self.stamp.fla], rows]
        return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def merge(self, other: "DecisionTable", policy: ConflictPolicy = "refuse") -> tuple[Conflict, ...]:
        """Add the entries of `other`; returns the keys on which the two tables disagreed.

        Args:
            other: a table with the same architecture, Triton and FLA.
            policy: on disagreement `"refuse"` raises, `"keep"` keeps ours, `"replace"` takes theirs, `"fastest"` takes
                the shorter measured time (ours when either was not measured). Equal decisions never conflict.

        Raises:
            StampMismatchError: the tables are for different hardware or versions.
            MergeConflictError: the tables disagree and `policy` is `"refuse"`; this table is then unchanged.
        """
        other.stamp.require(self.stamp, "the table to merge", "merge only tables of one GPU, Triton and FLA version")
        theirs = {key: other._entries[key] for key in other}
        with self._lock:
            conflicts = tuple(
                Conflict(key, mine, entry, _choose(mine, entry, policy))
                for key, entry in theirs.items()
                if (mine := self._entries.get(key)) is not None and mine.decision != entry.decision
            )
            if conflicts and policy == "refuse":
                first = conflicts[0]
                raise MergeConflictError(
                    f"{len(conflicts)} keys with different decisions, the first {first.key}: "
                    f"{first.ours.decision} against {first.theirs.decision}",
                    "tables that agree where they overlap",
                    "choose a policy: keep, replace or fastest",
                )
            for key, entry in theirs.items():
                self._entries.setdefault(key, entry)
            for conflict in conflicts:
                self._entries[conflict.key] = conflict.kept
        return conflicts

    def copy(self) -> "DecisionTable":
        """An independent table with the same contents."""
        with self._lock:
            return DecisionTable(self.stamp, self._entries)

    def to_json(self) -> str:
        """Text with one decision a line, sorted, so that two tables can be compared with `diff`."""
        return table_json.dump(self.stamp, {key: self._entries[key] for key in self.keys()}, self.hash())

    @classmethod
    def from_json(cls, text: str | bytes, *, source: Source | None = None) -> "DecisionTable":
        """Parse `to_json`'s text; `source` replaces the recorded origin of every entry.

        Raises:
            TableSchemaError: anything but a well-formed table with the hash it states (a missing hash is accepted, so
                that a table can be edited by hand).
        """
        stamp, entries, stated = table_json.load(text)
        table = cls(stamp, {k: replace(e, source=source) for k, e in entries.items()} if source else entries)
        if stated is not None and stated != table.hash():
            raise TableSchemaError(
                f"a decision table that states hash {stated:.16} and has {table.hash():.16}",
                "the hash of its own contents",
                'take an undamaged copy; if you edited it on purpose, delete its "hash" line',
            )
        return table

    def save(self, path: str | Path) -> None:
        """Write the table so that a reader finds the old or the new text, never a part."""
        table_json.write_text(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path, *, source: Source | None = None) -> "DecisionTable":
        """Read a table from a file.

        Raises:
            TableSchemaError: the file cannot be read or is no table; the message names the path.
        """
        try:
            return cls.from_json(table_json.read_bytes(Path(path)), source=source)
        except TableSchemaError as error:
            raise TableSchemaError(f"{path}: {error.seen}", error.expected, error.remedy) from error


def _choose(ours: Entry, theirs: Entry, policy: ConflictPolicy) -> Entry:
    if policy == "replace":
        return theirs
    if policy == "fastest" and ours.median_us is not None and theirs.median_us is not None:
        return theirs if theirs.median_us < ours.median_us else ours
    return ours


def _split(part: str) -> tuple[str, str, bool]:
    """Name, value, and whether the part is a dtype."""
    name, equals, value = part.partition("=")
    if equals:
        return name, value, False
    name, _, value = part.partition(":")
    return name, value, True


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def _distance(a: Sequence[str], b: Sequence[str]) -> tuple[int, int, int, float]:
    """How far apart two keys of one kernel are: dtypes, names, non-numeric values, doublings of sizes."""
    left = {(n, t): v for n, v, t in map(_split, a)}
    right = {(n, t): v for n, v, t in map(_split, b)}
    types, flags, doublings = 0, 0, 0.0
    for where in left.keys() & right.keys():
        x, y = left[where], right[where]
        if x == y or SIZE_ONLY in (x, y):
            continue
        p, q = _number(x), _number(y)
        if where[1]:
            types += 1
        elif p is None or q is None:
            flags += 1
        else:
            doublings += abs(math.log2(p / q))
    return types, len(left.keys() ^ right.keys()), flags, round(doublings, 9)
