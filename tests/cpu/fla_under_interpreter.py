"""The tests of `test_gdn_fla.py`, run by it in one process for one FLA version."""

import os
import sys
import weakref
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gdn_cases import mixer_parameters, rule_inputs, segments_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gdn_torch import with_grads
from torch.utils.checkpoint import checkpoint

from fla_safe.cpu import interpreter
from fla_safe.gdn import calls, ops, oracle
from fla_safe.gdn.backends import resolve
from fla_safe.gdn.chunk import fla as fla_chunk
from fla_safe.gdn.chunk import fla_parts
from fla_safe.gdn.chunk.function import differentiable
from fla_safe.gdn.chunk.rebind import unwrap
from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.mixer import composed_mixer
from fla_safe.gdn.segments import PackedSegments

interpreter.activate()
KERNEL = resolve("fla", "cpu")


def assert_near_the_oracle(
    actual: list[torch.Tensor], inputs: list[torch.Tensor], tolerance: float, **where: Any
) -> None:
    expected = with_grads(oracle.gated_delta_rule, [x.double() for x in inputs], **where)
    for name, a, b in zip(["o", "dq", "dk", "dv", "dg", "dbeta"], actual, expected, strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm() + 1e-9, name


def test_this_is_the_version_asked_for() -> None:
    assert KERNEL.version == os.environ["FLA_SAFE_TEST_FLA_VERSION"]
    assert fla_chunk.load().native_gva == (KERNEL.version != "0.4.2")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
def test_pack_with_gva_and_a_poisoned_tail(dtype: torch.dtype, tolerance: float, poisoned_memory: None) -> None:
    segments = segments_of([1, 63, 0, 65, 2], tail=3)
    inputs = rule_inputs(1, segments.total, (1, 2), (16, 16), dtype=dtype)
    poisoned = [x.index_fill(1, torch.arange(segments.used, segments.total), float("nan")) for x in inputs]
    before = calls.snapshot()
    actual = with_grads(ops.gated_delta_rule, poisoned, segments=segments, kernel=KERNEL)
    assert calls.snapshot().since(before) == calls.Calls(1, 1)
    assert [x.dtype for x in actual] == [dtype, *(x.dtype for x in inputs)]
    assert all(not x[:, segments.used :].any() for x in actual)
    assert_near_the_oracle(actual, inputs, tolerance, offsets=[0, 1, 64, 129, 131])


def test_batch_without_packing() -> None:
    inputs = rule_inputs(2, 66, (1, 1), (16, 16), dtype=torch.float32)
    actual = with_grads(ops.gated_delta_rule, inputs, kernel=KERNEL)
    assert_near_the_oracle(actual, inputs, 1e-5)


@settings(max_examples=3)
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=3).filter(any),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(2, 70),
    st.integers(2, 40),
)
def test_drawn_lengths_heads_and_dims(lengths: list[int], H: int, r: int, K: int, V: int) -> None:
    segments = segments_of(lengths)
    inputs = rule_inputs(1, segments.total, (H, H * r), (K, V), dtype=torch.float32, seed=K)
    actual = with_grads(ops.gated_delta_rule, inputs, segments=segments, kernel=KERNEL)
    assert_near_the_oracle(actual, inputs, 1e-5, offsets=segments.offsets_host)


def test_steps_and_whole_functions_agree() -> None:
    kernel = fla_chunk.load()
    assert (kernel.parts is not None) == (kernel.version in ("0.5.1", "0.5.2", "0.6.0"))
    segments = segments_of([1, 64, 5])
    inputs = rule_inputs(1, segments.total, (1, 2), (16, 16), dtype=torch.float32)
    steps = with_grads(ops.gated_delta_rule, inputs, segments=segments, kernel=KERNEL)
    without_steps = replace(KERNEL, gated_delta_rule=differentiable(replace(kernel, parts=None)))
    whole = with_grads(ops.gated_delta_rule, inputs, segments=segments, kernel=without_steps)
    for a, b in zip(steps, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_recomputation_leaves_the_states_to_the_backward_pass(reentrant: bool) -> None:
    kernel = fla_chunk.load()
    if kernel.parts is None:
        return  # 0.4.2
    runs: list[str] = []

    def counted(name: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            runs.append(name)
            return getattr(kernel.parts, name)(*args, **kwargs)

        return run

    parts = replace(kernel.parts, **{name: counted(name) for name in ("intra", "states", "representation")})
    backend = replace(KERNEL, gated_delta_rule=differentiable(replace(kernel, parts=parts)))
    inputs = [x.requires_grad_() for x in rule_inputs(1, 66, (1, 2), (16, 16), dtype=torch.float32)]
    rule = partial(ops.gated_delta_rule, segments=segments_of([65, 1]), kernel=backend)
    plain = torch.autograd.grad(rule(*inputs).sum(), inputs)
    assert runs == ["intra", "states", "representation", "states"]
    runs.clear()
    checkpoint(rule, *inputs, use_reentrant=reentrant).sum().backward()
    assert runs == ["intra", "states"] * 2
    for x, grad in zip(inputs, plain, strict=True):
        torch.testing.assert_close(x.grad, grad, rtol=0, atol=0)


def test_intermediates_die_with_their_last_reader() -> None:
    kernel = fla_chunk.load()
    if kernel.parts is None:
        return  # 0.4.2
    made: dict[str, weakref.ref[torch.Tensor]] = {}
    alive: dict[str, set[str]] = {}

    def watched(name: str, results: tuple[str, ...]) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            alive[name] = {of for of, tensor in made.items() if tensor() is not None}
            returned = getattr(kernel.parts, name)(*args, **kwargs)
            pairs = zip(results, returned if isinstance(returned, tuple) else (returned,), strict=False)
            made.update({of: weakref.ref(x) for of, x in pairs if x is not None})
            return returned

        return run

    steps = {
        "representation": ("w", "u"),
        "states": ("h", "new_v"),
        "grad_values": ("dv",),
        "grad_states": ("dh", "", "du"),
        "grad_inputs": ("dq", "dk", "dw"),
        "grad_representation": ("dk2",),
    }
    parts = replace(kernel.parts, **{name: watched(name, results) for name, results in steps.items()})
    backend = replace(KERNEL, gated_delta_rule=differentiable(replace(kernel, parts=parts)))
    inputs = [x.requires_grad_() for x in rule_inputs(1, 66, (1, 2), (16, 16), dtype=torch.float32)]
    out = ops.gated_delta_rule(*inputs, kernel=backend)
    made.clear()
    torch.autograd.grad(out.sum(), inputs)
    assert alive["grad_states"] == {"w", "h", "new_v", "dv"}
    assert alive["grad_inputs"] == {"h", "new_v", "dh", "du"}
    assert alive["grad_representation"] == {"du", "dq", "dk", "dw"}


def test_an_unknown_structure_is_refused() -> None:
    if fla_chunk.load().parts is None:
        return  # 0.4.2
    from fla.ops.gated_delta_rule import chunk

    def changed(**names: Any) -> SimpleNamespace:
        return SimpleNamespace(**{**vars(chunk), **names})

    assert fla_parts.load_parts(chunk, {}) is not None
    assert fla_parts.load_parts(changed(prepare_wy_repr_bwd=chunk.recompute_w_u_fwd), {}) is None
    assert fla_parts.load_parts(changed(chunk_gated_delta_rule_bwd=chunk.chunk_gated_delta_rule_fwd), {}) is None
    assert fla_parts.load_parts(changed(chunk_gated_delta_rule_fwd=None), {}) is None
    assert fla_parts.without(unwrap(chunk.chunk_bwd_dqkwg), ("dg = dg.sum(1)",)) is None


def test_mixer_around_the_kernel() -> None:
    layout = ProjectionLayout("interleaved", 1, 2, 16, 16)
    proj = torch.randn(70, 1, layout.proj_dim)
    common = {"layout": layout, "norm_eps": 1e-6}
    actual = with_grads(
        composed_mixer,
        [proj],
        segments=segments_of([3, 65], tail=2),
        kernel=KERNEL,
        **common,
        **mixer_parameters(layout, dtype=torch.float32),
    )
    expected = with_grads(oracle.mixer, [proj.double()], offsets=[0, 3, 68], **common, **mixer_parameters(layout))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_overwritten_offsets_give_the_new_result() -> None:
    inputs = rule_inputs(1, 20, (1, 1), (16, 16), dtype=torch.float32)
    buffer = torch.tensor([0, 5, 20], dtype=torch.int32)
    for middle in (5, 12):
        buffer[1] = middle
        out = ops.gated_delta_rule(*inputs, segments=PackedSegments.prepare(buffer, 20), kernel=KERNEL)
        expected = oracle.gated_delta_rule(*(x.double() for x in inputs), offsets=[0, middle, 20])
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_calls_search_no_module_and_open_no_file() -> None:
    """FLA 0.5.0 and 0.5.1 look for optional backends on the file system on every call of their own functions."""
    seen: list[str] = []

    class Watcher:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            seen.append(f"search for {name}")
            return None

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if watching and event in ("open", "os.listdir", "os.scandir", "import"):
            seen.append(f"{event} {args[0]}")

    watching = False
    sys.addaudithook(audit)
    inputs = rule_inputs(1, 20, (1, 2), (16, 16), dtype=torch.float32)
    segments = segments_of([5, 15])
    with_grads(ops.gated_delta_rule, inputs, segments=segments, kernel=KERNEL)
    sys.meta_path.insert(0, Watcher())  # type: ignore[arg-type]
    watching = True
    try:
        with_grads(ops.gated_delta_rule, inputs, segments=segments, kernel=KERNEL)
    finally:
        watching = False
        del sys.meta_path[0]
    assert not seen
