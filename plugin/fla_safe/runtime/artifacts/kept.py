"""What is worth keeping of a warm-up's artifacts: the binaries that the frozen kernels run, and none that lost."""

from pathlib import Path

from fla_safe.runtime.artifacts import bundle
from fla_safe.runtime.artifacts.store import ArtifactStore
from fla_safe.runtime.artifacts.triton_cache import scope
from fla_safe.runtime.launching.launch import Launching
from fla_safe.runtime.tuning.decisions import DecisionTable

__all__ = ["keys_in_use", "save_bundle"]


def keys_in_use(launching: Launching) -> set[str]:
    """Keys of the cache entries behind the planned launches; of kernels without plan, all that are in memory."""
    from triton.runtime.cache import get_cache_manager

    binaries = []
    for site in launching.sites.values():
        if site.plans and site.indirect is None:
            binaries += [variant.compiled for plan in site.plans.values() for variant in plan.values()]
        else:
            binaries += [b for caches in site.kernel.jit.device_caches.values() for b in caches[0].values()]
    # Triton turns the hash into the entry's name, and only its cache manager knows how; the store's makes no directory.
    with scope():
        return {str(get_cache_manager(binary.hash).key) for binary in binaries if hasattr(binary, "hash")}


def save_bundle(path: Path, table: DecisionTable, store: ArtifactStore) -> bundle.Bundle:
    """Write what this process decided and compiled, for the next job's `--gdn_bundle`.

    Raises:
        BundleError: the file cannot be written.
        ArtifactError: the store changed meanwhile.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return bundle.pack(path, table, ((record, store.read(record)) for record in store.groups()))
