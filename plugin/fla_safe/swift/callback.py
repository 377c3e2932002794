"""Counts GDN work during ms-swift's training loop and writes the job's report (`gdn_report.json`) when it ends."""

import json
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from swift.megatron.callbacks import MegatronCallback, megatron_callbacks_map
from swift.utils import get_logger

from fla_safe.gdn import calls
from fla_safe.installed import installed
from fla_safe.megatron.bridge import gdn_layers
from fla_safe.swift.checking import watches
from fla_safe.swift.freeze import steady_state

__all__ = ["REPORT_NAME", "GdnCallback", "attach"]

logger = get_logger()
NAME = "fla_safe"
REPORT_NAME = "gdn_report.json"
HEALTHY_AT_ZERO = ("late_tunes", "late_compiles", "file_ops", "syncs")
"""Counters of the runtime that a healthy job has at 0; `syncs` where they are watched."""


def attach(args: Any) -> None:
    """Make ms-swift's trainer create the callback: it reads `args.callbacks` after building the model."""
    megatron_callbacks_map[NAME] = GdnCallback
    callbacks = getattr(args, "callbacks", None)
    # First in line: what it adds to a step's logs is there when the printing and plotting callbacks read them.
    if callbacks is not None and NAME not in callbacks:
        callbacks.insert(0, NAME)


class GdnCallback(MegatronCallback):
    """Reads counters around each step; the training step itself is not touched."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._before = calls.snapshot()
        self._last_step = (0, 0)

    def on_step_begin(self) -> None:
        for watch in watches():
            watch.step_begins(self.state.iteration + 1)
        self._before = calls.snapshot()

    def on_step_end(self) -> None:
        for watch in watches():
            watch.step_ends()
        now = calls.snapshot()
        self._last_step = (now.forward - self._before.forward, now.backward - self._before.backward)

    def on_log(self, logs: dict[str, Any]) -> None:
        steady = steady_state()
        if steady is not None and self.state.iteration:
            counters = steady.runtime.counters()
            logs |= {f"gdn/{name}": counters[name] for name in HEALTHY_AT_ZERO if name in counters}

    def on_train_end(self) -> None:
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, self._rank_report())
        if dist.get_rank() == 0:
            report = self._job_report(ranks)
            path = Path(self.args.gdn_report or Path(self.args.output_dir) / REPORT_NAME)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(report, indent=2) + "\n")
            logger.info(f"fla-safe: {_one_line(report)}; report: {path}")

    def _rank_report(self) -> dict[str, Any]:
        layers = [layer for _, layer in gdn_layers(self.trainer.unwrapped_models)]
        forward, backward = self._last_step
        steady = steady_state()
        return {
            "rank": dist.get_rank(),
            "host": socket.gethostname(),
            "device": torch.cuda.get_device_name() if torch.version.cuda and torch.cuda.is_available() else "cpu",
            "pipeline_stage": mpu.get_pipeline_model_parallel_rank(),
            "model_replica": [
                mpu.get_data_parallel_rank(with_context_parallel=True),
                mpu.get_tensor_model_parallel_rank(),
            ],
            "gdn_layers": len(layers),
            "kernels": sorted({layer.kernel_in_use for layer in layers if layer.kernel_in_use}),
            "forward_calls_last_step": forward,
            "backward_calls_last_step": backward,
            "runtime": None if steady is None else steady.report(),
        }

    def _job_report(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        one_replica = [rank for rank in ranks if rank["model_replica"] == [0, 0]]
        return {
            "gdn_impl": self.args.gdn_impl,
            "kernel": ", ".join(sorted({kernel for rank in ranks for kernel in rank["kernels"]})) or "none",
            "gdn_layers": sum(rank["gdn_layers"] for rank in one_replica),
            "kernel_calls_per_step": sum(
                rank["forward_calls_last_step"] + rank["backward_calls_last_step"] for rank in one_replica
            ),
            "iterations": self.state.iteration,
            "checkpoint": self.state.last_model_checkpoint,
            "versions": installed(),
            "ranks": ranks,
        }


def _one_line(report: dict[str, Any]) -> str:
    """What the job's GDN layers did, for the console."""
    text = f"{report['gdn_layers']} GDN layers on kernel {report['kernel']}"
    counters = [rank["runtime"]["counters"] for rank in report["ranks"] if rank["runtime"]]
    if not counters:
        return text
    names = [name for name in HEALTHY_AT_ZERO if name in counters[0]]
    sums = ", ".join(f"{sum(rank[name] for rank in counters)} {name.replace('_', ' ')}" for name in names)
    return f"{text}, since the freeze on {len(counters)} ranks: {sums}"
