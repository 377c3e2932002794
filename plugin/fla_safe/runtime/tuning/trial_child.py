"""The process in which configs are tried: whatever one of them kills, it is not the job.

Started by `winners.elect` as `python -m fla_safe.runtime.tuning.trial_child READ WRITE`, with two inherited descriptors
that carry one JSON object a line. The first line names the factory; every later one asks for a time or an examination.
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
from typing import Any, Protocol

from fla_safe.runtime.tuning.keys import Decision

__all__ = ["Subject", "device_lives", "end_with_parent", "examine", "first_line", "main", "same_bits"]

_PR_SET_PDEATHSIG = 1


class Subject(Protocol):
    """A kernel on fixed inputs, made by a factory function in the child process."""

    def run(self, decision: Decision) -> list[Any]:
        """Run once with this config on the same inputs as always; returns the output tensors."""

    def check(self, outputs: list[Any]) -> str | None:
        """Compare with the oracle: None when right, else what is wrong."""

    def time(self, decision: Decision) -> float:
        """Median time of one launch in microseconds."""


def same_bits(a: Any, b: Any) -> bool:
    """Whether two tensors have the same shape, dtype and bits (a NaN equals the same NaN, and -0 is not 0)."""
    import torch

    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    left, right = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return bool(torch.equal(left, right))


def examine(subject: Subject, decision: Decision, repeats: int) -> str | None:
    """None when the config's results match the oracle and `repeats` further runs repeat them bit for bit."""
    first = [t.clone() for t in subject.run(decision)]
    if reason := subject.check(first):
        return f"wrong: {reason}"
    for i in range(repeats):
        again = subject.run(decision)
        for n, (a, b) in enumerate(zip(first, again, strict=True)):
            if not same_bits(a, b):
                return f"not reproducible: output {n} of repeat {i + 1} has other bits"
    return None


def main(read: int, write: int) -> None:
    """Serve requests until the other end closes."""
    end_with_parent()
    with os.fdopen(read) as requests, os.fdopen(write, "w") as answers:

        def answer(**values: Any) -> None:
            answers.write(json.dumps(values) + "\n")
            answers.flush()

        start = json.loads(requests.readline())
        sys.path[:0] = [p for p in start["path"] if p not in sys.path]
        module, _, name = start["factory"].partition(":")
        try:
            subject: Subject = getattr(importlib.import_module(module), name)(**start["arguments"])
        except Exception as error:
            answer(error=first_line(error), dead=True)
            return
        answer(ready=True)
        for line in requests:
            request = json.loads(line)
            fields = dict(request["decision"])
            decision = Decision(**fields | {"kwargs": tuple(sorted(fields["kwargs"].items()))})
            try:
                if request["do"] == "time":
                    answer(us=float(subject.time(decision)))
                else:
                    answer(reason=examine(subject, decision, request["repeats"]))
            except Exception as error:
                dead = not device_lives()
                answer(error=first_line(error), dead=dead)
                if dead:
                    return


def end_with_parent() -> None:
    """A config in an endless loop must not outlive a job that was killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def device_lives() -> bool:
    """Some errors stay: after an illegal address every later call of the process fails too."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        return bool((torch.ones(2, device="cuda") + 1).sum().item() == 4)
    except Exception:
        return False


def first_line(error: BaseException) -> str:
    """Kind and first line of an error, for a message of one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]:.300}"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
