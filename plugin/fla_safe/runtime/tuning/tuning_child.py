"""The process that tunes for a job: whatever a config kills, it is not the job.

Started by `outside.OutsideTuning` as `python -m fla_safe.runtime.tuning.tuning_child READ WRITE`. The first line it
reads says what to run and what is known; it answers with one JSON object a line: each config before it runs, each
decision.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fla_safe.runtime.tuning.autotune import Judge
from fla_safe.runtime.tuning.keys import Decision, TuningKey

__all__ = ["Work", "device_lives", "first_line", "main"]

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Work:
    """What a factory returns.

    Attributes:
        steps: functions that call the kernels as the job will; between two of them every kernel is announced anew.
        judge: of winners, as in `RuntimeSettings`.
    """

    steps: Iterable[Any]
    judge: Judge | None = None


class _DeadDevice(BaseException):
    """The device's context is gone: no later call of this process can succeed."""


def main(read: int, write: int) -> None:
    """Tune everything that the work calls, then end."""
    _end_with_parent()
    with os.fdopen(read) as hello, os.fdopen(write, "w") as answers:

        def tell(**values: Any) -> None:
            answers.write(json.dumps(values) + "\n")
            answers.flush()

        start = json.loads(hello.readline())
        try:
            sys.path[:0] = [p for p in start["path"] if p not in sys.path]
            module, _, name = start["factory"].partition(":")
            work: Work = getattr(importlib.import_module(module), name)(**start["arguments"])
            runtime, close = _activate(start, work, tell)
        except Exception as error:
            tell(failed=first_line(error))
            return
        tell(ready=True)
        try:
            with runtime.warmup(progress=lambda text: None):
                for step in work.steps:
                    runtime.tuning.forget()
                    step()
                if not device_lives():
                    raise _DeadDevice
        except _DeadDevice:
            tell(dead="it took the device context with it")
        except Exception as error:
            tell(**{"failed" if device_lives() else "dead": first_line(error)})
        else:
            tell(done=True)
        with suppress(Exception):
            close()


def _activate(start: dict[str, Any], work: Work, tell: Any) -> tuple[Any, Any]:
    from fla_safe.runtime.artifacts import triton_cache
    from fla_safe.runtime.artifacts.store import ArtifactStore
    from fla_safe.runtime.lifecycle import RuntimeSettings, activate
    from fla_safe.runtime.tuning.decisions import DecisionTable

    table = DecisionTable.from_json(start["table"])
    settings: dict[str, Any] = {name: tuple(values) for name, values in start["settings"].items()}
    runtime = activate(
        RuntimeSettings(
            guard="off",
            table=table,
            judge=work.judge,
            agree=False,
            compile_threads=start["compile_threads"],
            **settings,
        )
    )
    tuning = runtime.tuning
    for ban in start["bans"]:
        tuning.ban(TuningKey.from_dict(ban["key"]), Decision.from_dict(ban["decision"]), ban["reason"])

    def trying(key: TuningKey, config: Any) -> None:
        # What an earlier launch did to the device must be blamed on it, not on this config.
        if not device_lives():
            raise _DeadDevice
        if tuning.answers_for(key.kernel) and not getattr(config, "ir_override", None):
            tell(trying=key.as_dict(), decision=Decision.from_config(config).as_dict())

    def tuned(key: TuningKey, configs: int, seconds: float) -> None:
        entry = table.entry(key)
        if entry is not None and tuning.answers_for(key.kernel):
            tell(
                decided=key.as_dict(),
                decision=entry.decision.as_dict(),
                source=entry.source,
                trials=[[d.as_dict(), ms] for d, ms in tuning.trials.get(key, {}).items()],
                rejected=tuning.rejected.get(str(key), {}),
                configs=configs,
                seconds=seconds,
            )

    tuning.trying, tuning.told = trying, tuned
    if (many := tuning.ahead) is not None:

        def ahead(tasks: Any) -> None:
            tell(compiling=len(tasks))
            many(tasks)
            tell(compiled=len(tasks))

        tuning.ahead = ahead
    if start["directory"] is None:
        return runtime, runtime.deactivate
    store = ArtifactStore(Path(start["directory"]), triton=table.stamp.triton)
    uninstall = triton_cache.install(store)

    def close() -> None:
        uninstall()
        store.close()

    return runtime, close


def _end_with_parent() -> None:
    """A config in an endless loop must not outlive a job that was killed."""
    with suppress(OSError, AttributeError):
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
    # The module under its own name, of which factories import `Work`, and not a second copy of it.
    importlib.import_module("fla_safe.runtime.tuning.tuning_child").main(int(sys.argv[1]), int(sys.argv[2]))
