"""One job of recipes/tiny/train.sh at some parallel layout: starts it, and reads what it left."""

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Self, get_args

from fla_safe.settings import GdnImpl
from watch_training import records, steps

__all__ = ["Job", "JobError", "Trained"]

ROOT = Path(__file__).resolve().parent.parent
PROBES = ROOT / "tests" / "distributed"
"""ms-swift plugins of the tests: step 1's gradients in Hugging Face's layout, and the stock layer without a GPU."""

SIZES = ("tp", "pp", "ep", "cp")


class JobError(RuntimeError):
    """A job that cannot be run, or that failed."""


@dataclass(frozen=True, slots=True)
class Job:
    """What runs: `implementation`, or `implementation:tp2-pp2-ep2-cp1` with any of the sizes (others are 1).

    Without sizes the recipe chooses them by the number of GPUs.
    """

    name: str
    implementation: GdnImpl
    sizes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, name: str) -> Self:
        """From its name.

        Raises:
            JobError: an unknown implementation or size.
        """
        implementation, _, layout = name.partition(":")
        if implementation not in get_args(GdnImpl):
            raise JobError(f"job {name!r} names no implementation of {get_args(GdnImpl)}")
        sizes = {}
        for part in filter(None, layout.split("-")):
            size, number = part[:2], part[2:]
            if size not in SIZES or not number.isdigit() or not int(number):
                raise JobError(f"job {name!r}: {part!r} is not a size such as tp2 (of {', '.join(SIZES)})")
            sizes[size] = int(number)
        return cls(name, implementation, sizes)  # type: ignore[arg-type]

    def environment(self) -> dict[str, str]:
        """Variables of the recipe."""
        variables: dict[str, str] = {"GDN_IMPL": self.implementation}
        if self.sizes:
            tp, pp, ep, cp = (self.sizes.get(size, 1) for size in SIZES)
            variables |= {"TP": str(tp), "PP": str(pp), "EP": str(ep), "NPROC_PER_NODE": str(pp * max(tp * cp, ep))}
        return variables

    def flags(self, gpus: int, gradients: bool) -> list[str]:
        """Flags of `megatron sft` beyond the recipe's."""
        flags, plugins = [], []
        if self.sizes.get("cp", 1) > 1:
            flags += ["--context_parallel_size", str(self.sizes["cp"])]
        if self.implementation == "default" and not gpus:
            plugins.append(PROBES / "stock_on_cpu.py")
        if gradients:
            # A whole gradient on each rank, neither clipped nor spread over the optimizer's shards.
            plugins.append(PROBES / "gradient_probe.py")
            flags += ["--callbacks", "gradient_probe", "--clip_grad", "0", "--use_distributed_optimizer", "false"]
        return flags + (["--external_plugins", *map(str, plugins)] if plugins else [])

    def run(
        self, out: Path, gpus: int, iterations: int, length: int, gradients: bool = False, more: Sequence[str] = ()
    ) -> "Trained":
        """Train in a folder of `out`, which holds `model` and `data`; a finished job is only read.

        Raises:
            JobError: it failed; names the log.
        """
        folder = out / self.name.replace(":", "_")
        times = folder.with_suffix(".times.json")
        if not times.is_file():
            environment = {
                **os.environ,
                "MODEL": str(out / "model"),
                "DATA": str(out / "data" / "train.jsonl"),
                "OUTPUT": str(folder),
                "GPUS": str(gpus),
                "ITERS": str(iterations),
                "PROBE_OUT": str(folder.with_suffix(".gradients.pt")),
                **self.environment(),
            }
            flags = ["--max_length", str(length), *self.flags(gpus, gradients), *more]
            log = folder.with_suffix(".log")
            with log.open("w") as output:
                process = subprocess.Popen(
                    ["bash", str(ROOT / "recipes" / "tiny" / "train.sh"), *flags],
                    env=environment,
                    stdout=output,
                    stderr=output,
                )
                arrivals = _watch(process, folder / "logging.jsonl")
            if process.returncode:
                raise JobError(f"the job {self.name} failed with status {process.returncode}, see {log}")
            times.write_text(json.dumps(arrivals))
        return Trained.read(folder, batch=2)


def _watch(process: "subprocess.Popen[bytes]", log: Path) -> list[float]:
    """Seconds from the start to the arrival of each step's line, to a fifth of a second."""
    began, arrivals = time.monotonic(), []
    while True:
        ended = process.poll() is not None
        now = time.monotonic() - began
        arrivals += [now] * (len([*steps(log)]) - len(arrivals))
        if ended:
            return arrivals
        time.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Trained:
    """A finished job.

    Attributes:
        losses: of each step.
        arrivals: seconds from the command's start to the end of each step.
        seconds: since the first step began, at the end of each step.
        tokens: of a step.
        counters: the sum over all ranks of what was counted since the freeze; None for stock layers.
        tables: hashes of the ranks' decision tables, each once.
        gradients: file of step 1's gradients, if they were probed.
    """

    losses: tuple[float, ...]
    arrivals: tuple[float, ...]
    seconds: tuple[float, ...]
    tokens: float
    counters: dict[str, int] | None
    tables: tuple[str, ...]
    gradients: Path | None

    @classmethod
    def read(cls, folder: Path, batch: int) -> Self:
        """From ms-swift's log, our report, and the files beside the folder; `batch` packs to a step."""
        log = folder / "logging.jsonl"
        logged = [*steps(log)]
        lengths = next(record["train_dataset"] for record in records(log) if "train_dataset" in record)
        report = folder / "gdn_report.json"
        ranks = json.loads(report.read_text())["ranks"] if report.is_file() else []
        runtimes = [rank["runtime"] for rank in ranks if rank["runtime"]]
        counters: dict[str, int] = {}
        for runtime in runtimes:
            for name, count in runtime["counters"].items():
                counters[name] = counters.get(name, 0) + count
        gradients = folder.with_suffix(".gradients.pt")
        return cls(
            losses=tuple(step["loss"] for step in logged),
            arrivals=tuple(json.loads(folder.with_suffix(".times.json").read_text())),
            # ms-swift logs the mean time of all steps so far.
            seconds=tuple(step["train_speed(s/it)"] * (i + 1) for i, step in enumerate(logged)),
            tokens=batch * float(lengths.split("±")[0]),
            counters=counters if runtimes else None,
            tables=tuple(sorted({runtime["table_hash"] for runtime in runtimes})),
            gradients=gradients if gradients.is_file() else None,
        )

    def tokens_per_second(self, skip: int) -> float:
        """After the first `skip` steps."""
        return (len(self.seconds) - skip) * self.tokens / (self.seconds[-1] - self.seconds[skip - 1])

    def drift(self, skip: int) -> float:
        """Median step time of the last quarter of the steps after `skip`, over that of their first quarter."""
        times = [later - earlier for earlier, later in pairwise(self.seconds[skip - 1 :])]
        quarter = max(1, len(times) // 4)
        return sorted(times[-quarter:])[quarter // 2] / sorted(times[:quarter])[quarter // 2]
