"""As test_gradients, for LoRA, Qwen3-Next, and weights that come from a distributed checkpoint."""

from collections.abc import Callable
from pathlib import Path

import pytest
from gradients import Gradients, assert_same
from launch import Job

pytestmark = pytest.mark.slow

LORA = ("--tuner_type", "lora", "--target_modules", "all-linear", "--lora_rank", "4")


def test_lora_with_tp2_and_sequence_parallel(
    run: Callable[..., Gradients], tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # A trained adapter: fresh ones draw from generators that depend on the layout, and have zero gradients in A.
    out = tmp_path_factory.mktemp("adapter")
    made = Job(
        tiny / "moe", tiny / "data" / "train.jsonl", out, flags=(*LORA, "--lr", "1e-2", "--min_lr", "1e-2")
    ).run()
    assert made.returncode == 0, made.stderr[-4000:]
    adapter = next(out.glob("**/adapter_config.json")).parent
    flags = (*LORA, "--adapters", str(adapter))
    reference = run(flags=flags)
    assert all(gradient.norm() > 0 for name, gradient in reference.items() if "in_proj" in name)
    assert_same(run(tp=2, sequence_parallel=True, flags=flags), reference)


def test_qwen3_next_with_tp2_and_sequence_parallel(run: Callable[..., Gradients]) -> None:
    assert_same(run("next", tp=2, sequence_parallel=True), run("next"))


def test_a_distributed_checkpoint_saved_at_tp2_loads_at_tp1(
    run: Callable[..., Gradients], tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = tmp_path_factory.mktemp("checkpoint")
    flags = ("--moe_aux_loss_coeff", "0", "--lr", "0", "--save_safetensors", "false")
    saved = Job(tiny / "moe", tiny / "data" / "train.jsonl", out, tp=2, sequence_parallel=True, flags=flags).run()
    assert saved.returncode == 0, saved.stderr[-4000:]
    checkpoint = next(out.glob("**/latest_checkpointed_iteration.txt")).parent
    assert_same(
        run(flags=("--mcore_model", str(checkpoint), "--no_load_optim", "true", "--no_load_rng", "true")), run()
    )
