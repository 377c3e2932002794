"""Makes an image-text data set offline: photographs that scikit-image ships, crops of them, hand-written text."""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from PIL import Image

__all__ = ["Photograph", "load_photographs", "make_data"]

PROMPTS = (
    "Describe the picture.",
    "What do you see?",
    "Write a caption.",
    "Say in one sentence what this shows.",
    "Give a short description.",
)
DETAIL_PROMPTS = (
    "Describe the picture in detail.",
    "Tell me everything that you can see.",
    "Write a long description for somebody who cannot see the picture.",
)
CROP_NOTES = (
    "This is a part of a larger picture. What does the whole picture show?",
    "Only a section is visible. What is it taken from?",
)


@dataclass(frozen=True, slots=True)
class Photograph:
    """One photograph and the text that was written about it.

    Attributes:
        path: the image file inside the installed scikit-image.
        captions: one-sentence descriptions.
        questions: pairs of a question and its answer.
        details: sentences that together make a long description.
    """

    path: Path
    captions: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]
    details: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Picture:
    """A file made from a photograph: the whole of it or a crop, at some size."""

    path: Path
    photograph: Photograph
    is_crop: bool


def load_photographs() -> list[Photograph]:
    """The photographs that both `photographs.json` and the installed scikit-image have.

    Raises:
        RuntimeError: scikit-image is missing, or ships none of the files.
    """
    try:
        import skimage
    except ImportError as error:
        raise RuntimeError(
            "scikit-image, which ships the photographs, is missing (pip install scikit-image)"
        ) from error
    folder = Path(skimage.__file__).parent / "data"
    entries: list[dict[str, Any]] = json.loads((Path(__file__).parent / "photographs.json").read_text())
    found = [
        Photograph(
            folder / e["file"], tuple(e["captions"]), tuple((q, a) for q, a in e["questions"]), tuple(e["details"])
        )
        for e in entries
        if (folder / e["file"]).is_file()
    ]
    if not found:
        raise RuntimeError(f"scikit-image at {folder} ships none of the photographs of photographs.json")
    return found


def make_data(
    out: Path, *, samples: int, pictures: int = 64, seed: int = 0, text_only: float = 0.1, max_side: int = 384
) -> Path:
    """Write `out/images/*.jpg` and `out/train.jsonl` in ms-swift's format, and return the JSONL's path.

    Lengths are like those of packed multimodal data: most samples are one picture and a caption, some are dialogues of
    a few turns, few (one in twenty) are long, with several pictures. Equal arguments give equal files.

    Args:
        samples: lines to write, at least 1.
        pictures: image files to make; samples share them.
        text_only: share of samples without a picture, in [0, 1].
        max_side: longest side of a picture in pixels, at least 64.
    """
    if samples < 1 or pictures < 1 or not 0 <= text_only <= 1 or max_side < 64:
        raise ValueError(
            f"samples={samples}, pictures={pictures}, text_only={text_only}, max_side={max_side}: "
            "expected samples and pictures >= 1, text_only in [0, 1], max_side >= 64"
        )
    rng = random.Random(seed)
    pool = _make_pictures(out / "images", load_photographs(), pictures, max_side, rng)
    path, unfinished = out / "train.jsonl", out / ".train.jsonl"
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            for _ in range(samples):
                file.write(json.dumps(_sample(pool, text_only, rng), ensure_ascii=False) + "\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _make_pictures(
    folder: Path, photographs: list[Photograph], count: int, max_side: int, rng: random.Random
) -> list[_Picture]:
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for i in range(count):
        photograph = photographs[i % len(photographs)]
        with Image.open(photograph.path) as opened:
            image = opened.convert("RGB")
        is_crop = i >= len(photographs) and rng.random() < 0.5
        if is_crop:
            width, height = (int(side * rng.uniform(0.4, 0.8)) for side in image.size)
            left, top = rng.randint(0, image.width - width), rng.randint(0, image.height - height)
            image = image.crop((left, top, left + width, top + height))
        # Sides are spread over an octave and a half, so that the number of image tokens is.
        side = max_side * 2 ** rng.uniform(-1.5, 0)
        scale = side / max(image.size)
        image = image.resize((max(32, round(image.width * scale)), max(32, round(image.height * scale))))
        path = folder / f"{i:05d}_{photograph.path.stem}{'_crop' if is_crop else ''}.jpg"
        image.save(path, quality=90)
        made.append(_Picture(path.resolve(), photograph, is_crop))
    return made


def _sample(pool: list[_Picture], text_only: float, rng: random.Random) -> dict[str, Any]:
    if rng.random() < text_only:
        return _text_dialogue(rng.choice(pool).photograph, rng)
    kind = rng.random()
    if kind < 0.6:
        return _caption(rng.choice(pool), rng)
    if kind < 0.95:
        return _dialogue([rng.choice(pool)], rng.randint(2, 4), kind > 0.85, rng)
    count = min(rng.randint(2, 3), len(pool))
    return _dialogue(rng.sample(pool, count), 4 + int(rng.paretovariate(1.2)), True, rng)


def _turn(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _caption(picture: _Picture, rng: random.Random) -> dict[str, Any]:
    question = rng.choice(CROP_NOTES if picture.is_crop else PROMPTS)
    messages = _turn(f"<image>{question}", rng.choice(picture.photograph.captions))
    return {"messages": messages, "images": [str(picture.path)]}


def _text_dialogue(photograph: Photograph, rng: random.Random) -> dict[str, Any]:
    first, *rest = rng.sample(photograph.details, rng.randint(2, len(photograph.details)))
    question = f"Here is a sentence about a photograph: {first} What else could be said of it?"
    return {"messages": _turn(question, " ".join(rest))}


def _dialogue(pictures: list[_Picture], turns: int, long_answers: bool, rng: random.Random) -> dict[str, Any]:
    messages: list[dict[str, str]] = []
    for picture in pictures:
        photograph = picture.photograph
        if long_answers:
            messages += _turn(f"<image>{rng.choice(DETAIL_PROMPTS)}", " ".join(photograph.details))
        else:
            messages += _turn(f"<image>{rng.choice(PROMPTS)}", rng.choice(photograph.captions))
        wanted = math.ceil(turns / len(pictures)) - 1
        for question, answer in rng.sample(photograph.questions, min(wanted, len(photograph.questions))):
            messages += _turn(question, answer)
    return {"messages": messages, "images": [str(p.path) for p in pictures]}


def _main(
    out: Annotated[Path, typer.Argument(help="Folder to write to.")],
    samples: Annotated[int, typer.Option(help="Lines of train.jsonl.")] = 400,
    pictures: Annotated[int, typer.Option(help="Image files; samples share them.")] = 64,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal data.")] = 0,
    text_only: Annotated[float, typer.Option(help="Share of samples without a picture.")] = 0.1,
    max_side: Annotated[int, typer.Option(help="Longest side of a picture, pixels.")] = 384,
) -> None:
    """Make an image-text data set in ms-swift's JSONL format, offline."""
    try:
        path = make_data(out, samples=samples, pictures=pictures, seed=seed, text_only=text_only, max_side=max_side)
    except (RuntimeError, ValueError, OSError) as error:
        typer.echo(f"make_multimodal_data: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{path}: {samples} samples, {pictures} pictures")


if __name__ == "__main__":
    typer.run(_main)
