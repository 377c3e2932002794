"""Process-wide: how often gated delta rule kernels were called, and the section that their backward passes run in."""

from contextlib import AbstractContextManager, nullcontext
from typing import Final, NamedTuple

__all__ = ["Calls", "count_backward", "count_forward", "guard", "guarded", "reset", "snapshot"]


class Calls(NamedTuple):
    """How often a kernel ran; with full recompute a layer and micro-batch counts two forwards and one backward."""

    forward: int = 0
    backward: int = 0

    @property
    def total(self) -> int:
        """Forward and backward calls together."""
        return self.forward + self.backward

    def since(self, earlier: "Calls") -> "Calls":
        """The calls made after an earlier snapshot."""
        return Calls(self.forward - earlier.forward, self.backward - earlier.backward)


_counts: Final = [0, 0]
_section: AbstractContextManager[None] = nullcontext()


def count_forward() -> None:
    """Called by a kernel's autograd function, once a forward pass."""
    _counts[0] += 1


def count_backward() -> None:
    """Called by a kernel's autograd function, once a backward pass."""
    _counts[1] += 1


def guard(section: AbstractContextManager[None]) -> None:
    """Run backward passes in `section` from now on: autograd calls them where no layer could open one."""
    global _section
    _section = section


def guarded() -> AbstractContextManager[None]:
    """The section of a backward pass; it can be entered by many threads."""
    return _section


def snapshot() -> Calls:
    """The calls made so far."""
    return Calls(*_counts)


def reset() -> None:
    """Start again from zero."""
    _counts[:] = 0, 0
