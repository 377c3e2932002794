"""A process whose gated delta net kernels are frozen: what it reports, and the bundle for its next start."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fla_safe.gdn.backends import Backend
from fla_safe.gdn.steady.kernel_choice import Timings
from fla_safe.gdn.variant import MixerVariant
from fla_safe.runtime import Runtime
from fla_safe.runtime.artifacts.kept import save_bundle

__all__ = ["SteadyState"]


@dataclass(frozen=True, slots=True)
class SteadyState:
    """A process after the freeze.

    Attributes:
        runtime: counters and report.
        variants: kinds of mixers on this rank, those whose kernel lost a contest included.
        faster: the kernel that a variant runs on instead of its own.
        given_back: bytes of artifacts of configs that lost.
        timings: of chunk kernels that competed.
    """

    runtime: Runtime
    variants: tuple[MixerVariant, ...]
    faster: Mapping[MixerVariant, Backend]
    given_back: int
    timings: Timings

    @property
    def table_hash(self) -> str:
        """Equal on all ranks of one GPU architecture."""
        return self.runtime.table.hash()

    @property
    def learned(self) -> bool:
        """Whether anything was tuned or compiled that a bundle would have spared."""
        store = self.runtime.store
        counts = None if store is None else store.store.counts
        return bool(self.runtime.tuning.rounds or (counts is not None and counts.written > counts.seeded))

    @property
    def writes_bundle(self) -> bool:
        """Whether this is the first rank of its GPU architecture that has GDN layers' decisions to save."""
        agreed = self.runtime.agreed
        ranks = [] if agreed is None else agreed.ranks.get(self.runtime.stamp.arch, ())
        return _rank() in ranks[:1]

    def save_bundle(self, directory: Path) -> Path:
        """Write decisions and kernels as `gdn_bundle.fsb`; with several GPU architectures in the job, one for each.

        Raises:
            BundleError: the file cannot be written.
        """
        agreed, store = self.runtime.agreed, self.runtime.store
        assert agreed is not None
        assert store is not None
        name = "gdn_bundle.fsb" if len(agreed.ranks) == 1 else f"gdn_bundle_{self.runtime.stamp.arch}.fsb"
        save_bundle(directory / name, self.runtime.table, store.store)
        return directory / name

    def report(self) -> dict[str, Any]:
        """JSON-serialisable."""
        table = self.runtime.table
        return self.runtime.report() | {
            "variants": [str(variant) for variant in self.variants],
            "kernel_timings_ms": self.timings,
            "unverified": [str(key) for key in table if not (entry := table.entry(key)) or not entry.verified],
        }


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
