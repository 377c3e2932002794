"""Exact counts from `strace -ff -ttt -y`: every system call of every process, also those that Python cannot see."""

import os
import re
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from fla_safe.trace.causes import classify
from fla_safe.trace.merge import Table

__all__ = ["PREFIX", "command", "counts"]

PREFIX = "strace"
_CALLS = {
    **dict.fromkeys(("open", "openat", "openat2"), "opens"),
    **dict.fromkeys(("stat", "lstat", "newfstatat", "statx", "access", "faccessat", "faccessat2"), "stats"),
    **dict.fromkeys(("readlink", "readlinkat"), "stats"),
    **dict.fromkeys(("read", "pread64", "readv"), "reads"),
    "getdents64": "listings",
    **dict.fromkeys(("mkdir", "mkdirat", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir"), "changes"),
    "execve": "programs",
}
_LINE = re.compile(r"(\d+\.\d+) (\w+)\((.*)\) += (-?\d+|\?)")
_PATH = re.compile(r'"((?:[^"\\]|\\.)*)"')
_DESCRIPTOR = re.compile(r"\d+<(/[^>]*)>")


def command(folder: Path) -> list[str] | None:
    """What to put before a command; None where strace is not installed or may not trace."""
    strace = shutil.which("strace")
    if strace is None:
        return None
    # Only the calls that are asked for stop the process, where strace (5.3) and the kernel can do that.
    for head in ([strace, "-f", "--seccomp-bpf"], [strace, "-f"]):
        if not subprocess.run([*head, "-o", os.devnull, "true"], capture_output=True, check=False).returncode:
            calls = "trace=%file,read,pread64,readv,getdents64"
            return [*head, "-ff", "-qq", "-y", "-ttt", "-s", "0", "-e", calls, "-o", str(folder / PREFIX)]
    return None


def counts(folder: Path, window: tuple[float, float], known: Mapping[str, str]) -> tuple[Table, Table] | None:
    """Calls by cause, all and inside the window; None where strace did not run.

    Args:
        known: cause of a path as the Python stack told it. Calls of other paths are judged by the path alone.
    """
    files = sorted(folder.glob(f"{PREFIX}.*"))
    if not files:
        return None
    total: dict[str, Counter[str]] = defaultdict(Counter)
    steady: dict[str, Counter[str]] = defaultdict(Counter)
    own = str(folder.resolve())
    for file in files:
        for when, operation, path, result in _calls(file):
            if path.startswith(own):
                continue
            cause = known.get(path) or classify(path)
            for counted in (total, steady) if window[0] <= when <= window[1] else (total,):
                counted[cause][operation] += 1
                if operation == "reads":
                    counted[cause]["bytes"] += max(result, 0)
                elif operation == "opens" and result < 0:
                    counted[cause]["missing"] += 1
    return _plain(total), _plain(steady)


def _plain(counted: Mapping[str, Counter[str]]) -> Table:
    return {cause: {name: float(n) for name, n in ops.items()} for cause, ops in counted.items()}


def _calls(file: Path) -> Iterator[tuple[float, str, str, int]]:
    with file.open(errors="replace") as lines:
        for line in lines:
            match = _LINE.match(line)
            if match is None:
                continue
            when, call, arguments, result = match.groups()
            operation = _CALLS.get(call)
            if operation is None or result == "?":
                continue
            found = (_DESCRIPTOR if operation in {"reads", "listings"} else _PATH).search(arguments)
            if found is None or not found[1] or re.match(r"/proc/(self|\d+)/io$", found[1]):
                continue  # pipes, sockets, fstat, and the recorder's own reading
            yield float(when), operation, found[1], int(result)
