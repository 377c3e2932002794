"""The golden check passes right mixers and names the first output that is wrong, irreproducible or raises."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fla_safe.gdn.backends import Backend, resolve
from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.steady.golden import REPEATS, GoldenCheck
from fla_safe.gdn.variant import MixerVariant


def variant(dtype: torch.dtype = torch.float32, backend: Backend | None = None, **options: Any) -> MixerVariant:
    layout = ProjectionLayout("interleaved", 1, 2, 8, 6)
    f32 = torch.float32
    given = {"conv_width": 4, "conv_bias": True, "parameter_dtypes": (dtype, f32, f32, dtype), "norm_eps": 1e-6}
    return MixerVariant(layout, backend or resolve("torch", "cpu"), dtype, **{**given, **options})


class _Wrong(torch.autograd.Function):
    """Passes a tensor on, and its gradient through `spoil`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, spoil: Any) -> torch.Tensor:
        ctx.spoil = spoil
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.spoil(grad), None


def planted(forward: Any = None, g: Any = None, key: Any = None) -> MixerVariant:
    """The torch kernel with something done to its output, or to the gradient of its gate or keys."""
    stock = resolve("torch", "cpu")

    def rule(q: Any, k: Any, v: Any, gate: Any, beta: Any, scale: float, segments: Any) -> torch.Tensor:
        gate = _Wrong.apply(gate, g) if g else gate
        k = _Wrong.apply(k, key) if key else k
        out = stock.gated_delta_rule(q, k, v, gate, beta, scale, segments)
        # The reference runs in float64 through the stock kernel, so only the kernel under test is spoiled.
        return forward(out) if forward else out

    return variant(backend=replace(stock, name="planted", gated_delta_rule=rule))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "batch of 2"])
def test_a_right_mixer_passes(dtype: torch.dtype, packed: bool) -> None:
    verdict = GoldenCheck(variant(dtype), "cpu", packed=packed, batch=2, repeats=1)()
    assert verdict, verdict
    assert verdict.errors.keys() == {"output"} | {
        f"gradient of {name}" for name in ("proj", "conv_weight", "conv_bias", "A_log", "dt_bias", "norm_weight")
    }


def test_options_without_bias_and_norms_pass() -> None:
    odd = variant(conv_bias=False, use_qk_l2norm=False, zero_centered_norm=True, conv_width=2)
    verdict = GoldenCheck(odd, "cpu", packed=True, repeats=1)()
    assert verdict, verdict
    assert "gradient of conv_bias" not in verdict.errors


def test_a_wrong_output_is_named() -> None:
    verdict = GoldenCheck(planted(lambda out: out.roll(1, -1)), "cpu", packed=True, repeats=0)()
    assert verdict.failure is not None
    assert verdict.failure.startswith("output has a relative error of")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        pytest.param({"g": lambda grad: grad * 0.5}, "A_log", id="gate"),
        pytest.param({"key": lambda grad: grad.flip(-1)}, "proj", id="keys"),
        pytest.param({"g": lambda grad: grad * float("nan")}, "proj", id="NaN"),
    ],
)
def test_a_wrong_gradient_is_named(spoil: dict[str, Any], named: str) -> None:
    verdict = GoldenCheck(planted(**spoil), "cpu", packed=True, repeats=0)()
    assert verdict.failure is not None
    assert verdict.errors["output"] <= verdict.limits["output"]
    assert not verdict.errors[f"gradient of {named}"] <= verdict.limits[f"gradient of {named}"]
    assert verdict.failure.startswith("gradient of ")


def test_one_bit_in_the_last_repeat_is_seen_and_counted() -> None:
    runs = 0

    def forward(out: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        if runs == 1 + REPEATS:
            out = out.clone()
            out.data[0, 5] = torch.nextafter(out.data[0, 5], torch.full_like(out.data[0, 5], 9.0))
        return out

    check = GoldenCheck(planted(forward), "cpu", packed=True)
    assert (check().failure or "").endswith(f"has other bits in repeat {REPEATS}")
    assert check(repeats=2), "fewer repeats, when asked"


def test_rows_beyond_the_last_offset_must_be_zero() -> None:
    stock = resolve("torch", "cpu")
    honest = variant()

    def mixer(proj: torch.Tensor, **arguments: Any) -> torch.Tensor:
        out = honest({"proj": proj, **{n: arguments[n] for n in honest.draw(1, 1, "cpu") if n != "proj"}}, SEGMENTS[0])
        return torch.cat([out[:-1], out[-1:] + 1e-30])

    SEGMENTS: list[Any] = []
    check = GoldenCheck(variant(backend=replace(stock, mixer=mixer)), "cpu", packed=True, repeats=0)
    SEGMENTS.append(check.segments)
    assert check().failure == "output is not zero beyond the last offset"


def test_an_exception_of_a_kernel_is_a_verdict() -> None:
    def forward(out: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    verdict = GoldenCheck(planted(forward), "cpu", packed=False)()
    assert verdict.failure == ("it raised RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered")


def test_a_variant_survives_the_way_to_another_process() -> None:
    import json

    made = variant(torch.bfloat16)
    assert MixerVariant.from_dict(json.loads(json.dumps(made.as_dict())), "cpu") == made
