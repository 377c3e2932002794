"""Process-wide counters of gated delta rule kernel calls; the report and the tests read them."""

from typing import Final, NamedTuple

__all__ = ["Calls", "count_backward", "count_forward", "reset", "snapshot"]


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


def count_forward() -> None:
    """Called by a kernel's autograd function, once a forward pass."""
    _counts[0] += 1


def count_backward() -> None:
    """Called by a kernel's autograd function, once a backward pass."""
    _counts[1] += 1


def snapshot() -> Calls:
    """The calls made so far."""
    return Calls(*_counts)


def reset() -> None:
    """Start again from zero."""
    _counts[:] = 0, 0
