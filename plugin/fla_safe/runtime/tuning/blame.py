"""Which decisions make a check fail: found by exchanging them for the next best ones and taking the exchange back."""

from collections.abc import Callable
from typing import Any

from fla_safe.runtime.tuning.autotune import Tuning
from fla_safe.runtime.tuning.keys import Decision, TuningKey

__all__ = ["ROUNDS", "find_guilty"]

ROUNDS = 8
"""Sets of stand-ins that are tried; the n-th takes every key's n-th best alternative."""


def find_guilty(
    tuning: Tuning, passes: Callable[[], Any], tell: Callable[[str], None] = lambda text: None
) -> list[tuple[TuningKey, Decision]]:
    """Decisions without which `passes` is true; empty when no exchange helps. The table is as before afterwards.

    All decisions are exchanged first, then one after the other is taken back: where that fails again, the decision is
    guilty. So any number of wrong configs is found with one run a key.

    Args:
        tuning: its `asked` holds the keys of the run that failed.
        passes: runs the kernels again with the decisions as they are then; an exception of a kernel must count as
            false.
        tell: told of each step.
    """
    alternatives = {
        key: [decision for decision in offered if decision != tuning.table.get(key)]
        for key, offered in tuning.asked.items()
        if key in tuning.table
    }
    alternatives = {key: others for key, others in alternatives.items() if others}
    original = {key: entry for key in alternatives if (entry := tuning.table.entry(key)) is not None}

    def use(key: TuningKey, decision: Decision) -> None:
        tuning.table.put(key, decision)
        tuning.forget()

    def restore(key: TuningKey) -> None:
        entry = original[key]
        tuning.table.put(key, entry.decision, median_us=entry.median_us, verified=entry.verified, source=entry.source)
        tuning.forget()

    deepest = max((len(others) for others in alternatives.values()), default=0)
    try:
        for n in range(min(ROUNDS, deepest)):
            tell(f"looking for a wrong config, set {n + 1} of stand-ins")
            stand_ins = {key: others[min(n, len(others) - 1)] for key, others in alternatives.items()}
            for key, decision in stand_ins.items():
                use(key, decision)
            if passes():
                break
        else:
            return []
        guilty = []
        for key, stand_in in stand_ins.items():
            restore(key)
            tell(f"trying {key.kernel.rsplit('.', 1)[-1]} with its own config again")
            if not passes():
                guilty.append((key, original[key].decision))
                use(key, stand_in)
        return guilty
    finally:
        for key in original:
            restore(key)
