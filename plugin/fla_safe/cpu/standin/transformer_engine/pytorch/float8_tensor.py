"""The FP8 tensor class, for isinstance checks that are always False."""

__all__ = ["Float8Tensor"]


class Float8Tensor:
    """No tensor is one."""
