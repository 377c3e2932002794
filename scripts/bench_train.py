"""Trains the same model on the same data with ms-swift's GDN layers and with ours: tokens a second, losses, counters.

    python scripts/bench_train.py out --gpus 2                             8 layers with the heads of Qwen3.5-35B-A3B
    python scripts/bench_train.py out --gpus 1 --steps 200                 and losses.png
    python scripts/bench_train.py out --gpus 0 --heads tiny --steps 200 --length 128 \\
        --job fla_safe:1 --job default:1 --job default:2 --job fla_safe:2  losses alone, with no GPU

Real `megatron sft` through recipes/tiny/train.sh, one job after the other. Speed is what is left after `--skip` steps,
which tune, compile and fill caches. With no GPU the stock layer calls the plain-torch kernel (tests/distributed).
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


def train(job: str, out: Path, gpus: int, steps: int, length: int) -> Trained:
    """Run one job, `implementation:tensor parallel size`, or read its log if it is there."""
    implementation, _, tp = job.partition(":")
    folder = out / job.replace(":", "_tp")
    if not (folder / "logging.jsonl").is_file():
        environment = {
            **os.environ,
            "MODEL": str(out / "model"),
            "DATA": str(out / "data" / "train.jsonl"),
            "OUTPUT": str(folder),
            "GPUS": str(gpus),
            "ITERS": str(steps),
            "GDN_IMPL": implementation,
            **({"TP": tp, "PP": "1", "EP": tp, "NPROC_PER_NODE": tp} if tp else {}),
        }
        flags = ["--max_length", str(length)]
        if implementation == "default" and not gpus:
            flags += ["--external_plugins", str(ROOT / "tests" / "distributed" / "stock_on_cpu.py")]
        command = ["bash", str(ROOT / "recipes" / "tiny" / "train.sh"), *flags]
        with folder.with_suffix(".log").open("w") as log:
            done = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False)
        if done.returncode:
            raise SystemExit(f"the job {job} failed, see {folder.with_suffix('.log')}")
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
    job: Annotated[
        list[str] | None, typer.Option(help="Implementation, or implementation:TP; default is default and fla_safe.")
    ] = None,
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
    jobs = {name: train(name, out, gpus, steps, length) for name in job or ("default", "fla_safe")}
    skip = skip or max(1, steps // 5)
    print(f"{'':14}{'tokens/s':>10}{'s/step':>9}{'to step 3, s':>14}{'first loss':>12}{'last loss':>11}  counters")
    results = {}
    for name, trained in jobs.items():
        speed = trained.tokens_per_second(skip)
        third = trained.seconds[min(2, len(trained.seconds) - 1)]
        losses = f"{trained.losses[0]:12.4f}{trained.losses[-1]:11.4f}"
        pace = f"{speed:10.0f}{trained.tokens / speed:9.3f}{third:14.1f}"
        print(f"{name:14}{pace}{losses}  {trained.counters or '-'}")
        results[name] = {"tokens_per_second": speed, "losses": trained.losses, "seconds": trained.seconds}
    first = next(iter(jobs.values()))
    for name, trained in list(jobs.items())[1:]:
        apart = max(abs(a - b) / a for a, b in zip(first.losses, trained.losses, strict=True))
        ratio = trained.tokens_per_second(skip) / first.tokens_per_second(skip)
        print(f"{name}: {ratio:.2f} times the tokens/s of the first, losses at most {apart:.1e} apart")
    (out / "results.json").write_text(json.dumps(results, indent=1))
    try:
        plot(jobs, out / "losses.png")
    except ImportError:
        print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    typer.run(main)
