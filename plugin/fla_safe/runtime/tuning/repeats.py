"""A config wins only if its results repeat bit for bit.

Why: more than once a config that upstream offered was wrong or irreproducible on some GPU (fla issues 640, 984, 1228).
"""

from collections.abc import Callable, Mapping
from typing import Any

from fla_safe.runtime.tuning.keys import ConfigLike, TuningKey

__all__ = ["REPEATS", "RepeatCheck", "same_bits"]

REPEATS = 20


def same_bits(a: Any, b: Any) -> bool:
    """Whether two tensors have the same shape, dtype and bits (a NaN equals the same NaN, and -0 is not 0)."""
    import torch

    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    left, right = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return bool(torch.equal(left, right))


class RepeatCheck:
    """Judge for tuning inside the job: runs a config again and again on the call's own tensors and restores them.

    Args:
        check: says what is wrong with the arguments after one launch, by name, or None; without it only
            reproducibility is checked.
        repeats: bitwise-equal runs asked after the first.
    """

    def __init__(
        self, check: Callable[[TuningKey, Mapping[str, Any]], str | None] | None = None, *, repeats: int = REPEATS
    ) -> None:
        self.check = check
        self.repeats = repeats

    def __call__(
        self, key: TuningKey, config: ConfigLike, launch: Callable[[], Any], named: Mapping[str, Any]
    ) -> str | None:
        """None when the config may win, else the reason against it."""
        tensors = {n: t for n, t in named.items() if hasattr(t, "clone") and hasattr(t, "copy_") and _is_writable(t)}
        before = {n: t.clone() for n, t in tensors.items()}

        def restore() -> None:
            for name, tensor in tensors.items():
                tensor.copy_(before[name])

        try:
            launch()
            if self.check is not None and (reason := self.check(key, named)):
                return f"wrong: {reason}"
            first = {n: t.clone() for n, t in tensors.items()}
            for i in range(self.repeats):
                restore()
                launch()
                for name, tensor in tensors.items():
                    if not same_bits(first[name], tensor):
                        return f"not reproducible: {name} of repeat {i + 1} has other bits"
            return None
        finally:
            restore()


def _is_writable(tensor: Any) -> bool:
    """An expanded tensor has many elements in one place; no kernel can write it, and `copy_` refuses to."""
    return all(stride != 0 or size == 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
