"""The life of a frozen job in the real `megatron sft`: training, evaluation, saving, resuming, all under strict.

On a device that does nothing (`stand_in_gpu.py`): what the kernels compute is not looked at, what the host does is.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import make_multimodal_data  # noqa: E402
import make_tiny_model  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU stand-in is refused where CUDA is available"),
]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Runs the tiny recipe on one rank, with an evaluation and a checkpoint after every second step."""
    folder = tmp_path_factory.mktemp("frozen")
    make_tiny_model.make_tiny_model(folder / "model")
    data = make_multimodal_data.make_data(folder / "data", samples=60, pictures=16)

    def job(name: str, iterations: int, *flags: str) -> Path:
        environment = {
            **{name: os.environ[name] for name in ("HOME", "TMPDIR", "LANG") if name in os.environ},
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(REPOSITORY / "tests"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "MODEL": str(folder / "model"),
            "DATA": str(data),
            "OUTPUT": str(folder / name),
            "ITERS": str(iterations),
            **dict.fromkeys(("TP", "PP", "EP", "NPROC_PER_NODE"), "1"),
            "GPUS": "0",
            "IMAGE_MAX_TOKEN_NUM": "16",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder / "cache"),
            "MODELSCOPE_CACHE": str(folder / "cache"),
        }
        done = subprocess.run(
            ["bash", str(REPOSITORY / "recipes" / "tiny" / "train.sh")]
            + ["--gdn_guard", "strict", "--external_plugins", str(Path(__file__).with_name("stand_in_gpu.py"))]
            + ["--max_length", "128", "--split_dataset_ratio", "0.2", "--eval_steps", "2", "--eval_iters", "2"]
            # Without Apex and TransformerEngine, Megatron's distributed optimizer cannot be resumed.
            + ["--save_steps", "2", "--no_save_optim", "false", "--use_distributed_optimizer", "false", *flags],
            env=environment,
            cwd=folder,
            text=True,
            capture_output=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
        return folder / name

    return job


def assert_nothing_was_late(out: Path, iterations: int) -> dict[str, Any]:
    report = json.loads((out / "gdn_report.json").read_text())
    assert report["iterations"] == iterations
    assert report["kernel"] == "fla"
    (rank,) = report["ranks"]
    assert not any(rank["runtime"]["counters"].values()), rank["runtime"]["counters"]
    lines = [json.loads(line) for line in (out / "logging.jsonl").read_text().splitlines()]
    assert any("eval_loss" in line for line in lines)
    assert (out / f"checkpoint-{iterations}").is_dir()
    return rank["runtime"]  # type: ignore[no-any-return]


def test_evaluation_saving_and_resuming_stay_at_zero(train: Callable[..., Path]) -> None:
    first = train("first", 2)
    assert assert_nothing_was_late(first, 2)["timings"]["tuning_rounds"] > 0
    resumed = train(
        *("resumed", 4, "--mcore_model", str(first / "checkpoint-2"), "--finetune", "false"),
        *("--gdn_bundle", str(first / "gdn_bundle.fsb")),
    )
    assert assert_nothing_was_late(resumed, 4)["timings"]["tuning_rounds"] == 0


def test_batches_of_padded_rows_stay_at_zero(train: Callable[..., Path]) -> None:
    """All of the evaluation set, whose last batch may be smaller."""
    rows = ("--packing", "false", "--micro_batch_size", "2", "--eval_iters", "-1")
    assert_nothing_was_late(train("padded", 2, *rows), 2)
