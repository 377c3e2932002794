"""Counts file operations and host-device syncs of the calls that the runtime answers for.

Python cannot remove an audit hook, so one inert hook stays in the process after `stop`. It sees what the interpreter
announces: opening, listing, making and removing files, starting programs, and imports that search the disk. It does
not see `stat`; the tests use strace for that.
"""

import sys
import threading
import warnings
from types import TracebackType
from typing import Any, Literal

__all__ = ["FILE_EVENTS", "Audit", "AuditScope"]

AuditScope = Literal["off", "sections", "process"]

FILE_EVENTS = frozenset(
    {
        "open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink",
        "os.chmod", "os.truncate", "os.posix_spawn", "os.exec", "os.fork", "subprocess.Popen", "ctypes.dlopen",
        "import", "mmap.__new__",
    }
)  # fmt: skip
"""Audit events that touch a file system or start a program. `import` is announced only for modules not yet loaded."""

_SYNC_TEXT = "called a synchronizing CUDA operation"

_listening: "Audit | None" = None
_hooked = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event in FILE_EVENTS and (audit := _listening) is not None:
        audit._file_event(event, arguments)


class Section:
    """Context manager around a call that must not touch files nor wait for the device; may be nested and shared."""

    __slots__ = ("_audit", "_here")

    def __init__(self, audit: "Audit") -> None:
        self._audit = audit
        self._here = threading.local()

    def __enter__(self) -> None:
        here = self._here
        here.depth = getattr(here, "depth", 0) + 1
        if here.depth == 1 and self._audit.watch_syncs:
            self._audit._watch(True)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._here.depth -= 1
        if not self._here.depth and self._audit.watch_syncs:
            self._audit._watch(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Section":
        # Modules hold their process's section, and modules are copied.
        return self

    @property
    def inside(self) -> bool:
        """Whether the calling thread is in the section."""
        return getattr(self._here, "depth", 0) > 0


class Audit:
    """Counters `file_ops` and `syncs`.

    Args:
        scope: which file operations count: none, those inside `section` on the same thread, or all of the process.
        watch_syncs: ask torch to report synchronizing CUDA calls inside `section` (needs a GPU build of torch).
    """

    def __init__(self, scope: AuditScope = "sections", *, watch_syncs: bool = False) -> None:
        self.scope: AuditScope = scope
        self.watch_syncs = watch_syncs
        self.file_ops = 0
        self.syncs = 0
        self.examples: list[str] = []
        self.section = Section(self)
        # Re-entrant: a signal handler, or a finalizer, may open a file while one is being counted on its thread.
        self._lock = threading.RLock()
        self._show: Any = None

    def start(self) -> None:
        """Begin to count from zero. One audit counts in a process; a second one takes over."""
        global _hooked, _listening
        self.reset()
        if self.scope != "off":
            _listening = self
            if not _hooked:
                sys.addaudithook(_hook)
                _hooked = True
        if self.watch_syncs and self._show is None:
            self._catch_warnings()

    def stop(self) -> None:
        """Stop counting; the numbers stay readable."""
        global _listening
        if _listening is self:
            _listening = None
        if self._show is not None:
            warnings.showwarning = self._show
            self._show = None
            for entry in [f for f in warnings.filters if f[1] is not None and f[1].pattern == _SYNC_TEXT]:
                warnings.filters.remove(entry)  # type: ignore[attr-defined]

    def reset(self) -> None:
        """All counts to zero."""
        self.file_ops = self.syncs = 0
        self.examples.clear()

    def _file_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.scope == "process" or self.section.inside:
            with self._lock:
                self.file_ops += 1
                if len(self.examples) < 8:
                    self.examples.append(f"{event} {arguments[0] if arguments else ''!s:.200}")

    def _watch(self, on: bool) -> None:
        import torch

        torch._C._cuda_set_sync_debug_mode(1 if on else 0)

    def _catch_warnings(self) -> None:
        shown = self._show = warnings.showwarning
        warnings.filterwarnings("always", message=_SYNC_TEXT)

        def showwarning(message: Any, *rest: Any, **more: Any) -> None:
            if str(message).startswith(_SYNC_TEXT) and self.section.inside:
                with self._lock:
                    self.syncs += 1
                return
            shown(message, *rest, **more)

        warnings.showwarning = showwarning
