"""Names every known trap of the environment before a job falls into it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fla_safe.doctor.facts import Environment

__all__ = ["Finding", "Report", "bad", "examine", "good", "warn"]

Level = Literal["ok", "warn", "error"]
STATUS: dict[Level, int] = {"ok": 0, "warn": 1, "error": 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Args:
        level: `"ok"`, `"warn"` (the job runs, but not as it should) or `"error"` (it does not run, or wrongly).
        seen: what was found.
        expected, remedy: empty when all is well.
    """

    level: Level
    seen: str
    expected: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Findings by check, with the milliseconds that each took."""

    findings: tuple[tuple[str, Finding, float], ...]

    @property
    def status(self) -> int:
        """Exit status: 0 all well, 1 warnings, 2 errors."""
        return max((STATUS[f.level] for _, f, _ in self.findings), default=0)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        rows = [{"check": name, **asdict(f), "milliseconds": round(ms, 1)} for name, f, ms in self.findings]
        return {"status": self.status, "findings": rows}


Check = Callable[[Environment], Finding | Sequence[Finding]]


def good(seen: str) -> Finding:
    """All is well."""
    return Finding("ok", seen)


def warn(seen: str, expected: str, remedy: str) -> Finding:
    """The job runs, but not as it should."""
    return Finding("warn", seen, expected, remedy)


def bad(seen: str, expected: str, remedy: str) -> Finding:
    """The job does not run, or computes something wrong."""
    return Finding("error", seen, expected, remedy)


def examine(environment: Environment, checks: Sequence[tuple[str, Check]]) -> Report:
    """Run every check; one that raises becomes a warning and stops no other."""
    rows: list[tuple[str, Finding, float]] = []
    for name, check in checks:
        start = time.perf_counter()
        try:
            result = check(environment)
        except Exception as error:
            result = warn(f"the check failed: {type(error).__name__}: {error}", "a result", "report this as a defect")
        found = [result] if isinstance(result, Finding) else list(result)
        milliseconds = (time.perf_counter() - start) * 1000
        rows += [(name, finding, milliseconds) for finding in found]
    return Report(tuple(rows))
