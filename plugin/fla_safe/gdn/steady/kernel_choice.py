"""Gives each GDN layer the faster chunk kernel: measured on every rank, chosen for the slowest, the same on all."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fla_safe.gdn.backends import Backend
from fla_safe.gdn.steady.contest import milliseconds, rival
from fla_safe.gdn.steady.rehearsal import Rows
from fla_safe.gdn.variant import MixerVariant

__all__ = ["Timings", "choose_kernels"]

_log = logging.getLogger("fla_safe")

type Timings = dict[str, dict[str, float]]
"""Variant (on FLA's kernel) -> kernel -> milliseconds of a forward and a backward pass on the slowest rank."""


def choose_kernels(
    variants: Sequence[MixerVariant],
    rows: Rows,
    device: torch.device,
    share: Callable[[Any], list[Any]],
    say: Callable[[str], None],
) -> tuple[dict[MixerVariant, Backend], Timings]:
    """Measure this rank's variants and agree. Every rank of the job calls it, also one without variants.

    Args:
        variants: on FLA's kernels, tuned.
        rows: of the job.
        share: gathers a JSON-serialisable value from all ranks.
        say: told of each measurement.

    Returns:
        The other kernel for variants that are faster with it on all ranks together, and what was measured.
    """
    others = {variant: other for variant in variants if (other := rival(variant, rows, device)) is not None}
    mine: Timings = {}
    for variant, other in list(others.items()):
        try:
            mine[str(variant)] = {
                contender.backend.name: milliseconds(contender, rows, device) for contender in (variant, other)
            }
        except Exception as error:  # the golden check's rows are short: at the job's, memory may not suffice
            _log.warning("fla-safe: FlashQLA is not used for %s: %s: %s", other, type(error).__name__, error)
            del others[variant]
            continue
        say(f"forward and backward of {variant}: {_text(mine[str(variant)])}")
    # A variant that one rank cannot run on the other kernel keeps FLA's on all.
    stays = [str(variant) for variant in variants if variant not in others]
    shared = share({"timings": mine, "stays": stays})
    refused = {name for rank in shared for name in rank["stays"]}
    slowest: Timings = {}
    for rank in shared:
        for name, times in rank["timings"].items():
            worst = slowest.setdefault(name, {})
            for kernel, ms in times.items():
                worst[kernel] = max(worst.get(kernel, 0.0), ms)
    chosen = {}
    for variant, other in others.items():
        times = slowest[str(variant)]
        if str(variant) not in refused and times[other.backend.name] < times[variant.backend.name]:
            chosen[variant] = other.backend
            say(f"{variant} runs on {other.backend.name}")
    return chosen, slowest


def _text(times: dict[str, float]) -> str:
    return ", ".join(f"{kernel} {ms:.2f} ms" for kernel, ms in times.items())
