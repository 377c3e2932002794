"""A bounded table of the places that touched files: one entry for each operation, path and Python stack."""

import os
from typing import Any

from fla_safe.trace.causes import Cause, Frame, classify, is_probe

__all__ = ["OPERATIONS", "Site", "Sites"]

OPERATIONS = ("opens", "stats", "listings", "searches", "changes", "programs")
"""What is counted: files opened; stat, lstat, access, readlink; directories listed; imports that searched the disk;
files or directories made, renamed or removed; programs and libraries started."""

_PATHS_A_STACK = 24
_MOST_SITES = 4000
_SHOWN = 5
_LIBRARY = os.path.dirname(os.__file__) + os.sep


class Site:
    """One place, and how often."""

    __slots__ = ("cause", "count", "first", "last", "operation", "path", "size", "stack")

    def __init__(self, operation: str, path: str, cause: Cause, stack: str) -> None:
        self.operation = operation
        self.path = path
        self.cause: Cause = cause
        self.stack = stack
        self.count = self.size = 0
        self.first = self.last = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For the trace file; counts are those since it was last written."""
        return {name: getattr(self, name) for name in self.__slots__}


class Sites:
    """Looks places up. Not locked: the recorder's lock is held."""

    def __init__(self, cache: str = "") -> None:
        self.cache = cache
        self._table: dict[Any, Site] = {}
        self._paths: dict[Any, int] = {}

    def find(self, operation: str, path: str, frames: tuple[Frame, ...], importing: bool) -> Site:
        """The entry for an operation. Many paths from one place (a data set of images) share one with a pattern."""
        if importing and len(frames) > 2 and not any(is_probe(f[0], f[2]) for f in frames):
            frames = frames[:2]  # who imports a package at the start is of little interest, and there are thousands
        key: tuple[Any, ...] = (operation, path, frames)
        site = self._table.get(key)
        if site is not None:
            return site
        group = (operation, frames)
        if self._paths.get(group, 0) >= _PATHS_A_STACK:
            path = f"{os.path.dirname(path)}/*{os.path.splitext(path)[1]}"
            key = (operation, path, frames)
            if (site := self._table.get(key)) is not None:
                return site
        cause = classify(path, frames, importing=importing or operation == "searches", cache=self.cache)
        if self.full:
            key = (operation, cause)
            if (site := self._table.get(key)) is None:
                site = self._table[key] = Site(operation, "(more places than are kept)", cause, "")
            return site
        self._paths[group] = self._paths.get(group, 0) + 1
        site = self._table[key] = Site(operation, path, cause, _text(frames))
        return site

    @property
    def full(self) -> bool:
        """New places are lumped together until `take`."""
        return len(self._table) >= _MOST_SITES

    def take(self) -> list[dict[str, Any]]:
        """Entries with what was counted since the last time, for the trace file."""
        found = [site.as_dict() for site in list(self._table.values()) if site.count]
        if len(self._table) > _MOST_SITES // 2:  # imports at the start leave thousands that never come back
            self._table.clear()
            self._paths.clear()
        for site in self._table.values():
            site.count = site.size = 0
            site.first = 0.0
        return found


def _text(frames: tuple[Frame, ...]) -> str:
    """A short stack, innermost call first. A probe is shown from the question outwards: what it read is in the path."""
    frames = tuple(f for f in frames if not _is_library(f[0])) or frames
    start = next((i for i, (filename, _, function) in enumerate(frames) if is_probe(filename, function)), 0)
    return " < ".join(f"{_short(filename)}:{line} {function}" for filename, line, function in frames[start:][:_SHOWN])


def _is_library(filename: str) -> bool:
    """Helpers of Python's own library (glob, pathlib, posixpath) and Dynamo's wrappers say nothing about who asked."""
    return (filename.startswith(_LIBRARY) and "-packages/" not in filename) or "/torch/_dynamo/" in filename


def _short(filename: str) -> str:
    for mark in ("/site-packages/", "/dist-packages/"):
        if mark in filename:
            return filename.rsplit(mark, 1)[1]
    return "/".join(filename.split("/")[-4:]) if "/fla/" not in filename else "fla/" + filename.rsplit("/fla/", 1)[1]
