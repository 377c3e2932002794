"""Ranks that wait for each other without being able to hang: signs of life, progress, and one failure told to all.

No collective is used, because a collective that one rank does not join hangs on all others. Each rank beats once a
second from a thread of its own. A rank that stops beating (dead, stopped), or beats without progress for too long
(hung), becomes one named error on every rank.
"""

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fla_safe.errors import FlaSafeError
from fla_safe.runtime.agreement.mailbox import Mailbox, StoreUnreachableError

__all__ = ["AgreementError", "Limits", "Peers"]

_TELL_SECONDS = 5.0


class AgreementError(FlaSafeError, RuntimeError):
    """The ranks did not agree on one table: a rank died, hangs, failed, or holds something that does not fit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds in seconds.

    Args:
        beat: time between two signs of life.
        dead_after: no sign of life for this long means that the rank is dead.
        stall_after: signs of life, but no progress, for this long means that it hangs. One step of progress is one
            kernel tuned or compiled.
        reply: longest time the store may take for one answer.
    """

    beat: float = 1.0
    dead_after: float = 60.0
    stall_after: float = 900.0
    reply: float = 60.0


@dataclass(slots=True)
class _Watched:
    beat: int = -1
    step: int = -1
    beat_at: float = 0.0
    step_at: float = 0.0
    text: str = "not started"
    where: str = "?"


class Peers:
    """This rank's view of the others, over a store that all share.

    Args:
        store: a `torch.distributed` store.
        rank, world_size: this rank and the number of ranks.
        limits: bounds on waiting.
        prefix: put before every key; equal on all ranks and used once.
    """

    def __init__(self, store: Any, rank: int, world_size: int, limits: Limits, prefix: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.failure: AgreementError | None = None
        self._limits = limits
        self._step = 0
        self._text = "starting"
        self._watched: dict[int, _Watched] = {}
        self._stop = threading.Event()
        self._box = Mailbox(store, prefix, limits.reply)
        self._pulse = Mailbox(store, prefix, limits.reply)
        self._where = f"{socket.gethostname()}, process {os.getpid()}"
        # The first beat is here, so that a rank that dies right after is known to have lived.
        if self._beat(0):
            threading.Thread(target=self._keep_beating, name="fla-safe-heartbeat", daemon=True).start()

    def progress(self, text: str) -> None:
        """Say what this rank does now; raises `AgreementError` when a rank failed meanwhile."""
        self._text = text
        self._step += 1
        if self.failure is not None:
            raise self.failure

    def post(self, key: str, value: bytes) -> None:
        """Publish a value."""
        self._box.post(key, value)

    def gather(self, name: str) -> dict[int, bytes]:
        """Values of `<name>/<rank>` of all ranks. Raises `AgreementError` when one dies, hangs or fails."""
        found: dict[int, bytes] = {}
        waiting = set(range(self.world_size))
        for _ in self._ticks():
            for rank in sorted(waiting):
                if (value := self._box.take(f"{name}/{rank}")) is not None:
                    found[rank] = value
                    waiting.discard(rank)
            if not waiting:
                return found
            for rank in sorted(waiting - {0}):
                self._look_at(rank)
        raise AssertionError("unreachable")

    def wait_for(self, key: str) -> bytes:
        """A value that rank 0 will publish. Raises `AgreementError` when it dies, hangs or fails."""
        for _ in self._ticks():
            if (value := self._box.take(key)) is not None:
                return value
            self._look_at(0)
        raise AssertionError("unreachable")

    def _ticks(self) -> Iterator[None]:
        """Endless; checks for a failure told by others, counts as progress, and waits between two rounds."""
        pause = 0.005
        while True:
            self.progress(self._text)
            yield
            time.sleep(pause)
            pause = min(pause * 1.5, 0.25)

    def _look_at(self, rank: int) -> None:
        """Judge a rank that is waited for by its signs of life."""
        now = time.monotonic()
        seen = self._watched.setdefault(rank, _Watched(beat_at=now, step_at=now))
        raw = self._box.take(f"beat/{rank}")
        if raw is not None:
            beat, step, seen.text, seen.where = json.loads(raw)
            if beat != seen.beat:
                seen.beat, seen.beat_at = beat, now
            if step != seen.step:
                seen.step, seen.step_at = step, now
        # A rank that never started may still be building its model: that is bounded like a rank without progress.
        if seen.beat >= 0 and now - seen.beat_at > self._limits.dead_after:
            what = f"gave no sign of life for {self._limits.dead_after:g} s, last seen {seen.text}"
        elif now - seen.step_at > self._limits.stall_after:
            what = f"made no progress for {self._limits.stall_after:g} s, last seen {seen.text}"
        else:
            return
        self.raise_first(
            AgreementError(
                f"rank {rank} ({seen.where}) {what}",
                "every rank to finish its warm-up",
                f"look at the log of rank {rank}: it was killed (memory?), stopped, or hangs",
            )
        )

    def raise_first(self, error: AgreementError) -> "AgreementError":
        """Raise the first failure that any rank told, which is `error` unless somebody was faster."""
        first = self._box.post_first("failure", json.dumps([error.seen, error.expected, error.remedy]).encode())
        self.failure = self.failure or AgreementError(*json.loads(first))
        self._tell()
        raise self.failure

    def _tell(self) -> None:
        """Rank 0 may serve the store: it stays until the others had time to read why."""
        self._box.post(f"told/{self.rank}", b"1")
        if self.rank != 0:
            return
        until = time.monotonic() + min(_TELL_SECONDS, self._limits.dead_after)
        while time.monotonic() < until:
            if all(self._box.take(f"told/{r}") is not None for r in range(self.world_size)):
                return
            time.sleep(0.05)

    def fail(self, error: BaseException) -> None:
        """Tell all other ranks that this one cannot go on. Never raises."""
        told = error
        if not isinstance(told, AgreementError):
            told = AgreementError(
                f"rank {self.rank} on {socket.gethostname()} failed while {self._text}: "
                f"{type(error).__name__}: {error!s:.500}",
                "every rank to finish its warm-up",
                f"look at the log of rank {self.rank}",
            )
        with suppress(AgreementError, StoreUnreachableError):
            self.raise_first(told)

    def close(self) -> None:
        """Stop the signs of life."""
        self._stop.set()
        self._box.close()

    def _beat(self, count: int) -> bool:
        """One sign of life; False when there is nobody to give it to any more."""
        try:
            message = [count, self._step, self._text, self._where]
            self._pulse.post(f"beat/{self.rank}", json.dumps(message).encode())
            if self.failure is None and (raw := self._pulse.take("failure")) is not None:
                self.failure = AgreementError(*json.loads(raw))
                self._pulse.post(f"told/{self.rank}", b"1")
        except StoreUnreachableError as error:
            self.lost(error)
        return self.failure is None

    def _keep_beating(self) -> None:
        for count in itertools.count(1):
            if self._stop.wait(self._limits.beat) or not self._beat(count):
                break
        self._pulse.close()

    def lost(self, error: StoreUnreachableError) -> AgreementError:
        """The failure to raise when the store does not answer."""
        if self.failure is None:
            self.failure = AgreementError(error.seen, error.expected, error.remedy)
        return self.failure
