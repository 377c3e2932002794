"""One decision table for all ranks that passes every rank's checks: agree, check, ban what is wrong, agree again.

A check that a config fails on one rank bans it on all of them, so ranks never leave this with different bans.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fla_safe.errors import FlaSafeError
from fla_safe.runtime.agreement.rounds import Agreed, Agreement
from fla_safe.runtime.stamp import Stamp
from fla_safe.runtime.tuning.autotune import Tuning
from fla_safe.runtime.tuning.blame import find_guilty
from fla_safe.runtime.tuning.keys import Decision, TuningKey

__all__ = ["Check", "Outcome", "Settled", "WrongResultsError", "settle"]

_MOST_ROUNDS = 6


class WrongResultsError(FlaSafeError, RuntimeError):
    """Kernels give wrong or irreproducible results, and no exchange of configs mends it."""


class Outcome(Protocol):
    """Result of a check."""

    @property
    def failure(self) -> str | None:
        """None when all is right, else what was not."""


Check = Callable[[bool], Outcome]
"""Runs kernels and judges their results; the argument says whether their decisions have been checked before."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What all ranks of an architecture hold now.

    Attributes:
        agreed: the last agreement.
        overruled: decisions of one rank that another's replaced.
        banned: decisions that any rank found wrong.
    """

    agreed: Agreed
    overruled: int
    banned: int


def settle(
    tuning: Tuning,
    agreement: Agreement,
    stamp: Stamp,
    checks: Mapping[str, Check],
    *,
    again: Callable[[], None] = lambda: None,
    tell: Callable[[str], None] = lambda text: None,
) -> Settled:
    """Leave `tuning.table` agreed, checked and marked as verified. All ranks call it together.

    Args:
        tuning: holds this rank's decisions.
        agreement: of all ranks.
        stamp: of this process.
        checks: by a name for messages; they run with the agreed table.
        again: runs everything that the job will run, so that a key whose last decision was banned is tuned at the
            job's own sizes.
        tell: told of each step.

    Raises:
        WrongResultsError: a check fails whatever the configs are, or ever new configs fail.
        NoWorkingConfigError: all configs of a kernel were banned.
        AgreementError: one of these happened on another rank.
    """
    overruled = banned = 0
    failure = ""
    for turn in range(_MOST_ROUNDS):
        agreed = agreement.agree(tuning.table, stamp)
        overruled = max(overruled, agreed.overruled)
        tuning.table = agreed.table
        tuning.forget()
        mine: list[dict[str, Any]] = []
        checked: set[TuningKey] = set()
        for name, check in checks.items():
            mine += _check(tuning, name, check, checked, tell, again)
        shared = agreement.share({"bans": mine, "checked": [key.as_dict() for key in sorted(checked)]})
        bans = [ban for rank in shared for ban in rank["bans"]]
        if not bans:
            _mark(tuning, shared)
            return Settled(agreed, overruled, banned)
        banned += len(bans)
        failure = f"{bans[-1]['key']['kernel']} [{Decision.from_dict(bans[-1]['decision'])}]: {bans[-1]['reason']}"
        for ban in bans:
            tuning.ban(TuningKey.from_dict(ban["key"]), Decision.from_dict(ban["decision"]), ban["reason"])
        if turn + 1 < _MOST_ROUNDS:
            again()
    raise WrongResultsError(
        f"after {_MOST_ROUNDS} rounds of exchanging configs there are still wrong ones, the last is {failure}",
        "kernels whose configs give right results",
        "upgrade Triton and FLA, check the GPU, or use --gdn_impl torch",
    )


def _check(
    tuning: Tuning,
    name: str,
    check: Check,
    checked: set[TuningKey],
    tell: Callable[[str], None],
    again: Callable[[], None],
) -> list[dict[str, Any]]:
    """Ban until the check passes; returns the bans, and adds the keys of what passed to `checked`."""
    bans: list[dict[str, Any]] = []
    for _ in range(_MOST_ROUNDS):
        tell(f"checking {name}")
        tuning.forget()
        # Every key must be asked for again, to know which ones the check covers.
        known = _all_verified(tuning)
        failure = check(known).failure
        if failure is None:
            checked.update(tuning.asked)
            return bans
        in_use = _in_use(tuning)
        guilty = find_guilty(tuning, lambda: check(False).failure is None, tell)
        if not guilty:
            break
        for key, decision in guilty:
            reason = f"{failure} ({name})"
            tell(f"{key.kernel.rsplit('.', 1)[-1]} must not run with [{decision}]: {reason}")
            tuning.ban(key, decision, reason)
            bans.append({"key": key.as_dict(), "decision": decision.as_dict(), "reason": reason})
        if any(key not in tuning.table for key, _ in guilty):
            again()
    raise WrongResultsError(
        f"{name}: {failure}, with {in_use}",
        "results within the tolerance of float64 that repeat bit for bit, with these or other configs of the kernels",
        "upgrade Triton and FLA, check the GPU, or use --gdn_impl torch",
    )


def _all_verified(tuning: Tuning) -> bool:
    entries = [tuning.table.entry(key) for key in tuning.table]
    return bool(entries) and all(entry is not None and entry.verified for entry in entries)


def _mark(tuning: Tuning, shared: list[dict[str, Any]]) -> None:
    table = tuning.table
    for key in (TuningKey.from_dict(data) for rank in shared for data in rank["checked"]):
        entry = table.entry(key)
        if entry is not None:
            table.put(key, entry.decision, median_us=entry.median_us, verified=True, source=entry.source)


def _in_use(tuning: Tuning) -> str:
    found = [f"{key.kernel.rsplit('.', 1)[-1]} [{tuning.table.get(key)}]" for key in tuning.asked]
    return "; ".join(found) or "no tuned kernel at all"
