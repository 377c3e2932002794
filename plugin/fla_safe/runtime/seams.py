"""Attributes of other libraries' classes that are exchanged while the runtime is active, and put back after it."""

import logging
from collections.abc import Callable
from typing import Any

__all__ = ["Seams"]

_ABSENT = object()
_log = logging.getLogger(__name__)


class Seams:
    """Everything that was changed, in order; `restore` takes it back in reverse."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, value: Any) -> Any:
        """Set `owner.name` and return what stood there before (None when the attribute was not the owner's own)."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)

        def undo() -> None:
            if vars(owner).get(name, _ABSENT) is not value:
                # Somebody wrapped ours in the meantime; removing theirs would break them, and ours passes calls on.
                _log.warning("%s.%s was replaced by another package and stays as it is", owner, name)
            elif before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undo.append(undo)
        return None if before is _ABSENT else before

    def on_restore(self, action: Callable[[], None]) -> None:
        """Also run `action` when everything is put back."""
        self._undo.append(action)

    def restore(self) -> None:
        """Put everything back. A second call does nothing."""
        while self._undo:
            self._undo.pop()()
