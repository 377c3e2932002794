"""Everything a rank does at start about its artifacts, in the right order: a place, a directory, clearing, seeding.

    rank_store = open_rank_store(os.environ, stamp, bundle=settings.bundle, tables=shipped)
    ... rank_store.table        # decisions to start from, or None: the job tunes
    ... rank_store.close()      # at the end of the job

A bundle or table that cannot be used is one log line that names the reason, and then the job tunes and compiles.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fla_safe.errors import FlaSafeError
from fla_safe.runtime.artifacts import bundle as bundles
from fla_safe.runtime.artifacts import triton_cache
from fla_safe.runtime.artifacts.directories import JobIdentity, RankDirectory, remove_stale
from fla_safe.runtime.artifacts.roots import (
    NEEDED_BYTES,
    ArtifactSpaceError,
    Root,
    choose_root,
    temporary_directory,
)
from fla_safe.runtime.artifacts.store import ArtifactStore
from fla_safe.runtime.tuning.decisions import DecisionTable, Stamp

__all__ = ["RankStore", "open_rank_store"]

log = logging.getLogger("fla_safe")


@dataclass(slots=True)
class RankStore:
    """A rank's artifacts while the job runs.

    Args:
        root: where its directory is.
        directory: the locked directory.
        store: the kernels in it, installed behind Triton's cache.
        table: decisions of the bundle, or of the first fitting table; None when there are none.
        bundle_id: id of the bundle that was used, or None.
        refused: why a bundle or table was not used, by path.
        removed: directories of dead jobs that were cleared.
    """

    root: Root
    directory: RankDirectory
    store: ArtifactStore
    table: DecisionTable | None = None
    bundle_id: str | None = None
    refused: dict[str, FlaSafeError] = field(default_factory=dict)
    removed: tuple[Path, ...] = ()
    uninstall: Callable[[], None] = lambda: None

    def close(self, *, remove: bool = True) -> None:
        """Take the store away from Triton, and delete the directory (or leave it to the next process of this rank)."""
        self.uninstall()
        self.store.close()
        if remove:
            self.directory.remove()
        else:
            self.directory.close()


def open_rank_store(
    environ: Mapping[str, str],
    stamp: Stamp,
    *,
    local_rank: int | None = None,
    cache_root: Path | None = None,
    bundle: Path | None = None,
    tables: Sequence[Path] = (),
) -> RankStore:
    """Make, seed and install this rank's store. Call it once, in the worker, when rank and device are known.

    Args:
        environ: where launchers say job and rank.
        stamp: what this process runs on.
        local_rank: rank on this host, if known better than from `environ`.
        cache_root: the user's choice of a place.
        bundle: decisions and kernels to start from.
        tables: decision tables to try in order when the bundle has none that fits.

    Raises:
        ArtifactError: there is no place for a directory.
        CacheInstallError: another store is installed.
    """
    identity = JobIdentity.read(environ, local_rank)
    root = _root(cache_root, environ.get("LOCAL_WORLD_SIZE", ""))
    # The temporary directory too: what did not fit into an earlier job's place was written there.
    places = {root.path, temporary_directory() or root.path}
    removed = tuple(path for place in sorted(places) for path in remove_stale(place, keep_job=identity.job))
    directory = RankDirectory.acquire(root.path, identity)
    try:
        made = RankStore(root, directory, ArtifactStore(directory.path, triton=stamp.triton), removed=removed)
        if bundle is not None:
            _use_bundle(made, bundle, stamp)
        for path in tables:
            if made.table is None:
                _use_table(made, path, stamp)
        made.uninstall = triton_cache.install(made.store)
    except BaseException:
        directory.close()
        raise
    return made


def _root(cache_root: Path | None, ranks: str) -> Root:
    """Room for all ranks of this host if there is, for they start together and each sees the room of all."""
    if ranks.isdigit():
        with suppress(ArtifactSpaceError):
            return choose_root(cache_root, needed_bytes=NEEDED_BYTES * max(1, int(ranks)))
    return choose_root(cache_root)


def _use_bundle(made: RankStore, path: Path, stamp: Stamp) -> None:
    try:
        found = bundles.verify(path, stamp)
    except FlaSafeError as error:
        made.refused[str(path)] = error
        log.warning("fla-safe: the bundle is not used, the job tunes and compiles: %s", error)
        return
    made.table, made.bundle_id = found.table, found.id
    made.store.seed(found.groups)


def _use_table(made: RankStore, path: Path, stamp: Stamp) -> None:
    try:
        table = DecisionTable.load(path, source="shipped")
    except FlaSafeError as error:
        made.refused[str(path)] = error
        log.warning("fla-safe: a decision table is not used: %s", error)
        return
    # That a shipped table is for other hardware is the normal case, not news.
    if not any(m.severity == "refuse" for m in table.stamp.mismatches(stamp)):
        made.table = table
