"""Adds `--gdn_impl` and the other `--gdn_*` flags to every `megatron` command (sft, pt, rlhf, export)."""

from dataclasses import dataclass, field, fields, is_dataclass
from types import ModuleType
from typing import Literal

from fla_safe.errors import FlaSafeError
from fla_safe.settings import GdnImpl, GdnKernel

__all__ = ["UnsupportedSwiftError", "register"]

IMPL_HELP = (
    "Gated DeltaNet layers: 'default' is ms-swift's own; 'fla_safe' is fla-safe's layer on hardened FLA kernels; "
    "'torch' is the same layer in plain PyTorch (slow; for CPUs and for comparison)."
)
KERNEL_HELP = (
    "With --gdn_impl fla_safe on GPUs: whose kernels compute the gated delta rule. 'auto' measures FLA's and, where it "
    "is installed and right, FlashQLA's at the job's sizes and takes the faster; 'fla' and 'flash_qla' name one; "
    "'te' is TransformerEngine's own (2.19 and later; experimental there, not verified here, never taken by 'auto')."
)
GUARD_HELP = (
    "With --gdn_impl fla_safe on GPUs: what a GDN kernel that would be tuned or compiled after the warm-up meets. "
    "'strict' raises, 'warn' goes on with the nearest decision and counts it, 'off' lets it tune."
)
CHECK_HELP = (
    "With fla_safe or torch: name the first GDN tensor that is not finite, write the inputs of its call to a file for "
    "`fla-safe replay`, and end the job. 'first' looks in the first step, 'every' in all; each look waits for the GPU. "
    "'off' costs nothing."
)
BUNDLE_HELP = "With --gdn_impl fla_safe: a file of decisions and compiled kernels to start from (fla-safe bundle pack)."
CACHE_ROOT_HELP = (
    "With --gdn_impl fla_safe: where each rank makes its directory of compiled kernels; default is the first of "
    "/dev/shm, the temporary directory and ~/.cache that is local and has room."
)
REPORT_HELP = "With fla_safe or torch: where rank 0 writes the job's report; default <output_dir>/gdn_report.json."


# A bare `off` in a YAML file is false, which ms-swift hands on as "False".
YamlGuard = Literal["off", "warn", "strict", False]
YamlCheck = Literal["off", "first", "every", False]


class UnsupportedSwiftError(FlaSafeError, RuntimeError):
    """ms-swift is laid out in a way that this package does not know."""


def register(module: ModuleType) -> None:
    """Replace ms-swift's `MegatronArguments` by a dataclass that has the fields, before any class derives from it.

    Args:
        module: `swift.megatron.arguments.megatron_args`, just executed.

    Raises:
        UnsupportedSwiftError: the module has no dataclass `MegatronArguments`.
    """
    base = getattr(module, "MegatronArguments", None)
    if not (isinstance(base, type) and is_dataclass(base)):
        raise UnsupportedSwiftError(
            f"{module.__name__}.MegatronArguments is {base!r}",
            "the dataclass that ms-swift 4.5 and 4.6 have there",
            "install ms-swift>=4.5,<4.7",
        )
    if any(known.name == "gdn_impl" for known in fields(base)):
        return

    @dataclass
    class MegatronArguments(base):  # type: ignore[misc, valid-type]
        gdn_impl: GdnImpl = field(default="default", metadata={"help": IMPL_HELP})
        gdn_kernel: GdnKernel = field(default="auto", metadata={"help": KERNEL_HELP})
        gdn_guard: YamlGuard = field(default="warn", metadata={"help": GUARD_HELP, "metavar": "{off,warn,strict}"})
        gdn_check: YamlCheck = field(default="off", metadata={"help": CHECK_HELP, "metavar": "{off,first,every}"})
        gdn_bundle: str | None = field(default=None, metadata={"help": BUNDLE_HELP})
        gdn_cache_root: str | None = field(default=None, metadata={"help": CACHE_ROOT_HELP})
        gdn_report: str | None = field(default=None, metadata={"help": REPORT_HELP})

    # Same identity as the class it stands for, so that pickling, args.json and isinstance checks see no difference.
    MegatronArguments.__module__ = base.__module__
    MegatronArguments.__qualname__ = base.__qualname__
    MegatronArguments.__doc__ = base.__doc__
    module.MegatronArguments = MegatronArguments  # type: ignore[attr-defined]
