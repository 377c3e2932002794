"""Starts the real `megatron sft` for tests, every rank a process on this machine."""

import itertools
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
PROBE = Path(__file__).with_name("gradient_probe.py")
ON_GPU = torch.cuda.is_available()
MODEL_TYPES = {"moe": "qwen3_5_moe", "dense": "qwen3_5", "next": "qwen3_next"}
"""ms-swift's name of a checkpoint's family, by the checkpoint's folder."""


@dataclass(frozen=True, slots=True)
class Job:
    """One `megatron sft` run. Sizes multiply to the number of processes."""

    model: Path
    data: Path
    out: Path
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    packing: bool = True
    gdn_impl: str | None = "fla_safe"
    iterations: int = 1
    flags: tuple[str, ...] = ()
    plugins: tuple[Path, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        dense = self.tp * self.pp * self.cp
        return max(dense, self.ep * self.pp)

    def command(self) -> list[str]:
        flags = {
            "model": self.model,
            "model_type": MODEL_TYPES[self.model.name],
            "template": "qwen3" if self.model.name == "next" else "qwen3_5",
            "dataset": self.data,
            "output_dir": self.out,
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "expert_model_parallel_size": self.ep,
            "context_parallel_size": self.cp,
            "sequence_parallel": self.sequence_parallel,
            "packing": self.packing,
            "max_length": 256,
            "micro_batch_size": 1,
            "global_batch_size": 2,
            "train_iters": self.iterations,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "torch_dtype": "float32",
            "bf16": False,
            "fp16": False,
            "attention_backend": "flash",
            "split_dataset_ratio": 0,
            "dataloader_num_workers": 0,
            "dataset_num_proc": 1,
            "load_from_cache_file": False,
            "check_model": False,
            "save_steps": 1000,
            "no_save_optim": True,
            "no_save_rng": True,
            "use_distributed_optimizer": False,
            "clip_grad": 0,
            "logging_steps": 1,
            "train_dataloader_shuffle": False,
            "moe_token_dispatcher_type": "alltoall",
            "finetune": True,
        }
        if self.gdn_impl is not None:
            flags["gdn_impl"] = self.gdn_impl
        if not ON_GPU:
            flags |= {
                "ddp_backend": "gloo",
                "use_cpu_initialization": True,
                "vit_attn_impl": "sdpa",
                "masked_softmax_fusion": False,
                "bias_dropout_fusion": False,
                "bias_activation_fusion": False,
                "cross_entropy_loss_fusion": False,
                "gradient_accumulation_fusion": False,
                "dataloader_pin_memory": False,
            }
        megatron = Path(sys.executable).with_name("megatron")
        pairs = [
            (f"--{name}", str(value).lower() if isinstance(value, bool) else str(value))
            for name, value in flags.items()
        ]
        plugins = ("--external_plugins", *map(str, self.plugins)) if self.plugins else ()
        return [str(megatron), "sft", *itertools.chain(*pairs), *plugins, *self.flags]

    def run(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "FLA_"))},
            "NPROC_PER_NODE": str(self.processes),
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "IMAGE_MAX_TOKEN_NUM": "16",
            "TOKENIZERS_PARALLELISM": "false",
            "MODELSCOPE_CACHE": str(self.out / "cache"),
            **({} if ON_GPU else {"FLA_SAFE_CPU": "1", "TORCHDYNAMO_DISABLE": "1"}),
            **self.environment,
        }
        self.out.mkdir(parents=True, exist_ok=True)
        return subprocess.run(
            self.command(), env=environment, cwd=self.out, text=True, capture_output=True, timeout=timeout, check=False
        )

    def gradients(self, timeout: float = 300) -> dict[str, torch.Tensor]:
        """Run one step under the probe; `{Hugging Face name: gradient}`."""
        path = self.out / "gradients.pt"
        probed = Job(
            **{
                **{name: getattr(self, name) for name in self.__slots__},
                "flags": (*self.flags, "--callbacks", "gradient_probe"),
                "plugins": (*self.plugins, PROBE),
                "environment": {**self.environment, "PROBE_OUT": str(path)},
            }
        )
        done = probed.run(timeout)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return torch.load(path)
