"""Trains the same model on the same data with ms-swift's GDN layers and with ours: tokens a second, losses, counters.

    python scripts/bench_train.py out --gpus 2               8 layers with the heads of Qwen3.5-35B-A3B
    python scripts/bench_train.py out --gpus 1 --steps 200   and losses.png
    python scripts/bench_train.py out --gpus 0 --heads tiny --steps 4    that it runs, with no GPU

Real `megatron sft` through recipes/tiny/train.sh, one job after the other. Speed is what is left after `--skip` steps,
which tune, compile and fill caches.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {
    "tiny": (),
    "real": ("--hidden", "2048", "--key-heads", "16", "--value-heads", "32", "--gdn-dim", "128", "--layers", "8")
    + ("--heads", "16", "--kv-heads", "2", "--head-dim", "128", "--expert-hidden", "512", "--dtype", "bfloat16"),
}
"""Arguments of make_tiny_model.py."""


@dataclass(frozen=True, slots=True)
class Trained:
    """One job's log.

    Attributes:
        seconds: since the first step, at the end of each step.
        losses: of each step.
        tokens: of a step.
        counters: `gdn/*` of the last step.
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    tokens: float
    counters: dict[str, float]

    @classmethod
    def read(cls, log: Path, batch: int) -> "Trained":
        """From ms-swift's logging.jsonl; `batch` packs to a step."""
        records = [json.loads(line) for line in log.read_text().splitlines()]
        steps = [record for record in records if "train_speed(s/it)" in record]
        lengths = next(record["train_dataset"] for record in records if "train_dataset" in record)
        # ms-swift logs the mean time of all steps so far.
        seconds = tuple(record["train_speed(s/it)"] * (i + 1) for i, record in enumerate(steps))
        counters = {name: value for name, value in steps[-1].items() if name.startswith("gdn/")}
        tokens = batch * float(lengths.split("±")[0])
        return cls(seconds, tuple(record["loss"] for record in steps), tokens, counters)

    def tokens_per_second(self, skip: int) -> float:
        """After the first `skip` steps."""
        return (len(self.seconds) - skip) * self.tokens / (self.seconds[-1] - self.seconds[skip - 1])


def train(implementation: str, out: Path, gpus: int, steps: int, length: int) -> Trained:
    """Run one job, or read its log if it is there."""
    folder = out / implementation
    if not (folder / "logging.jsonl").is_file():
        environment = {
            **os.environ,
            "MODEL": str(out / "model"),
            "DATA": str(out / "data" / "train.jsonl"),
            "OUTPUT": str(folder),
            "GPUS": str(gpus),
            "ITERS": str(steps),
            "GDN_IMPL": implementation,
        }
        command = ["bash", str(ROOT / "recipes" / "tiny" / "train.sh"), "--max_length", str(length), "--seed", "0"]
        with (out / f"{implementation}.log").open("w") as log:
            done = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False)
        if done.returncode:
            raise SystemExit(f"the job with --gdn_impl {implementation} failed, see {out / implementation}.log")
    return Trained.read(folder / "logging.jsonl", batch=2)


def plot(jobs: dict[str, Trained], path: Path) -> None:
    """Losses of all jobs over steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, job in jobs.items():
        axes.plot(range(1, len(job.losses) + 1), job.losses, label=name, linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main(
    out: Annotated[Path, typer.Argument(help="Folder for model, data, logs and results.")],
    gpus: Annotated[int, typer.Option(help="0, 1, 2 or 4; sizes as in recipes/tiny.")] = 2,
    steps: Annotated[int, typer.Option(min=2, help="Of each job.")] = 50,
    skip: Annotated[int | None, typer.Option(help="Steps that do not count; default a fifth.")] = None,
    heads: Annotated[Literal["real", "tiny"], typer.Option(help="Sizes of the model.")] = "real",
    length: Annotated[int, typer.Option(help="--max_length: tokens of a pack.")] = 4096,
) -> None:
    """Print a table; write results.json and losses.png."""
    out = out.resolve()
    scripts = ROOT / "scripts"
    if not (out / "model").is_dir():
        subprocess.run([sys.executable, scripts / "make_tiny_model.py", out / "model", *SHAPES[heads]], check=True)
    if not (out / "data").is_dir():
        samples = str(min(20000, 8 * steps + length // 16 * steps // 50 + 100))
        subprocess.run(
            [sys.executable, scripts / "make_multimodal_data.py", out / "data", "--samples", samples], check=True
        )
    # The stock layer has no CPU kernels: with no GPU it is our plain-torch layer that ours is compared with.
    rivals = ("default", "fla_safe") if gpus else ("torch", "fla_safe")
    jobs = {name: train(name, out, gpus, steps, length) for name in rivals}
    skip = skip or max(1, steps // 5)
    print(f"{'':10}{'tokens/s':>10}{'s/step':>9}{'to step 3, s':>14}{'first loss':>12}{'last loss':>11}  counters")
    results = {}
    for name, job in jobs.items():
        speed = job.tokens_per_second(skip)
        third = job.seconds[min(2, len(job.seconds) - 1)]
        print(
            f"{name:10}{speed:10.0f}{job.tokens / speed:9.3f}{third:14.1f}{job.losses[0]:12.4f}{job.losses[-1]:11.4f}"
            f"  {job.counters or '-'}"
        )
        results[name] = {"tokens_per_second": speed, "losses": job.losses, "seconds": job.seconds, **job.counters}
    first, second = jobs.values()
    apart = max(abs(a - b) / a for a, b in zip(first.losses, second.losses, strict=True))
    print(
        f"ratio {second.tokens_per_second(skip) / first.tokens_per_second(skip):.2f}; losses at most {apart:.1e} apart"
    )
    (out / "results.json").write_text(json.dumps(results, indent=1))
    try:
        plot(jobs, out / "losses.png")
    except ImportError:
        print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    typer.run(main)
