"""Every flag and environment variable this package reads, in one frozen record that is made when a job activates it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from fla_safe.errors import FlaSafeError

__all__ = ["GdnImpl", "Settings", "SettingsError"]

GdnImpl = Literal["default", "fla_safe", "torch"]


class SettingsError(FlaSafeError, ValueError):
    """A flag or environment variable has a value that this package cannot act on."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Choices of one job, read once. docs/flags.md has the table.

    Attributes:
        gdn_impl: `--gdn_impl`: which implementation GDN layers use.
        cpu: `FLA_SAFE_CPU=1`: the stand-in for TransformerEngine and `torch.cuda` is on.
        interpret: `TRITON_INTERPRET=1`: Triton kernels run in Triton's interpreter (with `cpu`).
        mcore_gdn: `USE_MCORE_GDN`, mcore-bridge's switch (default on); off means GDN layers are not Megatron's.
    """

    gdn_impl: GdnImpl = "default"
    cpu: bool = False
    interpret: bool = False
    mcore_gdn: bool = True

    @classmethod
    def read(cls, gdn_impl: str, environ: Mapping[str, str] = os.environ) -> "Settings":
        """Combine the parsed flag with the environment.

        Raises:
            SettingsError: unknown `gdn_impl`.
        """
        if gdn_impl not in get_args(GdnImpl):
            raise SettingsError(
                f"--gdn_impl {gdn_impl!r}", f"one of {', '.join(get_args(GdnImpl))}", "correct the flag"
            )
        return cls(
            gdn_impl=cast(GdnImpl, gdn_impl),
            cpu=environ.get("FLA_SAFE_CPU") == "1",
            interpret=environ.get("TRITON_INTERPRET") == "1",
            # mcore-bridge's own parser: 1/true/yes in any case is on, everything else is off.
            mcore_gdn=environ.get("USE_MCORE_GDN", "1").strip().lower() in {"1", "true", "yes", "y", "on"},
        )
