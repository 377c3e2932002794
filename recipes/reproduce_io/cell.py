"""One cell of the matrix, one process: trains GDN layers on packed image-text data, images read from disk.

    python cell.py --data train.jsonl --steps 40 [--ours]

FLA's kernels, Triton's host path and the file system are real. With a GPU the device is, too; without one it is
`tests/fake_triton`, which must be on PYTHONPATH in either case. `fla-safe trace` records what happens.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["main", "packs"]

PIXELS_A_TOKEN = 32
LETTERS_A_TOKEN = 4


def packs(data: Path, tokens: int, seed: int) -> Iterator[list[int]]:
    """Lengths of the segments of one packed row after the other, at most `tokens` together; reads each image."""
    from PIL import Image

    samples = [json.loads(line) for line in data.read_text().splitlines()]
    draw = random.Random(seed)
    lengths: list[int] = []
    while True:
        sample = draw.choice(samples)
        length = sum(len(m["content"]) for m in sample["messages"]) // LETTERS_A_TOKEN
        for path in sample.get("images", ()):
            with Image.open(path) as opened:
                image = opened.convert("RGB")  # decodes: opening alone reads only the header
            length += max(1, image.width // PIXELS_A_TOKEN) * max(1, image.height // PIXELS_A_TOKEN)
        length = min(length, tokens)
        if sum(lengths) + length > tokens:
            yield lengths
            lengths = []
        lengths.append(length)


def main() -> None:
    """Train; the trace has the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="made by scripts/make_multimodal_data.py")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--ours", action="store_true", help="with fla_safe's runtime, frozen after a warm-up")
    parser.add_argument("--tokens", type=int, default=2048, help="longest packed row")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--heads", type=int, nargs=2, default=(2, 4), help="key heads, value heads")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    gpu: Any = None
    if not torch.cuda.is_available():
        import fake_triton

        gpu = fake_triton.install("record")
    runtime = _runtime(gpu) if options.ours else None
    # Only now, as in a job: with a half-installed TileLang stock FLA 0.6.0 does not survive this import.
    import fake_triton.fla as gdn

    if gpu is not None:
        gdn.prepare()
    elif torch.cuda.get_device_capability() == (9, 0):
        gdn.lift_hopper_refusal()
    device = "cpu" if gpu is not None else "cuda"
    torch.manual_seed(options.seed)
    layers = [gdn.Layer(*options.heads, device=device) for _ in range(options.layers)]
    if runtime is not None:
        with runtime.warmup():
            for total in (options.tokens, options.tokens - 1, 1):
                layers[0].step(total, _offsets([total], device))
        runtime.freeze()
    milliseconds = _train(layers, options, device, gpu)
    counters = runtime.counters() if runtime is not None else None
    print(json.dumps({"ms_a_step": milliseconds, "counters": counters}))


def _runtime(gpu: Any) -> Any:
    from fla_safe.runtime import RuntimeSettings, activate

    return activate(RuntimeSettings(guard="warn", audit="off", isolate=gpu is None))


def _train(layers: list[Any], options: argparse.Namespace, device: str, gpu: Any) -> float:
    """Returns the median time of the second half of the steps."""
    import torch

    from fla_safe.trace import record

    rows = packs(options.data, options.tokens, options.seed)
    times = []
    for _ in range(options.steps):
        began = time.perf_counter()
        for _ in range(options.micro_batches):
            lengths = next(rows)
            offsets = _offsets(lengths, device)
            for layer in layers:
                layer.step(sum(lengths), offsets)
        if gpu is None:
            torch.cuda.synchronize()
        else:
            gpu.launches.clear()
        times.append(time.perf_counter() - began)
        record.step()
    return round(statistics.median(times[len(times) // 2 :]) * 1e3, 3)


def _offsets(lengths: list[int], device: str) -> Any:
    import torch

    return torch.tensor([0, *lengths]).cumsum(0).to(device)


if __name__ == "__main__":
    main()
