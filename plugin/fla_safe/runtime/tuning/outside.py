"""Tuning in a child process on the same device: a config that kills the CUDA context, crashes or hangs costs a child.

At the first key without decision the child runs everything that the job will run, tunes every key and reports each
decision at once. If it dies, the config it was trying is banned, and a new child goes on from there. If it dies while
it compiles many configs at once, none can be blamed, and the next child compiles one at a time.
"""

import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fla_safe.runtime.tuning.autotune import Tuning
from fla_safe.runtime.tuning.keys import Decision, TuningKey
from fla_safe.runtime.tuning.tuning_child import first_line

__all__ = ["MOST_CHILDREN", "OutsideTuning"]

_log = logging.getLogger("fla_safe")

MOST_CHILDREN = 8
_MANY: Literal["many"] = "many"


@dataclass(slots=True)
class OutsideTuning:
    """A value for `Tuning.elsewhere`.

    Args:
        tuning: gets decisions, timings of the other configs, rejections and bans.
        factory: `"module:function"`, called in the child; returns a `tuning_child.Work`.
        arguments: its keyword arguments, JSON-serialisable.
        settings: sequences of `RuntimeSettings` that name kernels: `guarded`, `size_arguments`, `packages`.
        directory: where the child keeps compiled kernels, for this process to find; it must not compile meanwhile.
        seconds: longest silence; a config that takes longer hangs.
        start_seconds: longest time to import and build.
        tell: told of each decision, each ban, and of the start.
        compile_threads: compilations at a time in the child.
        children: processes that were started.
    """

    tuning: Tuning
    factory: str
    arguments: Mapping[str, Any]
    settings: Mapping[str, Sequence[str]]
    directory: Path | None = None
    seconds: float = 300.0
    start_seconds: float = 300.0
    tell: Callable[[str], None] = lambda text: None
    compile_threads: int = 1
    children: int = 0
    finished: bool = False

    def __call__(self, key: TuningKey) -> None:
        """Tune everything, once. What is left undecided then is tuned in this process."""
        if self.finished:
            return
        self.finished = True
        self.tell("tuning in a process of its own")
        while self.children < MOST_CHILDREN:
            self.children += 1
            trying, end = self._one_child()
            if end is None:
                return
            if trying == _MANY:
                self.compile_threads = 1
                self.tell(f"the compiler {end}; it compiles one config at a time now")
                continue
            if trying is None:
                _log.warning("fla-safe: the process for tuning %s; tuning goes on in the job", end)
                return
            key, decision = trying
            self.tuning.ban(key, decision, end)
            _log.warning("fla-safe: %s must not run with [%s]: it %s", key.kernel, decision, end)
            self.tell(f"{key.kernel.rsplit('.', 1)[-1]} must not run with [{decision}]: it {end}")
        _log.warning("fla-safe: %d processes for tuning died; tuning goes on in the job", self.children)

    def _one_child(self) -> tuple[tuple[TuningKey, Decision] | Literal["many"] | None, str | None]:
        """What the child was trying at its end, and how it ended; None when all is tuned."""
        trying: tuple[TuningKey, Decision] | Literal["many"] | None = None
        for message in self._messages():
            if "compiling" in message:
                trying = _MANY
            elif "compiled" in message:
                trying = None
            elif "trying" in message:
                trying = TuningKey.from_dict(message["trying"]), Decision.from_dict(message["decision"])
            elif "decided" in message:
                self._take(message)
            elif "done" in message:
                return None, None
            elif "failed" in message:
                # The device lives, so this is an error of the work itself: the job will meet it and tell.
                return None, f"failed: {message['failed']}"
            elif "dead" in message:
                return trying, f"killed the device's context ({message['dead']})"
            elif "ended" in message:
                return trying, message["ended"]
        raise AssertionError("unreachable")

    def _take(self, message: Mapping[str, Any]) -> None:
        key = TuningKey.from_dict(message["decided"])
        trials = {Decision.from_dict(decision): float(ms) for decision, ms in message["trials"]}
        decision = Decision.from_dict(message["decision"])
        self.tuning.adopt(
            key, decision, trials, message["rejected"], seconds=message["seconds"], source=message["source"]
        )
        self.tell(f"tuned {key.kernel.rsplit('.', 1)[-1]} ({message['configs']} configs, {message['seconds']:.1f} s)")

    def _hello(self) -> dict[str, Any]:
        bans = [
            {"key": key.as_dict(), "decision": decision.as_dict(), "reason": reason}
            for key, banned in self.tuning.banned.items()
            for decision, reason in banned.items()
        ]
        return {
            # "" means the current directory of the process that reads it, which is the same in the child.
            "path": [p for p in sys.path if p],
            "factory": self.factory,
            "arguments": dict(self.arguments),
            "settings": {name: list(values) for name, values in self.settings.items()},
            "table": self.tuning.table.to_json(),
            "bans": bans,
            "compile_threads": self.compile_threads,
            "directory": None if self.directory is None else str(self.directory),
        }

    def _messages(self) -> Iterator[dict[str, Any]]:
        """What a new child says; the last message is `done`, `failed`, `dead` or `ended`."""
        try:
            child, write, read, log = _start()
        except OSError as error:
            yield {"failed": first_line(error)}
            return
        with log:
            try:
                # In a thread, for a table may be larger than a pipe holds and the child may never read.
                sender = threading.Thread(target=_send, args=(write, self._hello()), daemon=True)
                sender.start()
                yield from self._read(child, read, log)
            finally:
                with suppress(ProcessLookupError):
                    # The whole session: a config may have started compilers of its own.
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                os.close(read)

    def _read(self, child: Any, read: int, log: Any) -> Iterator[dict[str, Any]]:
        rest, limit = b"", self.start_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(read, selectors.EVENT_READ)
            until = time.monotonic() + limit
            while True:
                if not selector.select(max(0.0, until - time.monotonic())):
                    yield {"ended": f"said nothing for {limit:g} s"}
                    return
                piece = os.read(read, 1 << 16)
                if not piece:
                    yield {"ended": _last_words(child, log)}
                    return
                limit = self.seconds
                until = time.monotonic() + limit
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield json.loads(line)


def _start() -> tuple[Any, int, int, Any]:
    """A child, the descriptors to write to it and to read from it, and what it prints.

    Raises:
        OSError: too little memory, too many processes or open files, or no temporary directory.
    """
    log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by the caller)
    ends: list[int] = []
    try:
        ends += os.pipe()
        ends += os.pipe()
        there, write, read, back = ends
        child = subprocess.Popen(
            [sys.executable, "-m", "fla_safe.runtime.tuning.tuning_child", str(there), str(back)],
            pass_fds=(there, back),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    except OSError:
        for end in ends:
            os.close(end)
        log.close()
        raise
    os.close(there)
    os.close(back)
    return child, write, read, log


def _send(write: int, hello: dict[str, Any]) -> None:
    with suppress(BrokenPipeError), os.fdopen(write, "wb") as pipe:
        pipe.write((json.dumps(hello) + "\n").encode())


def _last_words(child: Any, log: Any) -> str:
    code = child.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended the process with status {code}"
    log.seek(max(0, log.seek(0, os.SEEK_END) - 2000))
    lines = log.read().decode(errors="replace").strip().splitlines()
    return f"{how}{f' ({lines[-1]:.200})' if lines else ''}"
