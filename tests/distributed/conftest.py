"""Checkpoints and data that the distributed tests share; made once a session by the project's own makers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT


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
