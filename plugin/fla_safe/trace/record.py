"""Counts the file operations of this process by cause and writes them to a JSON-lines file; standard library only.

Opens, listings, imports that search, changes and started programs come from a Python audit hook. `os.stat` raises no
audit event, so `stat`, `lstat`, `access` and `readlink` of `os` and `posix` are wrapped (the import system calls the
latter). Reads are not visible from Python: /proc/self/io gives them for the whole process, and for each cause the size
of the files that were opened for reading is added up. What C, C++ and Rust code opens by itself (Arrow, safetensors, a
dynamic linker) is seen by `fla-safe trace --strace` alone.
"""

import atexit
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from fla_safe.trace.causes import Frame, is_probe
from fla_safe.trace.launches import Launches, count_for
from fla_safe.trace.sites import Sites

__all__ = ["VERSION", "Recorder", "active", "start", "step"]

VERSION = 1
_EVERY = 1.0
_EVENTS = {
    "open": "opens",
    "os.listdir": "listings",
    "os.scandir": "listings",
    "import": "searches",
    "os.mkdir": "changes",
    "os.rename": "changes",
    "os.remove": "changes",
    "os.rmdir": "changes",
    "os.link": "changes",
    "os.symlink": "changes",
    "os.truncate": "changes",
    "ctypes.dlopen": "programs",
    "subprocess.Popen": "programs",
    "os.posix_spawn": "programs",
    "os.exec": "programs",
    "os.fork": "programs",
}
_KEPT, _AFTER_A_PROBE, _WALKED = 8, 5, 160
_STATS = ("stat", "lstat", "access", "readlink")
_real_stat = os.stat

_recorder: "Recorder | None" = None
_installed = False


def active() -> "Recorder | None":
    """The recorder of this process, if it is traced."""
    return _recorder


def step() -> None:
    """Tell the trace that a training step is over (a loop without an optimizer); nothing where no trace runs."""
    if _recorder is not None:
        _recorder.step()


def start(directory: str, kernels: tuple[str, ...]) -> "Recorder":
    """Begin to record into a new file below `directory`. One recorder in a process; a second call returns it.

    Args:
        kernels: names (or parts of names) of Triton kernels before which the host gap is measured.
    """
    global _recorder, _installed
    if _recorder is None:
        _recorder = Recorder(directory, kernels)
        if not _installed:
            _installed = True
            hook = getattr(sys.modules.get("torch.optim.optimizer"), "register_optimizer_step_post_hook", None)
            if hook is not None:
                hook(_optimizer_stepped)
            _wrap_stats()
            sys.addaudithook(_hook)
            os.register_at_fork(after_in_child=_after_fork)
            atexit.register(_stop)
        _recorder.run()
    return _recorder


def _stop() -> None:
    global _recorder
    recorder, _recorder = _recorder, None
    count_for(None)
    if recorder is not None:
        recorder.finish()


def _after_fork() -> None:
    """A child (a data loader's worker, for one) writes a file of its own; what it inherited belongs to the parent."""
    global _recorder
    parent, _recorder = _recorder, None
    count_for(None)
    if parent is None:
        return
    try:
        _recorder = Recorder(parent.directory, parent.launches.watched)
        _recorder.run()
        util = sys.modules.get("multiprocessing.util")
        if util is not None:  # its children end with os._exit, past atexit, and begin by forgetting all finalisers
            util.register_after_fork(_recorder, lambda _: util.Finalize(None, _stop, exitpriority=0))
    except Exception as error:
        sys.stderr.write(f"fla_safe: a forked process is not traced: {error}\n")


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    operation = _EVENTS.get(event)
    if operation is None or (recorder := _recorder) is None:
        return
    target = arguments[0] if arguments else ""
    if event == "import":
        if arguments[1] is not None:  # the file of an extension module: its open is announced, too
            return
    elif isinstance(target, int):  # a descriptor that was opened before
        return
    recorder.note(operation, target, arguments)


def _wrap_stats() -> None:
    import posix

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if (recorder := _recorder) is not None and not isinstance(path, int):
                recorder.note("stats", path, ())
            return real(path, *args, **kwargs)

        call.__name__ = call.__qualname__ = real.__name__
        call.__doc__ = real.__doc__
        return call

    for name in _STATS:
        real = getattr(posix, name)
        call = wrapped(real)
        # shutil and others ask whether `os.stat in os.supports_dir_fd`.
        for abilities in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
            if real in abilities:
                abilities.add(call)
        setattr(posix, name, call)
        setattr(os, name, call)


class Recorder:
    """Counters of one process, and the thread that writes them down once a second."""

    def __init__(self, directory: str, kernels: tuple[str, ...]) -> None:
        self.directory = directory
        self.launches = Launches(kernels)
        self.sites = Sites(os.environ.get("TRITON_CACHE_DIR", ""))
        self.steps = 0
        self._marked = False
        self._optimizers: dict[int, int] = {}
        self._ops: dict[str, dict[str, int]] = {}
        # Re-entrant: a finaliser that runs inside `note` may close or remove a file.
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._writer: int | None = None
        name = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns() // 1000}.jsonl"
        rank = os.environ.get("RANK")
        self.path = os.path.join(directory, f"rank{rank}-{name}" if rank is not None else f"main-{name}")
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            self._io = os.open("/proc/self/io", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._io = -1
        self._own_reads = self._own_bytes = 0
        self._sizes = not _under_strace()
        self._before = self._process_io()
        self._since = time.time()
        self._sites_due = self._since + 2.0
        self._write(self._head())

    def run(self) -> None:
        """Start the writer."""
        count_for(self.launches)
        thread = threading.Thread(target=self._loop, name="fla_safe-trace", daemon=True)
        thread.start()

    def note(self, operation: str, target: Any, arguments: tuple[Any, ...]) -> None:
        """Count one operation of the calling thread."""
        if threading.get_ident() == self._writer:
            return
        path = target if isinstance(target, str) else _text(target)
        frames, importing = _stack()
        with self._lock:
            site = self.sites.find(operation, path, frames, importing)
            now = time.time()
            site.count += 1
            site.last = now
            site.first = site.first or now
            ops = self._ops.setdefault(site.cause, {})
            ops[operation] = ops.get(operation, 0) + 1
            if operation == "opens" and self._sizes and _reads(arguments):
                try:
                    size = _real_stat(path).st_size
                except (OSError, ValueError):
                    ops["missing"] = ops.get("missing", 0) + 1
                    return
                site.size += size
                ops["bytes"] = ops.get("bytes", 0) + size

    def step(self) -> None:
        """One more training step is over; the interval ends with it."""
        if not self._marked:  # steps that an optimizer announced before are not counted twice
            self._marked, self.steps = True, 0
        self.steps += 1
        self._interval()

    def optimizer_stepped(self, optimizer: object) -> None:
        """Training steps are those of the busiest optimizer, unless `step` is called."""
        if not self._marked:
            n = self._optimizers[id(optimizer)] = self._optimizers.get(id(optimizer), 0) + 1
            self.steps = max(self.steps, n)

    def finish(self) -> None:
        """Write what is left."""
        self._ended.set()
        self._interval(last=True)
        self._write({"kind": "end", "t": time.time(), "steps": self.steps})

    def _loop(self) -> None:
        self._writer = threading.get_ident()
        while not self._ended.wait(_EVERY):
            self._interval()

    def _interval(self, *, last: bool = False) -> None:
        with self._lock:
            now = time.time()
            io = self._process_io()
            spent = {k: io[k] - self._before[k] for k in io}
            ops, self._ops = self._ops, {}
            line = {"kind": "interval", "t0": self._since, "t1": now, "step": self.steps, "ops": ops, "io": spent}
            self._before, self._since = io, now
            line.update(self.launches.take())
            self._write(line)
            if last or self.sites.full or now >= self._sites_due:
                self._sites_due = now + 30.0
                self._write({"kind": "sites", "t": now, "sites": self.sites.take()})

    def _process_io(self) -> dict[str, int]:
        """System calls that read, bytes they returned, bytes that came from a disk; without this recorder's own."""
        if self._io < 0:
            return {}
        text = os.pread(self._io, 4096, 0).decode()
        fields = dict(line.split(": ") for line in text.splitlines())
        own = self._own_reads, self._own_bytes
        self._own_reads += 1
        self._own_bytes += len(text)
        return {
            "reads": int(fields["syscr"]) - own[0],
            "bytes": int(fields["rchar"]) - own[1],
            "disk": int(fields["read_bytes"]),
        }

    def _head(self) -> dict[str, Any]:
        environment = {k: v for k, v in os.environ.items() if k.startswith(("FLA_", "TRITON_", "PYTHONDONTWRITE"))}
        return {
            "kind": "process",
            "version": VERSION,
            "t": time.time(),
            "pid": os.getpid(),
            "parent": os.getppid(),
            "host": socket.gethostname(),
            "rank": os.environ.get("RANK"),
            "argv": sys.argv,
            "python": platform.python_version(),
            "torch": str(getattr(sys.modules.get("torch"), "__version__", "")),
            "environment": environment,
            "sys_path": len(sys.path),
        }

    def _write(self, line: dict[str, Any]) -> None:
        try:
            os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")
        except OSError as error:  # a full disk must not end a training job
            if not self._ended.is_set():
                self._ended.set()
                sys.stderr.write(f"fla_safe: the trace ends here: {error}\n")


def _text(target: Any) -> str:
    if isinstance(target, os.PathLike):
        target = os.fspath(target)
    return target.decode(errors="replace") if isinstance(target, bytes) else str(target)


def _optimizer_stepped(optimizer: object, *_: Any) -> None:
    if _recorder is not None:
        _recorder.optimizer_stepped(optimizer)


def _under_strace() -> bool:
    """Strace counts every system call: then this recorder asks for no sizes of its own."""
    try:
        with open("/proc/self/status") as status:
            return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in status)
    except OSError:
        return False


def _reads(arguments: tuple[Any, ...]) -> bool:
    flags = arguments[2] if len(arguments) > 2 and isinstance(arguments[2], int) else 0
    return not flags & (os.O_WRONLY | os.O_RDWR)


def _stack() -> tuple[tuple[Frame, ...], bool]:
    """Frames of the caller, innermost first, without the import system's; and whether that was among them."""
    frame = sys._getframe(2)
    frames: list[Frame] = []
    importing = False
    left = 0
    for _ in range(_WALKED):
        if frame is None:
            break
        code = frame.f_code
        filename = code.co_filename
        if filename[:10] == "<frozen im":
            importing = True
        elif filename != __file__ and filename[:7] != "<frozen":
            if left:
                frames.append((filename, frame.f_lineno, code.co_name))
                left -= 1
                if not left:
                    break
            elif is_probe(filename, code.co_name):
                frames.append((filename, frame.f_lineno, code.co_name))
                left = _AFTER_A_PROBE
            elif len(frames) < _KEPT:
                frames.append((filename, frame.f_lineno, code.co_name))
            elif not importing:
                break
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(frames), importing
