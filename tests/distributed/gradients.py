"""Compares the gradients of two jobs, parameter by parameter."""

import torch

__all__ = ["TOLERANCE", "Gradients", "assert_same", "differences"]

# Relative to the gradient's norm. Layouts add up float32 numbers in different orders; `A_log` sums with cancellation.
TOLERANCE = 5e-4

Gradients = dict[str, torch.Tensor]


def differences(ours: Gradients, reference: Gradients) -> dict[str, float]:
    """Relative difference of each parameter's gradient."""
    assert ours.keys() == reference.keys()
    assert any("A_log" in name or "lora" in name for name in reference)
    # A vanishing gradient (the decay of a layer that forgets at once) is rounding; it counts against the largest one.
    floor = 1e-5 * max(float(gradient.norm()) for gradient in reference.values())
    return {
        name: float((ours[name] - reference[name]).norm() / max(float(reference[name].norm()), floor))
        for name in reference
    }


def assert_same(ours: Gradients, reference: Gradients) -> None:
    different = {name: value for name, value in differences(ours, reference).items() if not value < TOLERANCE}
    assert not different, str(different)[:2000]
