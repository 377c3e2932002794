"""A check that fails on one rank fails on all, with the message of the one that failed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
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


def build_on_ranks() -> None:
    """What ms-swift calls to build a model, where one rank's flags or model are wrong."""
    from mcore_bridge.model.register import get_model_meta

    from fla_safe.swift.model import _wrap

    def build(args: Any, config: Any) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("no such layer")
        model: Any = torch.nn.Module()
        model.config = SimpleNamespace(linear_attention_freq=[1, 0], experimental_attention_variant="gated_delta_net")
        return [model]

    meta = get_model_meta("qwen3_5")
    for bundle in (__file__ if dist.get_rank() == 0 else "/not/there", None):
        args = SimpleNamespace(gdn_impl="torch", gdn_bundle=bundle, megatron_model_meta=meta)
        with pytest.raises((FlaSafeError, ValueError)) as raised:
            _wrap(build)(args, None)
        print(f"{dist.get_rank()} {type(raised.value).__name__}: {raised.value}", flush=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="uses the CPU stand-in for TransformerEngine")
def test_flags_and_models_that_are_wrong_on_one_rank_fail_all() -> None:
    lines = [line for line in on_ranks(__file__, "build_on_ranks", 2, FLA_SAFE_CPU="1") if line[:2] in ("0 ", "1 ")]
    mine, others = ([line for line in lines if line.startswith(rank)] for rank in "10")
    assert [line.split(":")[0] for line in mine] == ["1 SettingsError", "1 ValueError"]
    assert [line.split(":")[0] for line in others] == ["0 OtherRankError"] * 2
    assert "choosing the GDN layers failed on rank 1: SettingsError: --gdn_bundle /not/there" in others[0]
    assert "building the model failed on rank 1: ValueError: no such layer" in others[1]
