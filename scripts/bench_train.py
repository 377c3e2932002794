"""Trains the same model on the same data, stock or ours, at any parallel layouts: speed, start, losses, gradients.

    python scripts/bench_train.py out --gpus 2                             8 layers with the heads of Qwen3.5-35B-A3B
    python scripts/bench_train.py out --gpus 1 --steps 200                 and losses.png
    python scripts/bench_train.py out --gpus 2 --steps 20 --gradients --job fla_safe:tp1 --job default:tp1 \\
        --job fla_safe:tp2-ep2 --job default:tp2-ep2 --job fla_safe:pp2 --job fla_safe:cp2
    python scripts/bench_train.py out --gpus 0 --heads tiny --steps 200 --length 128 --job fla_safe:tp1 \\
        --job default:tp1

Real `megatron sft` through recipes/tiny/train.sh, one job after the other; everything is compared with the first job.
Speed is what is left after `--skip` steps, which tune, compile and fill caches. With no GPU the stock layer calls the
plain-torch kernel (tests/distributed/stock_on_cpu.py). Flags after `--` go to `megatron sft`.
"""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from training_job import ROOT, Job, JobError, Trained

SHAPES = {
    "tiny": (),
    "real": ("--hidden", "2048", "--key-heads", "16", "--value-heads", "32", "--gdn-dim", "128", "--layers", "8")
    + ("--heads", "16", "--kv-heads", "2", "--head-dim", "128", "--expert-hidden", "512", "--dtype", "bfloat16"),
}
"""Arguments of make_tiny_model.py."""


def speeds(jobs: dict[str, Trained], skip: int) -> Table:
    """Start, speed, losses and counters of each job."""
    first = next(iter(jobs.values()))
    table = Table("", "to step 1, s", "to step 3, s", "tokens/s", "ratio", "drift", "last loss", "apart", "counters")
    for name, job in jobs.items():
        speed = job.tokens_per_second(skip)
        apart = max(abs(a - b) / a for a, b in zip(first.losses, job.losses, strict=True))
        counted = "-" if job.counters is None else str({k: v for k, v in job.counters.items() if v} or "all 0")
        table.add_row(
            name,
            f"{job.arrivals[0]:.1f}",
            f"{job.arrivals[min(2, len(job.arrivals) - 1)]:.1f}",
            f"{speed:.0f}",
            f"{speed / first.tokens_per_second(skip):.2f}",
            f"{job.drift(skip):.3f}",
            f"{job.losses[-1]:.4f}",
            f"{apart:.1e}",
            f"{counted}, {len(job.tables)} table(s)" if job.tables else counted,
        )
    return table


def norm_ratios(jobs: dict[str, Trained]) -> dict[str, dict[str, float]]:
    """Job -> norm parameter -> its gradient projected on the first job's: 1 where they agree, 2 where it is doubled."""
    import torch

    probed = {name: torch.load(job.gradients) for name, job in jobs.items() if job.gradients}
    if len(probed) < 2:
        return {}
    (_, reference), *others = probed.items()
    return {
        name: {
            parameter: float((gradients[parameter] * wanted).sum() / (wanted * wanted).sum())
            for parameter, wanted in reference.items()
            if "norm" in parameter and float(wanted.norm())
        }
        for name, gradients in others
    }


def norm_table(ratios: dict[str, dict[str, float]]) -> Table:
    """Smallest and largest ratio of each kind of norm."""
    table = Table("gradient of step 1 / the first job's", *ratios)
    kinds: dict[str, dict[str, list[float]]] = {}
    for job, parameters in ratios.items():
        for parameter, ratio in parameters.items():
            kind = ".".join("*" if part.isdigit() else part for part in parameter.split("."))
            kinds.setdefault(kind, {}).setdefault(job, []).append(ratio)
    for kind, found in sorted(kinds.items()):
        table.add_row(kind, *(f"{min(found[job]):.3f} to {max(found[job]):.3f}" for job in ratios))
    return table


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


def make(out: Path, heads: str, steps: int, length: int) -> None:
    """Model and data, once."""
    makers: dict[str, list[Any]] = {
        "model": ["make_tiny_model.py", out / "model", *SHAPES[heads]],
        "data": [
            *("make_multimodal_data.py", out / "data", "--samples"),
            min(20000, 8 * steps + length // 16 * steps // 50 + 100),
        ],
    }
    for folder, (script, *arguments) in makers.items():
        if not (out / folder).is_dir():
            command = [sys.executable, ROOT / "scripts" / script, *arguments]
            subprocess.run([str(part) for part in command], check=True)


def main(
    out: Annotated[Path, typer.Argument(help="Folder for model, data, logs and results.")],
    more: Annotated[list[str] | None, typer.Argument(help="Flags of `megatron sft`, after --.")] = None,
    gpus: Annotated[int, typer.Option(help="0, 1, 2 or 4; sizes as in recipes/tiny.")] = 2,
    steps: Annotated[int, typer.Option(min=2, help="Of each job.")] = 50,
    skip: Annotated[int | None, typer.Option(help="Steps that do not count; default a fifth.")] = None,
    heads: Annotated[Literal["real", "tiny"], typer.Option(help="Sizes of the model.")] = "real",
    length: Annotated[int, typer.Option(help="--max_length: tokens of a pack.")] = 4096,
    gradients: Annotated[bool, typer.Option("--gradients", help="Compare the norms' gradients of step 1.")] = False,
    job: Annotated[
        list[str] | None, typer.Option(help="Implementation, or implementation:tp2-pp2; default: default, fla_safe.")
    ] = None,
) -> None:
    """Print tables; write results.json and losses.png."""
    out = out.resolve()
    try:
        wanted = [Job.parse(name) for name in job or ("default", "fla_safe")]
        make(out, heads, steps, length)
        jobs = {each.name: each.run(out, gpus, steps, length, gradients, more or ()) for each in wanted}
    except JobError as error:
        print(f"bench_train: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(speeds(jobs, skip or max(1, steps // 5)))
    ratios = norm_ratios(jobs) if gradients else {}
    if ratios:
        console.print(norm_table(ratios))
    results = {name: {**asdict(trained), "gradients": ratios.get(name)} for name, trained in jobs.items()}
    (out / "results.json").write_text(json.dumps(results, indent=1))
    try:
        plot(jobs, out / "losses.png")
    except ImportError:
        print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    typer.run(main)
