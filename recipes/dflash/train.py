"""Trains N drafters in one process, a thread and a pair of devices each: `python -m dflash.train --help`."""

import argparse
import contextlib
import json
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from dflash.attention import Attention
from dflash.compiled import Compiled, Compiler, no_more_graphs
from dflash.directories import Directories
from dflash.drafter import drafter_loss
from dflash.memory import check, measure
from dflash.pair import Pair, on_device, pair_devices
from dflash.sizes import MEMORY, PRESETS, Sizes
from dflash.target import Impl, choose_kernel
from dflash.workers import PairFailedError, Stop, run_together
from fla_safe.errors import FlaSafeError
from fla_safe.gdn.steady.rehearsal import GUARDED, repeats
from fla_safe.runtime import Runtime, RuntimeSettings, activate

__all__ = ["Job", "NotZeroError", "main", "make_job", "train"]

_MUST_BE_ZERO = ("late_tunes", "late_compiles", "file_ops")


class NotZeroError(FlaSafeError, RuntimeError):
    """Something was tuned, compiled or read from a file in a GDN layer after the freeze."""


@dataclass(slots=True)
class Job:
    """All pairs of a run, ready to train.

    Attributes:
        impl: whose gated delta rule the targets use.
        pairs: one thread each.
        compiled: the drafters' loss.
        runtime: fla_safe's, frozen; None with stock FLA.
        directories: of compiled kernels, as they were before torch.compile made any.
        losses: of every pair, by step, as far as they were looked at.
    """

    impl: Impl
    pairs: list[Pair]
    compiled: Compiled
    runtime: Runtime | None
    directories: Directories
    losses: dict[int, dict[int, float]] = field(default_factory=dict)

    def counters(self) -> dict[str, int]:
        """See `Runtime.counters`; nothing for stock FLA."""
        return {} if self.runtime is None else self.runtime.counters()


@contextlib.contextmanager
def make_job(
    impl: Impl,
    devices: Sequence[tuple[torch.device, torch.device]],
    sizes: Sizes,
    *,
    compiler: Compiler,
    guard: str = "strict",
) -> Iterator[Job]:
    """Build the pairs, compile the drafters in this thread, and, with fla_safe, warm up and freeze.

    Stock FLA gets no warm-up: its autotuner then meets its first calls in all threads at once, as in the report.

    Raises:
        FlaSafeError: `GraphBreakError`, `NotCompiledError` or `ScoresHeldError` of the drafter, or what the runtime
            refuses.
    """
    attention: Attention = "flex" if devices[0][1].type == "cuda" else "sdpa_by_anchor"
    runtime = None
    if impl == "fla_safe":  # before anything launches a kernel
        runtime = activate(RuntimeSettings(guarded=GUARDED, judge=repeats, agree=False, isolate=True))
    try:
        directories = Directories.now(runtime)
        compiled = Compiled(
            drafter_loss,
            compiler=compiler,
            fused="flex_attention" if attention == "flex" else "",
            limit=sizes.largest,
            variants=len(devices),
        )
        section = contextlib.nullcontext if runtime is None else partial(getattr, runtime, "section")
        pairs = [
            Pair(i, both, sizes, choose_kernel(impl, both[0], sizes.target.gdn, sizes.dtype), attention, compiled,
                 section=section)
            for i, both in enumerate(devices)
        ]  # fmt: skip
        if runtime is None:
            for pair in pairs:
                pair.rehearse_drafter()
        else:
            with runtime.warmup():
                for pair in pairs:
                    pair.rehearse()
            gpus = {first.index for first, _ in devices if first.type == "cuda"}
            runtime.freeze(guard, devices=gpus)  # type: ignore[arg-type]
        compiled.require()
        yield Job(impl, pairs, compiled, runtime, directories)
    finally:
        if runtime is not None:
            runtime.deactivate()


def train(job: Job, steps: int, *, every: int = 50, apart: float = 0.0) -> None:
    """Train all pairs, a thread each, and print a line for each pair every so many steps.

    Args:
        every: steps between two lines of a pair.
        apart: seconds between the starts of two pairs.

    Raises:
        PairFailedError: a thread failed; all have ended.
        NotZeroError: a counter of the runtime is not zero.
        DirectoriesMixedError: see there.
    """
    printing = threading.Lock()

    def body(pair: Pair, stop: Stop) -> None:
        losses = job.losses.setdefault(pair.number, {})
        time.sleep(apart * pair.number)
        with on_device(pair.devices[0]):
            for step in range(1, steps + 1):
                stop.check()
                loss = pair.step()
                if step == 1 or step % every == 0 or step == steps:
                    losses[step] = float(loss)
                    counted = "".join(f"  {k} {v}" for k, v in job.counters().items() if k in _MUST_BE_ZERO)
                    with printing:
                        print(f"pair {pair.number}  step {step}/{steps}  loss {losses[step]:.4f}{counted}", flush=True)

    with no_more_graphs():
        run_together([partial(body, pair) for pair in job.pairs])
    late = {name: count for name, count in job.counters().items() if name in _MUST_BE_ZERO and count}
    if late:
        assert job.runtime is not None
        raise NotZeroError(
            f"after the freeze: {late}, for example {job.runtime.report()['file_examples'][:2]}",
            "zero of each",
            "add the call to Pair.rehearse",
        )
    job.directories.require_still(job.runtime)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = _options(argv)
    gpus = 0 if options.cpu else torch.cuda.device_count()
    kind: Literal["cuda", "cpu"] = "cuda" if gpus else "cpu"
    preset = (MEMORY if options.memory else PRESETS)[kind]
    changes = {f.name: getattr(options, f.name, None) for f in fields(Sizes)}
    try:
        sizes = replace(preset, **{name: value for name, value in changes.items() if value is not None})
        if options.memory:
            # Without fusion a CPU holds more, never less; and no C++ is compiled for each number of anchors.
            table = measure(sizes, torch.device(kind), options.compile or ("inductor" if gpus else "aot_eager"))
            print("\n".join(str(row) for row in table))
            check(table)
            return 0
        return _train(options, pair_devices(options.pairs, gpus), sizes, options.compile or "inductor")
    except FlaSafeError as error:
        if isinstance(error, PairFailedError) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"dflash: {options.impl} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1


def _train(options: Any, devices: list[tuple[torch.device, torch.device]], sizes: Sizes, compiler: Compiler) -> int:
    for i, (first, second) in enumerate(devices):
        print(f"pair {i}: target on {first}, drafter on {second}")
    began = time.perf_counter()
    with make_job(options.impl, devices, sizes, compiler=compiler, guard=options.guard) as job:
        ready = time.perf_counter()
        graphs = [f"{'backward' if s.backward else 'forward'} {list(s.shape)}" for s in job.compiled.seen]
        print(f"ready after {ready - began:.1f} s; largest tensor of each graph: {'; '.join(graphs)}", flush=True)
        train(job, options.steps, every=options.every, apart=options.apart)
        seconds = time.perf_counter() - ready
        report = _report(options.impl, job, options.steps, seconds)
    if options.report is not None:
        options.report.write_text(json.dumps(report, indent=1))
    ends = [(column[0], statistics.fmean(column[-3:])) for column in (list(x.values()) for x in job.losses.values())]
    first_loss, last_loss = (sum(column) / len(ends) for column in zip(*ends, strict=True))
    counted = ", ".join(f"{name} {count}" for name, count in report["counters"].items()) or "nothing is counted"
    print(
        f"dflash: {options.impl}, {len(devices)} pairs x {options.steps} steps in {seconds:.1f} s; "
        f"loss {first_loss:.3f} -> {last_loss:.3f}; {counted}"
    )
    return 0


def _report(impl: Impl, job: Job, steps: int, seconds: float) -> dict[str, Any]:
    return {
        "impl": impl,
        "pairs": len(job.pairs),
        "steps": steps,
        "seconds": round(seconds, 1),
        "losses": job.losses,
        "counters": job.counters(),
        "directories": {"fla_safe": str(job.directories.ours), "inductor": str(job.directories.inductors)},
        "graphs": [{"backward": seen.backward, "largest": list(seen.shape)} for seen in job.compiled.seen],
        "runtime": None if job.runtime is None else job.runtime.report(),
    }


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dflash", description=__doc__)
    parser.add_argument("--impl", choices=("fla_safe", "stock"), default="fla_safe")
    parser.add_argument("--pairs", type=_count, default=2)
    parser.add_argument("--steps", type=_count, default=500)
    parser.add_argument("--every", type=_count, default=50, help="steps between two lines of a pair")
    parser.add_argument("--apart", type=_seconds, default=0.5, help="seconds between the starts of two pairs")
    parser.add_argument("--guard", choices=("off", "warn", "strict"), default="strict")
    parser.add_argument("--memory", action="store_true", help="print peak memory against anchors instead of training")
    parser.add_argument("--compile", choices=("inductor", "aot_eager"), help="compiler of the drafter")
    parser.add_argument("--cpu", action="store_true", help="use no GPU, even where there is one")
    parser.add_argument("--report", type=Path, help="write losses, counters and the runtime's report as JSON")
    for size in fields(Sizes):
        if size.name != "dtype":
            parser.add_argument(f"--{size.name}", type=float if size.name == "lr" else _count)
    options = parser.parse_args(argv)
    if options.report is not None and not options.report.parent.is_dir():
        parser.error(f"--report {options.report}: there is no folder {options.report.parent}")
    return options


def _seconds(text: str) -> float:
    if not text.replace(".", "", 1).isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return float(text)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
