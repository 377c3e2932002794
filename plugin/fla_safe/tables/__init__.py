"""Decision tables that were measured and are shipped: one JSON file for each GPU, FLA and Triton."""

from pathlib import Path

__all__ = ["shipped_tables"]


def shipped_tables() -> list[Path]:
    """The files, sorted by name."""
    return sorted(Path(__file__).parent.glob("*.json"))
