"""The real `megatron sft --gdn_impl fla_safe` through the tiny recipe: TP2 PP2 EP2, packing, images, full recompute."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import make_multimodal_data  # noqa: E402
import make_tiny_model  # noqa: E402

STEPS, MICRO_BATCHES, GDN_LAYERS = 3, 2, 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one finished run; several tests read it."""
    folder = tmp_path_factory.mktemp("recipe")
    make_tiny_model.make_tiny_model(folder / "model")
    data = make_multimodal_data.make_data(folder / "data", samples=60, pictures=16)
    kept = ("HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH")
    environment = {
        **{name: os.environ[name] for name in kept if name in os.environ},
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "MODEL": str(folder / "model"),
        "DATA": str(data),
        "OUTPUT": str(folder / "out"),
        "ITERS": str(STEPS),
        "GPUS": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "cache"),
        "MODELSCOPE_CACHE": str(folder / "cache"),
    }
    with (folder / "log").open("wb") as log:
        done = subprocess.run(
            ["bash", str(REPOSITORY / "recipes/tiny/train.sh")],
            env=environment,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=560,
        )
    assert done.returncode == 0, (folder / "log").read_text(errors="replace")[-6000:]
    return folder


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU stand-in is refused where CUDA is available"),
]


def test_the_loss_is_finite_and_starts_at_the_logarithm_of_the_vocabulary(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "out" / "logging.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line and "iteration" in line]
    assert len(losses) == STEPS
    assert abs(losses[0] - math.log(make_tiny_model.VOCABULARY)) < 0.2
    assert all(math.isfinite(loss) for loss in losses)


def test_the_samples_were_packed(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "out" / "logging.jsonl").read_text().splitlines()]
    size = next(int(line["train_dataset"].rsplit("size=", 1)[1]) for line in lines if "train_dataset" in line)
    assert 2 * STEPS <= size < 30


def test_the_flag_is_recorded_and_every_call_counted(run: Path) -> None:
    arguments = json.loads((run / "out" / "args.json").read_text())
    assert arguments["gdn_impl"] == "fla_safe"
    report = json.loads((run / "out" / "gdn_report.json").read_text())
    assert report["gdn_impl"] == "fla_safe"
    assert report["kernel"] == "torch"
    assert report["gdn_layers"] == GDN_LAYERS
    # Forward, its recomputation, backward.
    assert report["kernel_calls_per_step"] == 3 * GDN_LAYERS * MICRO_BATCHES
    assert len(report["ranks"]) == 4
    assert report["versions"]["transformer-engine"].endswith("standin")


def test_the_checkpoint_loads_and_every_part_was_trained(run: Path) -> None:
    from transformers import AutoModelForImageTextToText

    # Loaded models are compared: on disk transformers keeps experts apart and ms-swift keeps them together.
    before = AutoModelForImageTextToText.from_pretrained(run / "model").state_dict()
    after = AutoModelForImageTextToText.from_pretrained(run / "out" / f"checkpoint-{STEPS}").state_dict()
    assert after.keys() == before.keys()
    # Pictures reached the vision tower, tokens the GDN layers of both pipeline stages and the experts of both ranks.
    moved = {name for name in before if not torch.equal(before[name].float(), after[name].float())}
    for part in (
        "visual.patch_embed.proj.weight",
        "layers.0.linear_attn.A_log",
        "layers.0.linear_attn.in_proj_qkv.weight",
        "layers.2.linear_attn.conv1d.weight",
        "layers.2.linear_attn.norm.weight",
        "layers.3.self_attn.q_proj.weight",
        "layers.1.mlp.experts.gate_up_proj",
    ):
        assert any(part in name for name in moved), f"{part} did not change"
