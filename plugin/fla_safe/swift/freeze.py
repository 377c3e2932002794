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

__all__ = ["WarmUpMemoryError", "freeze_kernels", "steady_state", "workload_of"]

logger = get_logger()
_steady: SteadyState | None = None


class WarmUpMemoryError(FlaSafeError, RuntimeError):
    """The longest row that the flags allow does not fit on the device beside the model's weights."""


def steady_state() -> SteadyState | None:
    """The job's frozen kernels; None before the freeze, on a CPU, and with the plain-torch layer."""
    return _steady


def _log(text: str) -> None:
    logger.info(f"fla-safe: {text}")


def freeze_kernels(args: Any, models: Sequence[torch.nn.Module], settings: Settings) -> None:
    """Warm up for the rows that `args` describes and freeze; nothing on a CPU.

    Called for each model of a job (a teacher or reference, too): what an earlier one needs stays frozen with it.
    `megatron export` has no steps to keep steady: nothing there, too.

    What was tuned and compiled is left in `gdn_bundle.fsb` in the output directory: with `--gdn_bundle` and that file
    the next start takes seconds.

    Raises:
        AgreementError: see `reach_steady_state`.
        WarmUpMemoryError: the longest row does not fit.
    """
    global _steady
    if settings.gdn_impl != "fla_safe" or settings.cpu or not torch.cuda.is_available():
        return
    if getattr(args, "to_hf", False) or getattr(args, "to_mcore", False):
        return
    workload = workload_of(args, models[0].config.params_dtype)  # type: ignore[union-attr, arg-type]
    logger.info(f"fla-safe: warming up GDN kernels for rows of up to {workload.tokens} tokens")
    shown = progress_bar(_log) if int(os.environ.get("LOCAL_RANK", "0")) == 0 else nullcontext(_log)
    try:
        with shown as say:
            _steady = reach_steady_state(models, settings, workload, say, earlier=_steady)
    except torch.OutOfMemoryError as error:
        raise WarmUpMemoryError(
            f"the warm-up of rows of {workload.tokens} tokens runs out of memory ({error})",
            "room for a GDN layer's forward and backward pass over the longest row of the job",
            "set --max_length (without it, it is the model's own limit) or --packing_length to what the data has",
        ) from error
    timings = _steady.runtime.report()["timings"]
    logger.info(f"fla-safe: kernels are frozen, table {_steady.table_hash[:12]}, {timings}")
    if _steady.learned and _steady.writes_bundle and getattr(args, "output_dir", None):
        try:
            path = _steady.save_bundle(Path(args.output_dir))
        except (FlaSafeError, OSError) as error:
            logger.warning(f"fla-safe: no bundle is written: {error}")
        else:
            logger.info(f"fla-safe: for a start within seconds next time: --gdn_bundle {path}")


def workload_of(args: Any, dtype: torch.dtype) -> Workload:
    """The rows of the job that ms-swift's arguments describe."""
    # Preference pairs are one batch (template/base.py, _rlhf_data_collator).
    rows = args.micro_batch_size * (2 if getattr(args, "rlhf_type", None) in ("dpo", "rm") else 1)
    longest = int(getattr(args, "packing_length", None) or args.max_length)
    if args.padding_free:
        # All samples, or packs, of a micro-batch lie in one row (template/base.py, data_collator).
        return Workload(tokens=longest * rows, batch=1, packed=True, dtype=dtype)
    return Workload(tokens=longest, batch=rows, packed=False, dtype=dtype)
