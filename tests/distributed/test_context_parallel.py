"""Trading tokens for heads and back: order, inverse, gradients, and lengths that cannot be divided."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from fla_safe.megatron.context_parallel import ContextParallelError, to_heads, to_tokens, token_order

OFFSETS = (0, 4, 4, 12, 24)
BATCH, WIDTH = 2, 6


def held_by(rank: int, size: int) -> list[int]:
    """Tokens of a rank by Megatron's rule: chunks `rank` and `2 * size - 1 - rank` of every segment."""
    tokens = []
    for start, end in pairwise(OFFSETS):
        chunk = (end - start) // (2 * size)
        for piece in (rank, 2 * size - 1 - rank):
            tokens += range(start + piece * chunk, start + (piece + 1) * chunk)
    return tokens


def trade() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    order = token_order(OFFSETS, size, torch.device("cpu"))
    whole = torch.arange(OFFSETS[-1] * BATCH * WIDTH, dtype=torch.float64).view(OFFSETS[-1], BATCH, WIDTH)
    mine = whole[held_by(rank, size)].requires_grad_()
    heads = to_heads(mine, order, group)
    width = WIDTH // size
    assert torch.equal(heads, whole[..., rank * width : (rank + 1) * width])
    back = to_tokens(heads, order, group)
    assert torch.equal(back, mine)
    # The gradient of sum(weight * heads), weights of all ranks laid side by side, is those weights in my token order.
    weight = whole.flip(0).sqrt()
    (heads * weight[..., rank * width : (rank + 1) * width]).sum().backward()
    assert torch.equal(mine.grad, weight[held_by(rank, size)])
    print("traded", flush=True)


def test_two_ranks_trade_tokens_for_heads_and_back() -> None:
    assert on_ranks(__file__, "trade", 2) == ["traded"] * 2


@pytest.mark.parametrize("offsets", [(0, 6), (0, 4, 7)], ids=["whole row", "second segment"])
def test_lengths_that_do_not_divide_are_refused(offsets: tuple[int, ...]) -> None:
    with pytest.raises(ContextParallelError, match="multiples of 4"):
        token_order(offsets, 2, torch.device("cpu"))
