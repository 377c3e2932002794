"""The makers of image-text data and of tiny models."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from PIL import Image, ImageChops
from typer.testing import CliRunner

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import make_multimodal_data  # noqa: E402
import make_tiny_model  # noqa: E402


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_multimodal_data.make_data(tmp_path_factory.mktemp("data"), samples=400, pictures=40)


def samples(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def words(sample: dict[str, Any]) -> int:
    return sum(len(message["content"].split()) for message in sample["messages"])


def test_every_photograph_of_the_texts_ships_with_scikit_image() -> None:
    entries = json.loads((SCRIPTS / "photographs.json").read_text())
    assert len(make_multimodal_data.load_photographs()) == len(entries) >= 12


def test_each_picture_is_named_once_in_the_dialogue_and_exists(data: Path) -> None:
    for sample in samples(data):
        roles = [message["role"] for message in sample["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        text = "".join(message["content"] for message in sample["messages"])
        assert text.count("<image>") == len(sample.get("images", []))
        assert all(Path(image).is_file() for image in sample.get("images", []))
        assert all(message["content"].strip() for message in sample["messages"])


def test_lengths_are_many_short_and_few_long(data: Path) -> None:
    rows = samples(data)
    lengths = sorted(words(row) for row in rows)
    assert lengths[len(lengths) // 2] < 30
    assert lengths[-1] > 150
    assert sum(length > 100 for length in lengths) < 0.15 * len(lengths)
    several = sum(len(row.get("images", [])) > 1 for row in rows)
    assert 0 < several < 0.1 * len(rows)
    assert 0.05 < sum("images" not in row for row in rows) / len(rows) < 0.2


def test_pictures_are_photographs_at_several_sizes(data: Path) -> None:
    files = sorted((data.parent / "images").glob("*.jpg"))
    assert len(files) == 40
    sizes = set()
    for file in files:
        with Image.open(file) as image:
            sizes.add(image.size)
            assert max(image.size) <= 384
            assert min(image.size) >= 32
            # Neighbouring pixels of a photograph are alike; those of noise are not.
            shifted = ImageChops.offset(image.convert("L"), 1, 0)
            assert sum(ImageChops.difference(image.convert("L"), shifted).histogram()[:64]) > 0.7 * (
                image.width * image.height
            )
    assert len(sizes) > 20


def test_equal_seeds_give_equal_data(tmp_path: Path) -> None:
    def text(seed: int, folder: str) -> list[Any]:
        path = make_multimodal_data.make_data(tmp_path / folder, samples=20, pictures=4, seed=seed)
        return [sample["messages"] for sample in samples(path)]

    assert text(1, "a") == text(1, "b") != text(2, "c")


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"text_only": 1.5}, {"max_side": 8}, {"pictures": 0}], ids=str)
def test_wrong_sizes_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make_multimodal_data.make_data(tmp_path, **{"samples": 1, **wrong})


def test_data_that_could_not_be_finished_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = iter(range(3))
    monkeypatch.setattr(make_multimodal_data, "_sample", lambda *_: {"sample": next(written)})
    with pytest.raises(StopIteration):
        make_multimodal_data.make_data(tmp_path, samples=9, pictures=1)
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


def test_the_vision_language_model_reads_a_dialogue_with_pictures(tmp_path: Path, data: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    make_tiny_model.make_tiny_model(tmp_path, family="qwen3_5_moe")
    processor = AutoProcessor.from_pretrained(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    kinds = [hasattr(layer, "linear_attn") for layer in model.model.language_model.layers]
    assert kinds == [True, True, True, False]

    row = next(row for row in samples(data) if len(row.get("images", [])) == 2)
    turns = []
    for message in row["messages"]:
        shown = [{"type": "image"}] if "<image>" in message["content"] else []
        text = message["content"].replace("<image>", "")
        turns.append({"role": message["role"], "content": [*shown, {"type": "text", "text": text}]})
    prompt = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert prompt.count("<|im_start|>") == len(turns) + 1
    assert prompt.count("<|image_pad|>") == 2
    assert prompt.endswith("<|im_start|>assistant\n<think>\n")
    images = [Image.open(path) for path in row["images"]]
    inputs = processor(text=[prompt], images=images, return_tensors="pt")
    # transformers' GDN calls FLA's kernels wherever FLA is installed, so on a CPU only the vision tower can run.
    tokens = int(inputs["input_ids"].eq(model.config.image_token_id).sum())
    with torch.no_grad():
        features = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
    assert sum(len(part) for part in features) == tokens > 8
    assert {part.shape[-1] for part in features} == {64}

    tokenizer = processor.tokenizer
    assert tokenizer.decode(tokenizer("A café, naïve — 猫.").input_ids) == "A café, naïve — 猫."
    assert len(tokenizer("photograph").input_ids) < len("photograph")
    assert tokenizer("<|image_pad|>").input_ids == [248056]


@pytest.mark.parametrize(
    ("family", "module"),
    [("qwen3_5", "Qwen3_5GatedDeltaNet"), ("qwen3_next", "Qwen3NextGatedDeltaNet")],
)
def test_other_families(family: Any, module: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModel

    sizes = make_tiny_model.Sizes(layers=8, key_heads=4, value_heads=8)
    make_tiny_model.make_tiny_model(tmp_path, family=family, sizes=sizes, dtype="bfloat16", seed=3)
    model = AutoModel.from_pretrained(tmp_path, config=AutoConfig.from_pretrained(tmp_path))
    layers = [m for m in model.modules() if type(m).__name__ == module]
    assert len(layers) == 6
    assert {(m.num_k_heads, m.num_v_heads) for m in layers} == {(4, 8)}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"value_heads": 3}, "value_heads=3: expected a multiple of key_heads=2"),
        ({"kv_heads": 0}, "kv_heads=0: expected at least 1"),
        ({"layers": -4}, "layers=-4: expected at least 1"),
        ({"head_dim": 12}, "head_dim=12: expected a multiple of 8"),
        ({"vision_hidden": 12}, "vision_hidden=12: expected a multiple of 8"),
        ({"top_k": 9}, "top_k=9: expected at most experts=4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sizes_that_make_no_model_are_refused(wrong: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_tiny_model.Sizes(**wrong)


def test_a_failure_of_the_file_system_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError

    def full(*_: Any, **__: Any) -> int:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(make_tiny_model, "make_tiny_model", full)
    command = typer.Typer()
    command.command()(make_tiny_model._main)
    done = CliRunner().invoke(command, ["model"])
    assert done.exit_code == 1
    assert done.stderr.startswith("make_tiny_model: Error while serializing")
