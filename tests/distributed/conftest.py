"""Checkpoints and data that the distributed tests share; made once a session by the project's own makers."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gradients import Gradients
from launch import ROOT, Job


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `moe`, `dense` and `next` checkpoints, `data/train.jsonl` and its image-less `data/text.jsonl`."""
    folder = tmp_path_factory.mktemp("tiny")
    for arguments in (
        ("make_tiny_model.py", folder / "moe", "--family", "qwen3_5_moe"),
        ("make_tiny_model.py", folder / "dense", "--family", "qwen3_5"),
        ("make_tiny_model.py", folder / "next", "--family", "qwen3_next"),
        ("make_multimodal_data.py", folder / "data", "--samples", "40", "--pictures", "12", "--max-side", "128"),
    ):
        script, *rest = map(str, arguments)
        subprocess.run([sys.executable, str(ROOT / "scripts" / script), *rest], check=True, capture_output=True)
    lines = (folder / "data" / "train.jsonl").read_text().replace("<image>", "").splitlines()
    texts = [json.dumps({"messages": json.loads(line)["messages"]}) for line in lines]
    (folder / "data" / "text.jsonl").write_text("\n".join(texts) + "\n")
    return folder


@pytest.fixture(scope="session")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Gradients]:
    """Gradients of a job, each distinct job run once."""
    known: dict[str, Gradients] = {}

    def job(model: str = "moe", **options: object) -> Gradients:
        key = repr((model, sorted(options.items())))
        if key not in known:
            flags = () if model == "dense" else ("--moe_aux_loss_coeff", "0")
            options["flags"] = (*flags, *options.get("flags", ()))  # type: ignore[misc]
            out = tmp_path_factory.mktemp("job")
            data = tiny / "data" / ("text.jsonl" if model == "next" else "train.jsonl")
            known[key] = Job(tiny / model, data, out, **options).gradients()  # type: ignore[arg-type]
        return known[key]

    return job
