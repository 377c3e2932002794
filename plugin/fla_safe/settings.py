"""Every flag and environment variable this package reads, in one frozen record that is made when a job activates it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from fla_safe.errors import FlaSafeError

__all__ = ["GdnCheck", "GdnGuard", "GdnImpl", "GdnKernel", "Settings", "SettingsError"]

GdnImpl = Literal["default", "fla_safe", "torch"]
GdnKernel = Literal["auto", "fla", "flash_qla", "te"]
GdnGuard = Literal["off", "warn", "strict"]
GdnCheck = Literal["off", "first", "every"]


class SettingsError(FlaSafeError, ValueError):
    """A flag or environment variable has a value that this package cannot act on."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Choices of one job, read once. docs/flags.md has the table.

    Attributes:
        gdn_impl: `--gdn_impl`: which implementation GDN layers use.
        kernel: `--gdn_kernel`: whose chunk kernel runs on a GPU; "auto" measures where there is a choice.
        guard: `--gdn_guard`: what a kernel variant that the warm-up did not plan meets in training.
        bundle: `--gdn_bundle`: decisions and compiled kernels to start from.
        check: `--gdn_check`: whether tensors of GDN layers are looked at for NaN and infinity, and in which steps.
        cache_root: `--gdn_cache_root`: where rank directories are made; None chooses node-local memory.
        tune_in_child: `FLA_SAFE_TUNE_IN_CHILD` (default on): configs are tried in a process of their own, so that one
            that kills the CUDA context or hangs costs that process and not the job.
        cpu: `FLA_SAFE_CPU=1`: the stand-in for TransformerEngine and `torch.cuda` is on.
        mcore_gdn: `USE_MCORE_GDN`, mcore-bridge's switch (default on); off means GDN layers are not Megatron's.
    """

    gdn_impl: GdnImpl = "default"
    kernel: GdnKernel = "auto"
    guard: GdnGuard = "warn"
    check: GdnCheck = "off"
    bundle: Path | None = None
    cache_root: Path | None = None
    tune_in_child: bool = True
    cpu: bool = False
    mcore_gdn: bool = True

    @classmethod
    def read(
        cls,
        gdn_impl: str,
        *,
        kernel: str = "auto",
        guard: str = "warn",
        check: str = "off",
        bundle: str | None = None,
        cache_root: str | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> "Settings":
        """Combine the parsed flags with the environment.

        Raises:
            SettingsError: an unknown value, a bundle that is not there, or a check of layers that are not ours.
        """
        for flag, value, known in (
            ("gdn_impl", gdn_impl, GdnImpl),
            ("gdn_kernel", kernel, GdnKernel),
            ("gdn_guard", guard, GdnGuard),
            ("gdn_check", check, GdnCheck),
        ):
            if value not in get_args(known):
                raise SettingsError(f"--{flag} {value!r}", f"one of {', '.join(get_args(known))}", "correct the flag")
        if check != "off" and gdn_impl == "default":
            raise SettingsError(
                f"--gdn_check {check} with ms-swift's own GDN layers, into which it cannot look",
                "--gdn_impl fla_safe or torch beside it",
                "add --gdn_impl fla_safe, or drop --gdn_check",
            )
        if bundle is not None and not Path(bundle).is_file():
            raise SettingsError(f"--gdn_bundle {bundle}", "a file made by `fla-safe bundle pack`", "correct the path")
        return cls(
            gdn_impl=cast(GdnImpl, gdn_impl),
            kernel=cast(GdnKernel, kernel),
            guard=cast(GdnGuard, guard),
            check=cast(GdnCheck, check),
            bundle=None if bundle is None else Path(bundle),
            cache_root=None if cache_root is None else Path(cache_root),
            tune_in_child=environ.get("FLA_SAFE_TUNE_IN_CHILD", "1") != "0",
            cpu=environ.get("FLA_SAFE_CPU") == "1",
            # mcore-bridge's own parser: these in any case are on, everything else is off or an error of its own.
            mcore_gdn=environ.get("USE_MCORE_GDN", "1").strip().lower() in {"1", "true", "t", "yes", "y", "on"},
        )
