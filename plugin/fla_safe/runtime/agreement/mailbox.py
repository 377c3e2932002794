"""Requests to a `torch.distributed` store that cannot hang: each one is answered in bounded time or is a named error.

A store client blocks for as long as its server does not answer (a stopped or overloaded rank 0), whatever timeout it
was given for waiting on keys. So requests are made by a thread of their own, and only its answers are waited for.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fla_safe.errors import FlaSafeError

__all__ = ["Mailbox", "StoreUnreachableError"]


class StoreUnreachableError(FlaSafeError, RuntimeError):
    """The process that serves the store ended, is stopped, or cannot be reached over the network."""


class Mailbox:
    """Non-waiting requests over one connection of its own.

    Args:
        store: any `torch.distributed` store.
        prefix: put before every key.
        reply_seconds: longest time to wait for an answer.
    """

    def __init__(self, store: Any, prefix: str, reply_seconds: float) -> None:
        with suppress(AttributeError, RuntimeError, NotImplementedError):
            # Other users of the process group's client may hold its lock while they wait for keys.
            store = store.clone()
        self._store = store
        self._prefix = prefix
        self._reply_seconds = reply_seconds
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue] | None] = queue.SimpleQueue()
        self._broken: StoreUnreachableError | None = None
        threading.Thread(target=self._serve, name="fla-safe-mailbox", daemon=True).start()

    def post(self, key: str, value: bytes) -> None:
        """Set a key."""
        self._ask(lambda: self._store.set(self._prefix + key, value))

    def post_first(self, key: str, value: bytes) -> bytes:
        """Set a key that has no value yet; returns the value it has now, ours or another rank's."""
        return bytes(self._ask(lambda: self._store.compare_set(self._prefix + key, b"", value)))

    def take(self, key: str) -> bytes | None:
        """Value of a key, or None when there is none yet."""

        def request() -> bytes | None:
            # `get` alone would wait for the key to appear.
            return bytes(self._store.get(self._prefix + key)) if self._store.check([self._prefix + key]) else None

        return self._ask(request)

    def close(self) -> None:
        """End the thread. Requests after this are errors."""
        self._broken = self._broken or self._error("it was closed")
        self._requests.put(None)

    def _serve(self) -> None:
        while (item := self._requests.get()) is not None:
            request, answers = item
            try:
                answers.put((True, request()))
            except Exception as error:
                answers.put((False, error))

    def _ask(self, request: Callable[[], Any]) -> Any:
        if self._broken is not None:
            raise self._broken
        answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._requests.put((request, answers))
        try:
            good, value = answers.get(timeout=self._reply_seconds)
        except queue.Empty:
            # The thread may be stuck for good: no later request must queue up behind this one.
            self._broken = self._error(f"no answer in {self._reply_seconds:g} s")
            raise self._broken from None
        if not good:
            self._broken = self._error(f"{type(value).__name__}: {str(value).splitlines()[0]:.200}")
            raise self._broken from value
        return value

    def _error(self, reason: str) -> StoreUnreachableError:
        return StoreUnreachableError(
            f"the process group's store does not answer ({reason})",
            "a living process that serves it (rank 0, or torchrun's agent)",
            "look at rank 0's log: it ended, hangs or is stopped",
        )
