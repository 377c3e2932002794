"""A check that fails on one rank fails on all, with the message of the one that failed."""

import pytest
import torch.distributed as dist
from ranks import on_ranks

from fla_safe.errors import FlaSafeError
from fla_safe.megatron.consensus import OtherRankError, together


def check_on_rank_one() -> None:
    with together("a step that works"):
        pass

    def look() -> None:
        with together("looking"):
            if dist.get_rank() == 1:
                raise ValueError("three legs")

    with pytest.raises((FlaSafeError, ValueError)) as raised:
        look()
    print(f"{dist.get_rank()} {type(raised.value).__name__}: {raised.value}", flush=True)


def test_one_failing_rank_fails_all() -> None:
    lines = sorted(on_ranks(__file__, "check_on_rank_one", 3))
    assert lines[1] == "1 ValueError: three legs"
    for rank, line in ((0, lines[0]), (2, lines[2])):
        assert line.startswith(f"{rank} {OtherRankError.__name__}: looking failed on rank 1: ValueError: three legs")


def test_without_a_process_group_the_error_is_the_body_s_own() -> None:
    with pytest.raises(ValueError, match="plain"), together("anything"):
        raise ValueError("plain")
