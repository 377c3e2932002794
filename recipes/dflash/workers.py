"""A thread for each pair, and one named error when any of them fails."""

import threading
from collections.abc import Callable, Sequence

from fla_safe.errors import FlaSafeError

__all__ = ["PairFailedError", "Stop", "Stopped", "run_together"]

_PATIENCE = 120.0


class PairFailedError(FlaSafeError, RuntimeError):
    """A pair's thread raised; all other pairs were stopped."""


class Stopped(Exception):
    """Raised in a pair that ends because another one failed."""


class Stop:
    """Asked for by the first failure, and looked at by all between two steps."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def now(self) -> None:
        """Ask all pairs to end."""
        self._event.set()

    def check(self) -> None:
        """Raise `Stopped` if a pair has failed."""
        if self._event.is_set():
            raise Stopped


def run_together(bodies: Sequence[Callable[[Stop], None]], *, patience: float = _PATIENCE) -> None:
    """Run each body in a thread of its own until all have ended.

    Args:
        bodies: each calls `Stop.check` between its steps.
        patience: seconds that the others get to finish their step after one has failed.

    Raises:
        PairFailedError: from what the first one raised.
    """
    stop, ended = Stop(), threading.Semaphore(0)
    failures: list[tuple[int, BaseException]] = []

    def thread(number: int) -> None:
        try:
            bodies[number](stop)
        except Stopped:
            pass
        except BaseException as error:
            failures.append((number, error))
            stop.now()
        finally:
            ended.release()

    threads = [threading.Thread(target=thread, args=(i,), name=f"pair-{i}", daemon=True) for i in range(len(bodies))]
    for t in threads:
        t.start()
    try:
        for _ in threads:
            # After a failure the rest may hang with it (in a collective, on a dead device): do not wait for ever.
            if not ended.acquire(timeout=patience if failures else None):
                break
    except BaseException:
        stop.now()
        raise
    if failures:
        number, error = failures[0]
        alive = sum(t.is_alive() for t in threads)
        raise PairFailedError(
            f"pair {number} failed with {type(error).__name__}: {error}" + (f"; {alive} threads hang" if alive else ""),
            "all pairs train to the last step",
            "mend what that thread's traceback shows; with --impl stock it is the failure that this recipe is about",
        ) from error
