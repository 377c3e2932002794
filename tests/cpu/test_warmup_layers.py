"""What a warm-up leaves on the layers (the kernel that was named or chosen, the section), and who writes a bundle."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="the megatron floor needs megatron-core")

from fla_safe.gdn.steady import state
from fla_safe.gdn.steady.state import SteadyState
from fla_safe.megatron import warmup
from fla_safe.megatron.layer import SafeForward
from fla_safe.settings import Settings

SECTION = nullcontext()


class Layer(SafeForward, torch.nn.Module):
    layout_kind = "interleaved"

    def __init__(self, variant: str, kernel: str = "auto") -> None:
        torch.nn.Module.__init__(self)
        self.variant, self.kernel_name, self._backend = variant, kernel, None


def steady(faster: dict[str, str], *variants: str, **runtime: Any) -> Any:
    made: Any = SteadyState(SimpleNamespace(section=SECTION, **runtime), variants, faster, 0, {})  # type: ignore[arg-type]
    return made


@pytest.fixture
def reach(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`reach_steady_state` of some layers when the warm-up itself finds `result`."""

    def call(layers: list[Layer], result: SteadyState, settings: Settings | None = None, **kwargs: Any) -> Any:
        monkeypatch.setattr(warmup, "take_over", lambda settings: result.runtime)
        monkeypatch.setattr(warmup, "_variant", lambda layer, *args: layer.variant)
        monkeypatch.setattr(warmup, "warm_up", lambda *args: result)
        workload = warmup.Workload(64, 1, True, torch.bfloat16)
        model = torch.nn.ModuleList(layers)
        device = torch.device("cpu")
        return warmup.reach_steady_state(
            [model], settings or Settings("fla_safe"), workload, print, device=device, **kwargs
        )

    return call


def test_a_named_kernel_reaches_the_layers_that_leave_the_choice(reach: Any) -> None:
    layers = [Layer("a"), Layer("b", "torch")]
    reach(layers, steady({}, "a", "b"), Settings("fla_safe", kernel="flash_qla"))
    assert [layer.kernel_name for layer in layers] == ["flash_qla", "torch"]


def test_every_layer_gets_the_section_and_the_faster_kernel_of_its_variant(reach: Any) -> None:
    layers = [Layer("a"), Layer("b"), Layer("a")]
    reach(layers, steady({"a": "quick"}, "a", "b"))
    assert all(layer.section is SECTION for layer in layers)
    assert [layer._backend for layer in layers] == ["quick", None, "quick"]


@pytest.mark.parametrize("first", [{}, {"a": "quick"}], ids=["kept", "changed"])
@pytest.mark.parametrize("second", [{}, {"a": "quick"}], ids=["would keep", "would change"])
def test_a_second_model_keeps_the_choice_that_was_made_for_the_first(
    reach: Any, first: dict[str, str], second: dict[str, str]
) -> None:
    """However the measurement comes out the second time; what is new is chosen anew."""
    reference = [Layer("a"), Layer("new")]
    both = reach(reference, steady({**second, "new": "quick"}, "a", "new"), earlier=steady(first, "a"))
    assert [layer._backend for layer in reference] == [first.get("a"), "quick"]
    assert both.variants == ("a", "new")
    assert both.faster == {**first, "new": "quick"}


@pytest.mark.parametrize(("rank", "writes"), [(0, False), (1, True), (3, False)])
def test_one_rank_of_an_architecture_writes_the_bundle(
    monkeypatch: pytest.MonkeyPatch, rank: int, writes: bool
) -> None:
    monkeypatch.setattr(state, "_rank", lambda: rank)
    agreed = SimpleNamespace(ranks={"sm90": (1, 3), "sm100": (0,)})
    assert steady({}, agreed=agreed, stamp=SimpleNamespace(arch="sm90")).writes_bundle is writes


@pytest.mark.parametrize(
    ("rounds", "written", "learned"), [(0, 4, False), (1, 4, True), (0, 5, True)], ids=["seeded", "tuned", "compiled"]
)
def test_a_job_that_learned_nothing_has_no_bundle_to_write(rounds: int, written: int, learned: bool) -> None:
    store = SimpleNamespace(store=SimpleNamespace(counts=SimpleNamespace(written=written, seeded=4)))
    assert steady({}, tuning=SimpleNamespace(rounds=rounds), store=store).learned is learned
