"""Compiles many binaries at once before they are needed: Triton's compiler works without the interpreter's lock.

A round of tuning compiles all its configs, a freeze all its classes of calls; one after the other is most of a cold
start.
"""

import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

__all__ = ["Ahead", "threads_of_this_rank"]


def threads_of_this_rank() -> int:
    """Processors that this process may use, shared with the other ranks of the host (`LOCAL_WORLD_SIZE`)."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, len(os.sched_getaffinity(0)) // (int(ranks) if ranks.isdigit() and int(ranks) else 1))


class Ahead:
    """Runs tasks that compile, on the current device, in `threads` threads; with one thread nothing is run ahead."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def __call__(self, tasks: Collection[Callable[[], Any]]) -> None:
        """Return when all are done. Errors are dropped: whoever needs the binary meets them and says where."""
        workers = min(self.threads, len(tasks))
        if workers < 2:
            return
        from triton.runtime import driver

        device = driver.active.get_current_device()

        def run(task: Callable[[], Any]) -> None:
            # The current device is a thread's own, and a new thread's is the first.
            driver.active.set_current_device(device)
            with suppress(Exception):
                task()

        with ThreadPoolExecutor(workers, thread_name_prefix="fla_safe_compile") as pool:
            list(pool.map(run, tasks))
