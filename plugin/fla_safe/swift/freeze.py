"""Brings ms-swift's job to the steady state: kernels warmed up and frozen before the optimizer takes its memory."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from swift.utils import get_logger

from fla_safe.errors import FlaSafeError
from fla_safe.gdn.steady.state import SteadyState
from fla_safe.megatron.warmup import Workload, reach_steady_state
from fla_safe.progress import progress_bar
from fla_safe.settings import Settings

__all__ = ["freeze_kernels", "steady_state"]

logger = get_logger()
_steady: SteadyState | None = None


def steady_state() -> SteadyState | None:
    """The job's frozen kernels; None before the freeze, on a CPU, and with the plain-torch layer."""
    return _steady


def _log(text: str) -> None:
    logger.info(f"fla-safe: {text}")


def freeze_kernels(args: Any, models: Sequence[torch.nn.Module], settings: Settings) -> None:
    """Warm up for the rows that `args` describes and freeze; nothing on a CPU.

    Called for each model of a job (a teacher or reference, too): what an earlier one needs stays frozen with it.

    What was tuned and compiled is left in `gdn_bundle.fsb` in the output directory: with `--gdn_bundle` and that file
    the next start takes seconds.

    Raises:
        AgreementError: see `reach_steady_state`.
    """
    global _steady
    if settings.gdn_impl != "fla_safe" or settings.cpu or not torch.cuda.is_available():
        return
    packed = bool(args.padding_free)
    # ms-swift lays the packs of a micro-batch into one row (template/base.py, data_collator).
    longest = int(getattr(args, "packing_length", None) or args.max_length)
    workload = Workload(
        tokens=longest * args.micro_batch_size if packed else longest,
        batch=1 if packed else args.micro_batch_size,
        packed=packed,
        dtype=models[0].config.params_dtype,  # type: ignore[union-attr, arg-type]
    )
    logger.info(f"fla-safe: warming up GDN kernels for rows of up to {workload.tokens} tokens")
    shown = progress_bar(_log) if int(os.environ.get("LOCAL_RANK", "0")) == 0 else nullcontext(_log)
    with shown as say:
        _steady = reach_steady_state(models, settings, workload, say, earlier=_steady)
    timings = _steady.runtime.report()["timings"]
    logger.info(f"fla-safe: kernels are frozen, table {_steady.table_hash[:12]}, {timings}")
    if _steady.learned and _steady.writes_bundle and getattr(args, "output_dir", None):
        try:
            path = _steady.save_bundle(Path(args.output_dir))
        except (FlaSafeError, OSError) as error:
            logger.warning(f"fla-safe: no bundle is written: {error}")
        else:
            logger.info(f"fla-safe: for a start within seconds next time: --gdn_bundle {path}")
