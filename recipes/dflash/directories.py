"""Where compiled kernels are kept: fla_safe's in the process's own directory, Inductor's in Inductor's."""

from dataclasses import dataclass
from pathlib import Path

from fla_safe.errors import FlaSafeError
from fla_safe.runtime import Runtime

__all__ = ["Directories", "DirectoriesMixedError"]

_INDUCTORS = "triton_"
"""How Inductor's own kernels are called, those of flex_attention too."""


class DirectoriesMixedError(FlaSafeError, RuntimeError):
    """torch.compile and fla_safe moved each other's directory, or keep kernels in it."""


@dataclass(frozen=True, slots=True)
class Directories:
    """Both places at one moment.

    Attributes:
        ours: fla_safe's artifact directory; None without a runtime or one that keeps nothing.
        inductors: torch.compile's cache directory.
    """

    ours: Path | None
    inductors: Path

    @classmethod
    def now(cls, runtime: Runtime | None) -> "Directories":
        """As they are."""
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        store = None if runtime is None else runtime.store
        return cls(None if store is None else store.directory.path, Path(cache_dir()))

    def require_still(self, runtime: Runtime | None) -> None:
        """Check that nothing has moved since, and that no kernel of torch.compile's is in our directory.

        Raises:
            DirectoriesMixedError: see there.
        """
        now = Directories.now(runtime)
        store = None if runtime is None else runtime.store
        kept = [] if store is None else [record.name for record in store.store.groups()]
        foreign = [name for name in kept if name.startswith(_INDUCTORS)]
        if now == self and not foreign and (self.ours is None or not self.ours.is_relative_to(self.inductors)):
            return
        raise DirectoriesMixedError(
            f"directories {now} after {self}; of torch.compile in ours: {foreign[:3]}",
            "two directories that stay where they are, each with its own kernels",
            "set neither TRITON_CACHE_DIR nor TORCHINDUCTOR_CACHE_DIR inside the process",
        )
