"""`--gdn_check`: each planted NaN is named exactly, a layer without the check is untouched, its syncs are its own."""

import copy
import gc
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="the megatron floor needs megatron-core")

from checked_layers import HIDDEN, OFFSETS, Model
from fla_safe.diagnosis import call as watching
from fla_safe.diagnosis.finding import Finding, NonFiniteError
from fla_safe.diagnosis.watch import Watch
from fla_safe.gdn.mixer import mixer
from fla_safe.megatron.layer import SafeForward
from fla_safe.megatron.watching import watch_layers
from fla_safe.runtime.audit import Audit

TAIL = 2
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch("every", rank=3, where="rank 3", directory=tmp_path)


def draw(seed: int = 0) -> torch.Tensor:
    return torch.randn(OFFSETS[-1] + TAIL, 1, HIDDEN, generator=torch.Generator().manual_seed(seed))


def packed() -> Any:
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    return SimpleNamespace(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets)


def found_in(model: Model, x: torch.Tensor, params: Any, grad: torch.Tensor | None = None) -> Finding:
    """What the check finds in one forward and backward pass."""
    finding, text = None, ""
    try:
        out = model(x.clone().requires_grad_(), params)
        out.backward(torch.ones_like(out) if grad is None else grad)
    except NonFiniteError as error:
        finding, text = error.finding, str(error)
    # PyTorch leaves a checkpoint's saved-tensor hooks in place until the frames of the exception are collected.
    if model.recompute == "other":
        gc.collect()
    assert finding is not None
    assert finding.tensor in text
    return finding


def broken_kernel(layer: Any, where: str) -> None:
    """A chunk kernel that spoils one value of its output or of the gradient of k."""
    backend = layer.backend_for(torch.device("cpu"), torch.float32)

    def rule(q: Any, k: Any, *rest: Any) -> torch.Tensor:
        if where == "gradient" and k.requires_grad:
            k = k.view_as(k)
            k.register_hook(lambda grad: grad.index_put((torch.tensor(0), torch.tensor(69)), torch.tensor(NAN)))
        o = backend.gated_delta_rule(q, k, *rest)
        return o.index_put(tuple(torch.tensor([[0], [71], [2]])), torch.tensor(INF)) if where == "output" else o

    layer._backend = replace(backend, gated_delta_rule=rule)


def gate_at_zero(layer: Any) -> None:
    """The gate's gradient overflows where the gate, and so the gradient of what it gates, is zero."""
    z = layer._mixer_layout.proj_sections["z"]
    for group in range(layer._mixer_layout.key_heads):
        put(layer.in_proj.weight, slice(z.start + group * z.group_stride, z.start + group * z.group_stride + 10), 0.0)
    put(layer.out_norm.weight, slice(None), 1e38)
    put(layer.out_proj.weight, slice(None), 20.0)


def broken_projection(layer: Any) -> None:
    """An input projection that spoils one value of its input's gradient."""

    def spoil(module: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        x = args[0].view_as(args[0])
        if x.requires_grad:
            x.register_hook(lambda grad: grad.index_put(tuple(torch.tensor([[72], [0], [4]])), torch.tensor(NAN)))
        return (x,)

    layer.in_proj.register_forward_pre_hook(spoil)


def put(parameter: torch.Tensor, index: Any, value: float = NAN) -> None:
    with torch.no_grad():
        parameter[index] = value


# What is spoilt in layer 2 -> stage, role, tensor, segment, part, head, words of the cause.
PLANTS: dict[str, tuple[Callable[[Any], None], tuple[Any, ...]]] = {
    "conv weight": (
        lambda layer: put(layer.conv1d.weight, (7, 0, 2)),
        ("parameters", "input", "conv_weight", None, "v", 0, "optimizer step"),
    ),
    "decay": (lambda layer: put(layer.A_log, 3), ("parameters", "input", "A_log", None, None, 3, "checkpoint")),
    "norm weight": (
        lambda layer: put(layer.out_norm.weight, 1, INF),
        ("parameters", "input", "norm_weight", None, None, None, "checkpoint"),
    ),
    "input projection's weight": (
        lambda layer: put(layer.in_proj.weight, (29, 0)),
        ("input projection", "input", "a in the projection", 0, "a", 1, "in_proj.weight"),
    ),
    "output projection's weight": (
        lambda layer: put(layer.out_proj.weight, (2, 0)),
        ("output projection", "input", "layer output", 0, None, None, "out_proj.weight"),
    ),
    "input projection overflows": (
        lambda layer: put(layer.in_proj.weight, 0, 3e38),
        ("input projection", "output", "q in the projection", 0, "q", 0, "its weights are finite"),
    ),
    "gates overflow": (
        lambda layer: put(layer.A_log, 2, 200.0),
        ("convolution, l2norm and gates", "output", "g", 0, None, 2, "what went into it is finite"),
    ),
    "kernel's output": (
        lambda layer: broken_kernel(layer, "output"),
        ("chunk kernel", "output", "o", 3, None, 2, "what went into it is finite"),
    ),
    "kernel's gradient": (
        lambda layer: broken_kernel(layer, "gradient"),
        ("chunk kernel", "output", "gradient of k", 2, "k", 0, "what went into it is finite"),
    ),
    "gate's gradient": (
        gate_at_zero,
        ("gated norm", "output", "gradient of z in the projection", 0, "z", 0, "what went into it is finite"),
    ),
    "input projection's gradient": (
        broken_projection,
        ("input projection", "output", "gradient of hidden_states", 3, None, None, "its weights are finite"),
    ),
    "norm overflows": (
        lambda layer: put(layer.out_norm.weight, slice(None), 3e38),
        ("gated norm", "output", "mixer output", 0, None, 1, "what went into it is finite"),
    ),
}


@pytest.mark.parametrize("recompute", ["none", "reentrant", "other"], ids=lambda kind: f"recompute-{kind}")
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_named(plant: str, recompute: str, watch: Watch) -> None:
    model = Model(recompute=recompute)
    spoil, expected = PLANTS[plant]
    spoil(model.layers[1].self_attention)
    watch_layers([model], watch)
    found = found_in(model, draw(), packed())
    place = found.place
    assert (found.number, found.layer, found.rank) == (2, "layers.1.self_attention", 3)
    assert (found.stage, found.role, found.tensor, place.segment, place.part, place.head) == expected[:-1]
    assert expected[-1] in found.cause
    assert found.direction == ("backward" if "gradient" in found.tensor else "forward")
    assert found.nans + found.infinities > 0


@pytest.mark.parametrize("recompute", ["none", "reentrant"], ids=lambda kind: f"recompute-{kind}")
def test_what_comes_from_outside_is_not_the_layers_fault(recompute: str, watch: Watch) -> None:
    model = Model(recompute=recompute)
    watch_layers([model], watch)
    x = draw()
    x[71, 0, 4] = NAN
    found = found_in(model, x, packed())
    assert (found.number, found.stage, found.role, found.tensor) == (1, "layer input", "input", "hidden_states")
    assert (found.place.row, found.place.segment, found.nans) == (71, 3, 1)
    assert "embedding" in found.cause

    grad = torch.ones_like(x)
    grad[10] = INF
    found = found_in(model, draw(), packed(), grad)
    assert (found.number, found.stage, found.role) == (3, "layer output", "input")
    assert (found.tensor, found.place.segment, found.direction) == ("gradient of layer output", 2, "backward")
    assert found.infinities == HIDDEN
    assert "MLP" in found.cause

    put(model.layers[0].mlp.gain, 0)
    found = found_in(model, draw(), packed())
    assert (found.number, found.stage) == (2, "layer input")
    assert "layer 1 (GatedDeltaNet and MLP)" in found.cause


@pytest.mark.parametrize("layout", ["interleaved", "sectioned"])
def test_a_batch_names_its_row_and_part(layout: str, watch: Watch) -> None:
    model = Model(1, layout)
    watch_layers([model], watch)
    layer = model.layers[0].self_attention
    column = layer._mixer_layout.proj_sections["z"].start + 5  # z of value head 1, in both layouts
    put(layer.in_proj.weight, (column, 0), 2e38)
    x = torch.zeros(4, 3, HIDDEN)
    x[2, 1, 0] = 100.0
    found = found_in(model, x, None)
    assert (found.tensor, found.place.row, found.place.batch) == ("z in the projection", 2, 1)
    assert (found.place.head, found.place.segment, found.infinities) == (1, None, 1)


def test_rows_beyond_the_last_offset_may_hold_anything(watch: Watch) -> None:
    results = []
    for tail in (0.0, NAN):
        model = Model(1)
        watch_layers([model], watch)
        layer, x, grad = model.layers[0].self_attention, draw(), torch.ones(OFFSETS[-1] + TAIL, 1, HIDDEN)
        x[OFFSETS[-1] :], grad[OFFSETS[-1] :] = tail, tail
        layer.in_proj.weight.requires_grad_(False)
        layer.out_proj.weight.requires_grad_(False)
        x.requires_grad_()
        layer(x, None, packed_seq_params=packed())[0].backward(grad)
        results.append([x.grad[: OFFSETS[-1]], layer.conv1d.weight.grad, layer.A_log.grad])  # type: ignore[index]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_rank_that_holds_the_end_of_the_sequence(watch: Watch) -> None:
    model, others = Model(1), draw(1)[:70]
    layer = model.layers[0].self_attention
    # As under sequence parallelism: the projections gather the other ranks' rows, and give back this rank's.
    layer.in_proj.register_forward_pre_hook(lambda module, args: (torch.cat([others, args[0]]),))
    layer.out_proj.register_forward_hook(lambda module, args, out: (out[0][70:], None))
    watch_layers([model], watch)
    x = draw()[70:]
    x[OFFSETS[-1] - 70 :] = NAN
    mine = x.clone().requires_grad_()
    layer(mine, None, packed_seq_params=packed())[0].backward(torch.ones_like(x))
    assert mine.grad is not None
    assert mine.grad[OFFSETS[-1] - 70 :].isnan().all(), "which is no fault of the layer"
    x[1, 0, 2] = NAN
    with pytest.raises(NonFiniteError) as caught:
        layer(x, None, packed_seq_params=packed())
    found = caught.value.finding
    assert found is not None
    assert (found.stage, found.place.row, found.place.segment) == ("layer input", 1, None)


@pytest.mark.parametrize("recompute", ["none", "reentrant", "other"], ids=lambda kind: f"recompute-{kind}")
def test_the_check_changes_no_bit(recompute: str, watch: Watch) -> None:
    results = []
    for check in (False, True):
        model = Model(recompute=recompute)
        if check:
            assert watch_layers([model], watch) == 3
        x = draw().requires_grad_()
        out = model(x, packed())
        out.square().sum().backward()
        results.append([out, x.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("recompute", ["none", "reentrant", "other"], ids=lambda kind: f"recompute-{kind}")
def test_micro_batches_are_counted_without_their_recomputation(recompute: str, watch: Watch) -> None:
    model = Model(2, recompute=recompute)
    watch_layers([model], watch)
    for step in (1, 2):
        watch.step_begins(step)
        # As a pipeline does: one forward pass ahead.
        ahead = model(draw(0).requires_grad_(), packed())
        for seed in (1, 2, 3):
            behind, ahead = ahead, model(draw(seed).requires_grad_(), packed())
            grad = torch.ones_like(behind)
            grad[5, 0, 0] = NAN if (step, seed) == (2, 3) else 1
            if (step, seed) != (2, 3):
                behind.backward(grad)
        if step == 1:
            ahead.sum().backward()
            watch.step_ends()
    with pytest.raises(NonFiniteError) as caught:
        behind.backward(grad)
    finding = caught.value.finding
    assert finding is not None
    assert (finding.step, finding.micro_batch, finding.direction) == (2, 2, "backward")


def untouched(layer: Any) -> bool:
    return (
        layer.forward.__func__ is SafeForward.forward
        and layer.run_mixer is mixer
        and not {"forward", "run_mixer"} & set(vars(layer))
        and not layer._forward_pre_hooks
        and not layer._forward_hooks
    )


def test_first_ends_with_the_first_step_and_leaves_the_layers_as_they_were(watch: Watch) -> None:
    model = Model(2)
    layers = [block.self_attention for block in model.layers]
    assert all(map(untouched, layers))
    watch.mode = "first"
    watch_layers([model], watch)
    watch.step_begins(1)
    assert not any(map(untouched, layers))
    duplicate = copy.deepcopy(model)
    assert duplicate.layers[0].self_attention.forward.__self__.layer is duplicate.layers[0].self_attention
    watch.step_ends()
    assert all(map(untouched, layers))
    put(layers[0].A_log, 0)
    put(duplicate.layers[0].self_attention.A_log, 0)
    for copied in (model, duplicate):
        assert copied(draw(), packed()).isnan().any()
        assert all(untouched(block.self_attention) for block in copied.layers)


@pytest.fixture
def audit() -> Iterator[Audit]:
    audit = Audit("sections")
    audit.start()
    yield audit
    audit.stop()


def test_syncs_and_files_of_the_check_do_not_count(
    audit: Audit, watch: Watch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = Model(1)
    layer = model.layers[0].self_attention
    layer.section = audit.section
    asked = []

    def ask(tensors: Any) -> list[bool]:
        asked.append(audit.section.inside)
        return all_finite(tensors)

    all_finite = watching.all_finite
    monkeypatch.setattr(watching, "all_finite", ask)
    seen = []
    layer.run_mixer = lambda *args, **kwargs: (seen.append(audit.section.inside), mixer(*args, **kwargs))[1]
    watch_layers([model], watch)
    model(draw().requires_grad_(), packed()).sum().backward()
    assert seen == [True], "the mixer itself stays in the section"
    assert len(asked) > 8
    assert not any(asked)
    put(layer.A_log, 0)
    found_in(model, draw(), packed())
    assert list(tmp_path.iterdir())
    assert audit.file_ops == 0, audit.examples
    assert not audit.section.inside


def test_the_command_that_the_error_names_can_be_pasted(watch: Watch, tmp_path: Path) -> None:
    watch.directory = tmp_path / "my run"
    model = Model(1)
    put(model.layers[0].self_attention.A_log, 0)
    watch_layers([model], watch)
    with pytest.raises(NonFiniteError) as caught:
        model(draw(), packed())
    assert shlex.split(caught.value.remedy)[:3] == ["fla-safe", "replay", str(caught.value.file)]


def test_a_file_that_cannot_be_written_does_not_hide_the_finding(watch: Watch, tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("")
    watch.directory = tmp_path / "occupied"
    model = Model(1)
    put(model.layers[0].self_attention.A_log, 0)
    watch_layers([model], watch)
    with pytest.raises(NonFiniteError, match=r"A_log is not finite.*could not be written") as caught:
        model(draw(), packed())
    assert caught.value.file is None
