"""Brings shapes to the steady state on this machine's GPU and writes what was decided and compiled."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fla_safe.errors import FlaSafeError
from fla_safe.gdn.backends import resolve
from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.steady.rehearsal import Rows
from fla_safe.gdn.steady.warmup import take_over, warm_up
from fla_safe.gdn.variant import MixerVariant
from fla_safe.runtime.artifacts.bundle import BundleError
from fla_safe.runtime.artifacts.kept import save_bundle
from fla_safe.settings import Settings

__all__ = ["NoGpuError", "prepare"]


class NoGpuError(FlaSafeError, RuntimeError):
    """Tuning was asked for on a machine without a GPU."""


def prepare(
    out: Path,
    layouts: Sequence[ProjectionLayout],
    settings: Settings,
    *,
    tokens: int,
    batch: int,
    packed: bool,
    dtype: str,
    say: Callable[[str], None],
) -> str:
    """Warm up, write `out` (a table if its name ends in .json, else a bundle), and say in a line what is in it.

    Raises:
        NoGpuError: there is no GPU.
        WrongResultsError, NoWorkingConfigError: no config of a kernel works here.
        BundleError: the file cannot be written.
    """
    _require_writable(out)
    if not torch.cuda.is_available():
        raise NoGpuError(
            "PyTorch sees no GPU", "the kind of GPU that the job will run on", "run this on a training machine"
        )
    device, kind = torch.device("cuda", torch.cuda.current_device()), getattr(torch, dtype)
    runtime = take_over(settings)
    try:
        name = "fla" if settings.kernel == "auto" else settings.kernel
        variants = [
            MixerVariant(
                layout,
                resolve(name, device, layout=layout, dtype=kind),
                kind,
                4,
                False,
                (kind, kind, kind, kind),  # as Megatron makes them
                1e-6,
            )
            for layout in layouts
        ]
        rows = Rows(tokens, 1 if packed else batch, packed)
        steady = warm_up(runtime, variants, rows, device, settings, say)
        table = runtime.table
        kernels = 0
        if out.suffix == ".json":
            table.save(out)
        else:
            assert runtime.store is not None
            kernels = len(save_bundle(out, table, runtime.store.store).groups)
    finally:
        runtime.deactivate()
    timings = runtime.report()["timings"]
    return (
        f"{out}: {len(table)} decisions, {kernels} kernels for {len(layouts)} shapes, table {table.hash()[:12]}; "
        f"tuned {timings['tuning_rounds']} in {timings['tuning_s']} s, frozen in {timings['freeze_s']} s"
        + "".join(f"\n  {name}: {times}" for name, times in steady.timings.items())
    )


def _require_writable(out: Path) -> None:
    """Say so now, and not after minutes of tuning."""
    reason = "it is a directory" if out.is_dir() else None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        reason = str(error.strerror)
    if reason is not None:
        raise BundleError(f"cannot write {out} ({reason})", "a writable place with room", "name another place")
