"""The stand-in's layers against plain PyTorch, on one rank, and what they refuse."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from standin_package import load

from fla_safe.cpu import StandinError

te: Any = load()


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("zero_centered", [False, True], ids=["gamma", "gamma-1"])
def test_rms_norm(zero_centered: bool) -> None:
    norm = te.pytorch.RMSNorm(8, eps=1e-6, params_dtype=torch.float64, zero_centered_gamma=zero_centered)
    assert norm.weight.eq(0 if zero_centered else 1).all()
    with torch.no_grad():
        norm.weight.add_(randn(8))
    x = randn(5, 8)
    expected = F.rms_norm(x, (8,), norm.weight + 1 if zero_centered else norm.weight, 1e-6)
    torch.testing.assert_close(norm(x), expected)


def test_norm_in_bfloat16_is_computed_in_float32() -> None:
    norm = te.pytorch.RMSNorm(64, eps=1e-6, params_dtype=torch.bfloat16)
    x = (randn(3, 64) * 100).bfloat16()
    assert torch.equal(norm(x), F.rms_norm(x.float(), (64,), norm.weight.float(), 1e-6).bfloat16())


def test_layer_norm_linear_with_bias_returns_what_was_asked_for() -> None:
    layer = te.pytorch.LayerNormLinear(
        8, 6, eps=1e-5, return_bias=True, return_layernorm_output=True, params_dtype=torch.float64
    )
    with torch.no_grad():
        layer.bias.add_(1)
        layer.layer_norm_bias.add_(0.5)
    x = randn(4, 2, 8)
    y, bias, normed = layer(x)
    expected = F.layer_norm(x, (8,), layer.layer_norm_weight, layer.layer_norm_bias, 1e-5)
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(y, expected @ layer.weight.T)
    assert bias is layer.bias


@pytest.mark.parametrize("splits", [[2, 0, 3], torch.tensor([2, 0, 3])], ids=["list", "tensor"])
def test_grouped_linear_with_an_expert_without_rows(splits: Any) -> None:
    layer = te.pytorch.GroupedLinear(3, 4, 6, bias=False, params_dtype=torch.float64)
    x = randn(5, 4)
    expected = torch.cat([x[:2] @ layer.weight0.T, x[2:] @ layer.weight2.T])
    torch.testing.assert_close(layer(x, splits), expected)
    layer(x, splits).sum().backward()
    assert layer.weight1.grad.eq(0).all()


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True) -> torch.Tensor:
    """`[L, H, D]`, by the formula."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)


@pytest.mark.parametrize("mask_type", ["padding_causal", "padding"])
@pytest.mark.parametrize(
    "offsets", [[0, 10], [0, 1, 2, 3, 10], [0, 4, 4, 10], [0, 3, 7]], ids=["one", "length-1", "empty", "tail"]
)
def test_packed_attention_equals_its_sequences_alone(offsets: list[int], mask_type: str) -> None:
    q, k, v = randn(10, 4, 8), randn(10, 2, 8), randn(10, 2, 8) + 1
    attention = te.pytorch.DotProductAttention(4, 8, num_gqa_groups=2)
    cu = torch.tensor(offsets, dtype=torch.int32)
    out = attention(q, k, v, qkv_format="thd", cu_seqlens_q=cu, attn_mask_type=mask_type)
    causal = "causal" in mask_type
    for start, end in pairwise(offsets):
        torch.testing.assert_close(out[start:end], plain_attention(q[start:end], k[start:end], v[start:end], causal))
    assert out[offsets[-1] :].eq(0).all()


def test_padding_between_packed_sequences_is_not_attended() -> None:
    q, k, v = randn(8, 2, 8), randn(8, 2, 8), randn(8, 2, 8)
    attention = te.pytorch.DotProductAttention(2, 8)
    out = attention(
        q,
        k,
        v,
        qkv_format="thd",
        cu_seqlens_q=torch.tensor([0, 3, 5]),
        cu_seqlens_q_padded=torch.tensor([0, 4, 8]),
        attn_mask_type="padding",
    )
    torch.testing.assert_close(out[:3], plain_attention(q[:3], k[:3], v[:3], causal=False))
    torch.testing.assert_close(out[4:6], plain_attention(q[4:6], k[4:6], v[4:6], causal=False))
    assert out[3].eq(0).all()
    assert out[6:].eq(0).all()


def test_unpacked_attention_hides_padding_and_ignores_the_mask_when_causal_only() -> None:
    q, k, v = randn(6, 2, 2, 8), randn(6, 2, 2, 8), randn(6, 2, 2, 8)
    hidden = torch.zeros(2, 1, 1, 6, dtype=torch.bool)
    hidden[1, ..., 4:] = True
    attention = te.pytorch.DotProductAttention(2, 8)
    causal = attention(q, k, v, hidden, attn_mask_type="causal")
    padded = attention(q, k, v, hidden, attn_mask_type="padding")
    for b in range(2):
        torch.testing.assert_close(causal[:, b], plain_attention(q[:, b], k[:, b], v[:, b]))
    torch.testing.assert_close(padded[:, 1], plain_attention(q[:, 1], k[:4, 1], v[:4, 1], causal=False).reshape(6, -1))


def test_bshd_is_sbhd_transposed() -> None:
    q, k, v = randn(6, 2, 2, 8), randn(6, 2, 2, 8), randn(6, 2, 2, 8)
    attention = te.pytorch.DotProductAttention(2, 8)
    swapped = attention(*(t.transpose(0, 1) for t in (q, k, v)), qkv_format="bshd")
    torch.testing.assert_close(swapped, attention(q, k, v).transpose(0, 1))


def test_split_along_dim_gives_parts_that_may_be_written() -> None:
    x = randn(2, 6).requires_grad_()
    first, second = te.pytorch.utils.SplitAlongDim.apply(x, 1, [2, 4])
    first.add_(1)
    (first.sum() + 3 * second.sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[1, 1, 3, 3, 3, 3]] * 2


REFUSALS = {
    "fp8_autocast": lambda: te.pytorch.fp8_autocast(enabled=True).__enter__(),
    "fp8_model_init": lambda: te.pytorch.fp8_model_init(enabled=True).__enter__(),
    "recipe": lambda: te.common.recipe.DelayedScaling(),
    "delayed_wgrad": lambda: te.pytorch.Linear(4, 4, delay_wgrad_compute=True),
    "user_buffers": lambda: te.pytorch.LayerNormLinear(4, 4, ub_overlap_ag=True),
    "window": lambda: te.pytorch.DotProductAttention(2, 8, window_size=(4, 0)),
    "softmax_type": lambda: te.pytorch.DotProductAttention(2, 8, softmax_type="learnable"),
    "attention_bias": lambda: te.pytorch.DotProductAttention(2, 8)(*[randn(2, 1, 2, 8)] * 3, core_attention_bias=1),
    "fused_rope": lambda: te.pytorch.attention.rope.apply_rotary_pos_emb(None),
    "fused_mlp": lambda: te.pytorch.LayerNormMLP(),
    "graphs": lambda: te.pytorch.graph.make_graphed_callables(),
    "rng_tracker": lambda: te.pytorch.distributed.CudaRNGStatesTracker(),
}


@pytest.mark.parametrize("what", list(REFUSALS))
def test_what_is_not_represented_is_refused_by_name(what: str) -> None:
    with pytest.raises(StandinError, match="stand-in"):
        REFUSALS[what]()


def test_zigzag_refuses_a_sequence_that_cannot_be_cut() -> None:
    order = te.pytorch.attention.dot_product.global_order
    assert order([0, 8], 2).tolist() == [0, 1, 4, 5, 6, 7, 2, 3]
    with pytest.raises(StandinError, match="6 tokens under context parallelism 2"):
        order([0, 6], 2)
