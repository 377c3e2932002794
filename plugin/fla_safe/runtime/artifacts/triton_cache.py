"""Puts an `ArtifactStore` behind Triton's cache for what is compiled inside `scope()`, and leaves the rest as it was.

Triton asks one manager class for every kernel of the process, torch.compile's kernels included. Inductor sets
`TRITON_CACHE_DIR` for the whole process when it is unset, and its own bundler then reads that directory. So neither the
variable nor Triton's directory is touched here: a thread that compiles within `scope()` gets the store, everyone else
the manager that was there before.
"""

import sysconfig
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fla_safe.errors import FlaSafeError
from fla_safe.runtime.artifacts.groups import FileSeal, GroupRecord, is_entry_key, is_file_name, is_text_stage
from fla_safe.runtime.artifacts.store import ArtifactStore

__all__ = ["CacheInstallError", "install", "installed", "scope"]

_MODULE_SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")


class CacheInstallError(FlaSafeError, RuntimeError):
    """Triton's cache manager cannot be replaced."""


class _Depth(threading.local):
    value = 0


_depth = _Depth()
_current: ArtifactStore | None = None


@contextmanager
def scope() -> Iterator[None]:
    """Within it, what this thread compiles is looked up in and kept by the installed store."""
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1


def installed() -> ArtifactStore | None:
    """The store behind Triton's cache, if there is one."""
    return _current


def install(store: ArtifactStore) -> Callable[[], None]:
    """Put `store` behind Triton's cache; returns the function that takes it away again.

    Raises:
        CacheInstallError: a store is installed already, or this Triton has no manager to set.
    """
    global _current
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    if _current is not None:
        raise CacheInstallError("a store is installed already", "one store in a process", "remove the first one")
    if not hasattr(knobs.cache, "manager_class"):
        raise CacheInstallError(
            "this Triton has no knobs.cache.manager_class", "Triton 3.4 to 3.9", "install a supported Triton"
        )
    before: type | None = knobs.cache.manager_class
    elsewhere: Any = before or FileCacheManager
    overridden = "manager_class" in vars(knobs.cache)

    class RoutedCacheManager:
        """What Triton makes for each key."""

        def __new__(cls, key: str, override: bool = False, dump: bool = False) -> Any:
            if _depth.value and not override and not dump and is_entry_key(key) and _current is not None:
                return StoreCacheManager(_current, key)
            return elsewhere(key, override=override, dump=dump)

    _current = store
    # Set in the instance, not through the descriptor: that would also export TRITON_CACHE_MANAGER to child processes.
    vars(knobs.cache)["manager_class"] = RoutedCacheManager

    def remove() -> None:
        global _current
        if _current is not store:
            return
        _current = None
        if overridden:
            vars(knobs.cache)["manager_class"] = before
        else:
            vars(knobs.cache).pop("manager_class", None)

    return remove


class StoreCacheManager:
    """Triton's cache manager protocol for one entry of a store: files are staged, a group is published whole."""

    def __init__(self, store: ArtifactStore, key: str) -> None:
        self.key = key
        self._store = store
        self._writer = uuid.uuid4().hex
        self._seals: dict[str, FileSeal] = {}

    def get_file(self, filename: str) -> str | None:
        """Path of a single checked file, or None."""
        return self._store.load_module(self.key, filename) if is_file_name(filename) else None

    def has_file(self, filename: str) -> bool:
        """Whether `get_file` would find it."""
        return self.get_file(filename) is not None

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Keep one file and return its path."""
        # Triton hands over text, bytes, or a compiler module that prints as text, whatever `binary` says.
        payload = data if isinstance(data, bytes) else str(data).encode()
        if filename.endswith((_MODULE_SUFFIX, ".so")):
            return str(self._store.store_module(self.key, filename, payload))
        self._seals[filename] = FileSeal.of(payload)
        return str(self._store.stage(self._writer, filename, payload))

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Checked paths of a group, or None."""
        return self._store.load_group(self.key, filename)

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Publish what was put, without the intermediate texts that no launch needs."""
        files = tuple((name, self._seals[name]) for name in group if name in self._seals and not is_text_stage(name))
        if filename in dict(files):
            self._store.publish(self._writer, GroupRecord(self.key, filename, self._store.triton, files))
        return filename
