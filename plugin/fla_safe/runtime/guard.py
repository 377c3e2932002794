"""What happens when something is tuned or compiled after the freeze: counted, said, or refused."""

import logging
import threading
from typing import Literal

from fla_safe.errors import FlaSafeError

__all__ = ["Guard", "GuardMode", "LateCompileError", "LateTuneError", "NoWorkingConfigError"]

GuardMode = Literal["off", "warn", "strict"]

_log = logging.getLogger(__name__)


class LateTuneError(FlaSafeError, RuntimeError):
    """A kernel met a tuning key after the freeze for which there is no decision (guard `strict`)."""


class LateCompileError(FlaSafeError, RuntimeError):
    """A kernel needs a binary after the freeze that was not compiled before it (guard `strict`)."""


class NoWorkingConfigError(FlaSafeError, RuntimeError):
    """Every config that a kernel offers failed to compile, to launch or to pass the check of its results."""


class Guard:
    """Counts late events and acts on them. Nothing is late while `frozen` is false.

    Args:
        mode: `"off"` counts and otherwise lets Triton tune and compile, `"warn"` counts, never benchmarks and says so
            once a key, `"strict"` raises.
    """

    def __init__(self, mode: GuardMode = "warn") -> None:
        self.mode: GuardMode = mode
        self.frozen = False
        self.late_tunes = 0
        self.late_compiles = 0
        self._lock = threading.Lock()
        self._said: set[str] = set()

    def reset(self) -> None:
        """Forget all counts, as at the moment of the freeze."""
        with self._lock:
            self.late_tunes = self.late_compiles = 0
            self._said.clear()

    def late_tune(self, kernel: str, key: str, answer: str) -> None:
        """Count a key without decision; `answer` says what is run instead.

        Raises:
            LateTuneError: in mode `strict`.
        """
        with self._lock:
            self.late_tunes += 1
        if self.mode == "strict":
            raise LateTuneError(
                f"{kernel} was called after the freeze with a key that has no decision: {key}",
                "only keys that the warm-up saw or the decision table holds",
                "add a call with these dtypes and shapes to the warm-up, or use guard=warn",
            )
        self._say(f"{key} has no decision; {answer}")

    def late_compile(self, kernel: str, signature: str) -> None:
        """Count a compilation after the freeze.

        Raises:
            LateCompileError: in mode `strict`.
        """
        with self._lock:
            self.late_compiles += 1
        if self.mode == "strict":
            raise LateCompileError(
                f"{kernel} needs a binary after the freeze that does not exist: {signature}",
                "only dtypes, None patterns and constants that the warm-up saw, on devices that were planned",
                "add a call with these arguments to the warm-up, name its device in freeze, or use guard=warn",
            )
        self._say(f"{kernel} is compiled after the freeze for {signature}")

    def _say(self, text: str) -> None:
        if self.mode == "off":
            return
        with self._lock:
            if text in self._said:
                return
            self._said.add(text)
        _log.warning("fla-safe: %s (said once)", text)
