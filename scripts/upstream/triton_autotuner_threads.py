"""Triton's autotuner keeps a call's arguments on the autotuner object, where a second thread overwrites them.

Two threads call one autotuned kernel, as two GPUs in one process do. While the first thread tunes,
  1. a call by the second thread ends: the first one's next benchmark fails (`{**self.nargs}` of None);
  2. a call by the second thread is under way: the first one's `reset_to_zero` clears the second one's tensor, silently.
No GPU is needed: launches and benchmarks are plain Python here; only the autotuner is Triton's.
Known as https://github.com/triton-lang/triton/issues/11494 and /3095.

    python triton_autotuner_threads.py      exit status 0: shown, 1: gone, 2: cannot tell
"""

import sys
import threading

import torch
import triton


def autotuned(launch, bench):
    @triton.autotune(
        configs=[triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})],
        key=["n"],
        reset_to_zero=["x"],
        do_bench=bench,
    )
    @triton.jit
    def kernel(x, n, BLOCK: "triton.language.constexpr"):
        pass

    kernel.fn.run = launch  # what would compile and launch
    return kernel[(1,)]


def second_call_ends() -> bool:
    """A call with a known key ends in another thread between two benchmarks."""
    mine, theirs = torch.ones(4), torch.ones(4)
    tuning = threading.local()

    def bench(call, quantiles):
        call()
        if getattr(tuning, "here", False):
            other = threading.Thread(target=lambda: kernel(theirs, 2))
            other.start()
            other.join()
        return [1.0, 1.0, 1.0]

    kernel = autotuned(lambda *args, **kwargs: None, bench)
    kernel(theirs, 2)  # key 2 is tuned from here on
    tuning.here = True
    try:
        kernel(mine, 1)
    except TypeError as error:
        print(f"1. the tuning thread failed: TypeError: {error}")
        return True
    print("1. the tuning thread was not disturbed")
    return False


def second_call_under_way() -> bool:
    """A call with a known key is in its launch, in another thread, between two benchmarks."""
    mine, theirs = torch.ones(4), torch.ones(4)
    arrived, leave = threading.Event(), threading.Event()
    others: list[threading.Thread] = []
    tuning = threading.local()

    def launch(x, n, **kwargs):
        if x is theirs and others:
            arrived.set()
            leave.wait(10)

    def bench(call, quantiles):
        call()
        if getattr(tuning, "here", False) and not others:
            others.append(threading.Thread(target=lambda: kernel(theirs, 2)))
            others[0].start()
            arrived.wait(10)
        return [1.0, 1.0, 1.0]

    kernel = autotuned(launch, bench)
    kernel(theirs, 2)
    theirs.fill_(1.0)
    tuning.here = True
    try:
        kernel(mine, 1)
    finally:
        leave.set()
        others[0].join()
    print(f"2. the other thread's tensor, which nobody asked to clear: {theirs.tolist()} (was all ones)")
    return not theirs.all()


if __name__ == "__main__":
    print(f"triton {triton.__version__}")
    shown = [second_call_ends(), second_call_under_way()]
    print("=> present" if any(shown) else "=> gone")
    sys.exit(0 if any(shown) else 1)
