"""What the layer refuses by name when it is built and when called; which kernel it runs, and under which guard."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="the megatron floor needs megatron-core")

from fla_safe.gdn.backends import BackendError
from fla_safe.megatron.layer import SafeForward, UnsupportedLayerError

SIZES = {"tp_size": 1, "cp_size": 1, "num_key_heads": 2, "num_value_heads": 4, "activation": "silu"}
CONFIG = {"normalization": "RMSNorm", "sequence_parallel": False, "deterministic_mode": False}


class Base:
    """Of a Megatron layer what `SafeForward` reads when it is built."""

    key_head_dim = value_head_dim = 8

    def __init__(self, sizes: dict[str, Any], config: dict[str, Any]) -> None:
        vars(self).update(SIZES | sizes)
        self.config = SimpleNamespace(**(CONFIG | config))


class Layer(SafeForward, Base):  # type: ignore[misc]
    layout_kind = "interleaved"


@pytest.mark.parametrize(
    ("sizes", "config", "message"),
    [
        pytest.param({"activation": "gelu"}, {}, "activation 'gelu'", id="activation"),
        pytest.param({}, {"normalization": "LayerNorm"}, "normalization 'LayerNorm'", id="normalization"),
        pytest.param({"tp_size": 4}, {}, "2 key and 4 value heads over TP 4 x CP 1", id="heads"),
        pytest.param({"cp_size": 2}, {"cp_partition_mode": "contiguous"}, "cp_partition_mode", id="CP partition"),
        pytest.param({}, {"hybrid_context_parallel": True}, "hybrid_context_parallel", id="CP group a micro-batch"),
    ],
)
def test_a_configuration_that_the_layer_does_not_do(
    sizes: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    Layer({}, {})
    with pytest.raises(UnsupportedLayerError, match=message):
        Layer(sizes, config)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        pytest.param((), {"inference_context": object()}, "an inference context", id="inference context"),
        pytest.param((), {"inference_params": object()}, "an inference context", id="inference parameters"),
        pytest.param((None, object()), {}, "4 arguments by position", id="a pack by position"),
    ],
)
def test_a_call_that_the_layer_does_not_do(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedLayerError, match=message):
        Layer({}, {}).forward(torch.zeros(4, 1, 8), None, *args, **kwargs)


def test_deterministic_mode_means_the_torch_kernel_whatever_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fla_safe.gdn.backends.supports", lambda name, *args, **kwargs: (name == "torch", "not here"))
    layer = Layer({}, {"deterministic_mode": True})
    layer.kernel_name = "fla"
    assert layer.backend_for(torch.device("cpu"), torch.float32).name == "torch"
    layer.config.deterministic_mode = False
    with pytest.raises(BackendError, match="not here"):
        layer.backend_for(torch.device("cpu"), torch.float32)


def test_the_mixer_and_nothing_else_runs_in_the_guarded_section() -> None:
    seen: list[str] = []

    @contextmanager
    def section() -> Iterator[None]:
        seen.append("enter")
        yield
        seen.append("leave")

    def stage(name: str) -> Any:
        return lambda x, **kwargs: seen.append(name) or (x, None)

    layer = Layer({}, {})
    layer.conv1d = layer.out_norm = torch.nn.Conv1d(1, 1, 1)
    vars(layer.out_norm).update(eps=1e-6, zero_centered_gamma=False)
    layer.A_log = layer.dt_bias = torch.zeros(4)
    layer.use_qk_l2norm = True
    layer.section = section()
    layer.in_proj, layer.run_mixer, layer.out_proj = stage("in"), stage("mix"), stage("out")
    layer.forward(torch.zeros(4, 1, 8))
    assert seen == ["in", "enter", "mix", "leave", "out"]
