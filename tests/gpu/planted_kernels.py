"""A real kernel whose configs are, by plan, right and slow, wrong, irreproducible, uncompilable, or deadly."""

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["DEADLY", "IRREPRODUCIBLE", "RIGHT", "UNCOMPILABLE", "WRONG", "double", "planted", "work"]

RIGHT, WRONG, IRREPRODUCIBLE, UNCOMPILABLE, DEADLY = range(5)


@triton.jit
def _double(x, out, tickets, n, width, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """`out = 2 * x`; the right config reads its input many times, so that every other one is faster."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + at, mask=inside)
    tl.static_assert(MODE != 3, "planted: does not compile")
    if MODE == 0:
        for _ in range(200):
            value = tl.load(x + at, mask=inside, volatile=True)
        tl.store(out + at, value * 2, mask=inside)
    elif MODE == 1:
        tl.store(out + at, value * 2 + (at == 5), mask=inside)
    elif MODE == 2:
        # Programs take numbers in the order in which they happen to come.
        ticket = tl.atomic_add(tickets, 1)
        tl.store(out + at, value * 2 + ticket * 1e-6, mask=inside)
    else:
        tl.store(out + at + (1 << 40), value * 2, mask=inside)


def planted(*modes: int) -> Any:
    """The kernel with one config for each mode, in this order."""
    _double.device_caches.clear()  # no test finds the binaries of another
    configs = [triton.Config({"MODE": mode, "BLOCK": 128}, num_warps=4) for mode in modes]
    return triton.autotune(configs=configs, key=["width"])(_double)


def double(kernel: Any, x: torch.Tensor, width: int = 1) -> torch.Tensor:
    """`2 * x`, if the config in use is right."""
    out, tickets = torch.empty_like(x), torch.zeros(1, device=x.device, dtype=torch.int32)
    kernel[(triton.cdiv(x.numel(), 128),)](x, out, tickets, x.numel(), width)
    return out


def work(modes: list[int], device: int) -> Any:
    """Factory for a tuning child."""
    from fla_safe.runtime.tuning.tuning_child import Work

    torch.cuda.set_device(device)
    kernel, x = planted(*modes), torch.randn(1 << 16, device="cuda")
    return Work([lambda: double(kernel, x)])
