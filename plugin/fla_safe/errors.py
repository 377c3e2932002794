"""The base of every error this package raises: what was seen, what was expected, what to do."""

__all__ = ["FlaSafeError", "MissingDependencyError"]


class FlaSafeError(Exception):
    """Base class. Every message has three parts, so that a reader of a log can act without reading code.

    Args:
        seen: what was found, with its value.
        expected: what would have been right.
        remedy: the command, flag or change that mends it.
    """

    def __init__(self, seen: str, expected: str, remedy: str) -> None:
        super().__init__(f"{seen.rstrip('.')}. Expected: {expected.rstrip('.')}. To do: {remedy.rstrip('.')}.")
        self.seen = seen
        self.expected = expected
        self.remedy = remedy

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.seen, self.expected, self.remedy)


class MissingDependencyError(FlaSafeError, ImportError):
    """A floor needs a package that is not installed or does not import."""
