"""The torch kernel, the functional API and the composed mixer against the row-by-row oracle, forward and backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gdn_cases import PACKS, mixer_parameters, pack, rule_inputs, segments_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_safe.gdn import calls, ops, oracle
from fla_safe.gdn.backends import resolve
from fla_safe.gdn.layout import LayoutError, ProjectionLayout
from fla_safe.gdn.mixer import mixer
from fla_safe.gdn.segments import OffsetsError, PackedSegments

KINDS = ["interleaved", "sectioned"]


def with_grads(
    function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], *args: Any, **kwargs: Any
) -> list[torch.Tensor]:
    """The output, then the gradient of every input for one fixed output gradient."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves, *args, **kwargs)
    grad = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    if not out.requires_grad:  # the oracle never touched its inputs: no segment has a row
        return [out, *map(torch.zeros_like, leaves)]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad, allow_unused=True, materialize_grads=True)]


def assert_all_close(actual: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-10) -> None:
    assert len(actual) == len(expected)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(
            a.double(), b.double(), rtol=tolerance, atol=tolerance, msg=lambda m, i=i: f"{i}: {m}"
        )


def with_nan_tails(inputs: list[torch.Tensor], used: int) -> list[torch.Tensor]:
    """Copies of `[1, T, ...]` with NaN in the rows that belong to nobody."""
    return [torch.cat([x[:, :used], torch.full_like(x[:, used:], torch.nan)], 1) for x in inputs]


@pytest.mark.parametrize("name", PACKS)
def test_packed_rule_equals_the_oracle(name: str, poisoned_memory: None) -> None:
    cu_seqlens, total = pack(name)
    inputs = rule_inputs(1, total)
    poisoned = with_nan_tails(inputs, int(cu_seqlens[-1]))
    actual = with_grads(ops.gated_delta_rule, poisoned, segments=PackedSegments.prepare(cu_seqlens, total))
    assert_all_close(actual, with_grads(oracle.gated_delta_rule, inputs, offsets=cu_seqlens.tolist()))


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 130], ids=lambda n: f"T={n}")
def test_batched_rule_equals_the_oracle(rows: int) -> None:
    inputs = rule_inputs(3, rows)
    assert_all_close(with_grads(ops.gated_delta_rule, inputs), with_grads(oracle.gated_delta_rule, inputs))


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 80), min_size=1, max_size=6).filter(any),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 3),
)
def test_rule_for_drawn_lengths_heads_and_dims(lengths: list[int], H: int, r: int, K: int, V: int, tail: int) -> None:
    segments = segments_of(lengths, tail)
    inputs = rule_inputs(1, segments.total, (H, H * r), (K, V), seed=sum(lengths))
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    actual = with_grads(ops.gated_delta_rule, inputs, segments=segments)
    assert_all_close(actual, with_grads(oracle.gated_delta_rule, inputs, offsets=offsets))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_rule_in_training_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    inputs = rule_inputs(1, 200, dtype=dtype)
    actual = with_grads(ops.gated_delta_rule, inputs, segments=segments_of([65, 1, 134]))
    expected = with_grads(oracle.gated_delta_rule, [x.double() for x in inputs], offsets=[0, 65, 66, 200])
    assert [x.dtype for x in actual] == [dtype, *(x.dtype for x in inputs)]
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).norm() < tolerance * b.norm()


def test_rule_survives_decays_that_underflow() -> None:
    q, k, v, g, beta = rule_inputs(1, 128, dtype=torch.float32)
    result = with_grads(ops.gated_delta_rule, [q, k, v, g - 200.0, beta])
    assert all(x.isfinite().all() for x in result)


@pytest.mark.parametrize("name", PACKS)
def test_packed_convolution_equals_the_oracle(name: str) -> None:
    cu_seqlens, total = pack(name)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in [(1, total, 5), (5, 4), (5,)]]
    poisoned = [*with_nan_tails(inputs[:1], int(cu_seqlens[-1])), *inputs[1:]]
    actual = with_grads(ops.causal_conv1d, poisoned, segments=PackedSegments.prepare(cu_seqlens, total))
    expected = with_grads(oracle.causal_conv1d, inputs, cu_seqlens.tolist())
    assert_all_close(actual, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PACKS)
def test_packed_mixer_equals_the_oracle_and_ignores_the_tail(name: str, kind: Any, poisoned_memory: None) -> None:
    layout = ProjectionLayout(kind, 2, 4, 8, 6)
    cu_seqlens, total = pack(name)
    segments = PackedSegments.prepare(cu_seqlens, total)
    parameters = mixer_parameters(layout)
    proj = torch.randn(total, 1, layout.proj_dim, dtype=torch.float64)

    def run(function: Callable[..., torch.Tensor], x: torch.Tensor, **kwargs: Any) -> list[torch.Tensor]:
        def call(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
            named = dict(zip(parameters, values, strict=True))
            return function(x, layout=layout, norm_eps=1e-6, **named, **kwargs)

        return with_grads(call, [x, *parameters.values()])

    expected = run(oracle.mixer, proj, offsets=cu_seqlens.tolist())
    poisoned = proj.clone()
    poisoned[segments.used :] = float("nan")
    actual = run(mixer, poisoned, segments=segments, kernel=resolve("torch", "cpu"))
    assert_all_close(actual, expected)
    assert not actual[0][segments.used :].any()
    assert not actual[1][segments.used :].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"use_qk_l2norm": False, "zero_centered_norm": True}], ids=["usual", "other"])
def test_batched_mixer_equals_the_oracle(kind: Any, options: dict[str, bool]) -> None:
    layout = ProjectionLayout(kind, 1, 3, 4, 5)
    proj = torch.randn(70, 2, layout.proj_dim, dtype=torch.float64) / 4
    common = {"layout": layout, "norm_eps": 1e-5, **mixer_parameters(layout), **options}
    actual = with_grads(mixer, [proj], segments=None, kernel=resolve("torch", "cpu"), **common)
    assert_all_close(actual, with_grads(oracle.mixer, [proj], **common))
    assert actual[0].shape == (70, 2, layout.value_width)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_mixer_equals_its_segments_alone(kind: Any) -> None:
    layout = ProjectionLayout(kind, 2, 4, 8, 6)
    lengths = [1, 63, 64, 65, 2]
    segments = segments_of(lengths)
    common = {"layout": layout, "norm_eps": 1e-6, "kernel": resolve("torch", "cpu"), **mixer_parameters(layout)}
    proj = torch.randn(segments.total, 1, layout.proj_dim, dtype=torch.float64).requires_grad_()
    weight = torch.randn(segments.total, 1, layout.value_width, dtype=torch.float64)
    parameters = [x for x in common.values() if isinstance(x, torch.Tensor)]
    packed = mixer(proj, segments=segments, **common)
    alone = torch.cat([mixer(x, segments=None, **common) for x in proj.split(lengths)])
    assert_all_close([packed], [alone])
    grads = [torch.autograd.grad(out, [proj, *parameters], weight) for out in (packed, alone)]
    assert_all_close(list(grads[0]), list(grads[1]))


def test_mixer_in_bf16_stays_near_the_oracle_and_repeats_bitwise() -> None:
    layout = ProjectionLayout("interleaved", 2, 4, 16, 16)
    parameters = mixer_parameters(layout, dtype=torch.bfloat16)
    proj = torch.randn(130, 1, layout.proj_dim).bfloat16()
    kernel = resolve("torch", "cpu")
    first, second = (
        with_grads(
            mixer, [proj], layout=layout, norm_eps=1e-6, segments=segments_of([65, 65]), kernel=kernel, **parameters
        )
        for _ in range(2)
    )
    exact = {name: x.detach().double() for name, x in parameters.items()}
    expected = with_grads(oracle.mixer, [proj.double()], layout=layout, norm_eps=1e-6, offsets=[0, 65, 130], **exact)
    for a, b, c in zip(first, second, expected, strict=True):
        assert a.dtype == torch.bfloat16
        assert torch.equal(a, b)
        assert (a - c).norm() < 3e-2 * c.norm()


@pytest.mark.parametrize("zero_centered", [False, True])
def test_the_norm_is_rounded_before_the_gate(zero_centered: bool) -> None:
    x, z, weight = torch.randn(50, 8).bfloat16(), torch.randn(50, 8).bfloat16(), torch.randn(8).bfloat16()
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * (weight.float() + zero_centered)
    gate = torch.nn.functional.silu(z.float())
    ours = ops.gated_norm(x, z, weight, zero_centered=zero_centered)
    assert torch.equal(ours, (normed.bfloat16() * gate).bfloat16())
    assert not torch.equal(ours, (normed * gate).bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_sections_point_at_the_views(kind: Any) -> None:
    layout = ProjectionLayout(kind, 3, 6, 5, 4)
    row = torch.arange(layout.proj_dim)
    parts = layout.split(row)
    assert parts.qkv.numel() == layout.conv_dim
    q, k, v = layout.split_conv(parts.qkv)
    found = {"q": q, "k": k, "v": v, "z": parts.z, "b": parts.b.unsqueeze(-1), "a": parts.a.unsqueeze(-1)}
    for name, section in layout.proj_sections.items():
        for head in range(found[name].shape[0]):
            i, j = (head, 0) if name in "qk" else divmod(head, layout.group)
            begin = section.start + i * section.group_stride + j * section.head_stride
            assert found[name][head].tolist() == list(range(begin, begin + section.width)), name
    channels = layout.split_conv(torch.arange(layout.conv_dim))
    for (name, section), part in zip(layout.conv_sections.items(), channels, strict=True):
        i, j = (1, 0) if name in "qk" else (1, 1)
        head = i if name in "qk" else i * layout.group + j
        assert part[head, 0] == section.start + i * section.group_stride + j * section.head_stride


def test_layout_refuses_what_no_model_has() -> None:
    with pytest.raises(LayoutError, match="3 value heads"):
        ProjectionLayout("sectioned", 2, 3, 8, 8)
    with pytest.raises(LayoutError, match="kind 'other'"):
        ProjectionLayout("other", 2, 4, 8, 8)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="width 7"):
        ProjectionLayout("sectioned", 2, 4, 8, 8).split(torch.zeros(7))


def test_segments_of_another_pack_are_refused() -> None:
    inputs = rule_inputs(1, 8)
    with pytest.raises(OffsetsError, match="8 rows"):
        ops.gated_delta_rule(*inputs, segments=segments_of([7]))
    with pytest.raises(OffsetsError, match="batch 2"):
        ops.gated_delta_rule(*rule_inputs(2, 8), segments=segments_of([8]))


def test_calls_are_counted_as_recompute_makes_them() -> None:
    inputs = [x.requires_grad_() for x in rule_inputs(1, 8)]
    before = calls.snapshot()
    out = torch.utils.checkpoint.checkpoint(ops.gated_delta_rule, *inputs, use_reentrant=False)
    assert calls.snapshot().since(before) == calls.Calls(1, 0)
    out.sum().backward()
    assert calls.snapshot().since(before) == calls.Calls(2, 1)
