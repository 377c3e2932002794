"""A labelled stand-in for TransformerEngine and `torch.cuda`, so that the real `megatron` command runs with no GPU."""

import importlib.util
import os
import sys
from pathlib import Path

from fla_safe.errors import FlaSafeError

__all__ = ["NOT_REPRESENTED", "STANDIN_VERSION", "CpuModeError", "StandinError", "activate", "is_active", "notice"]

# Megatron-core switches features on by TransformerEngine's version. 1.12.0 is the newest that makes it ask for nothing
# the stand-in lacks (op fuser from 1.13, FP8 tensor classes from 2.0, fused router from 2.7).
STANDIN_VERSION = "1.12.0+fla.safe.standin"

NOT_REPRESENTED: tuple[str, ...] = (
    "TransformerEngine's kernels, their rounding and their memory use (plain PyTorch stands in for them)",
    "FP8 and FP4 (asking for either is an error)",
    "fused kernels: RoPE, MoE permutation, router, cross entropy, flash attention, optimizer",
    "weight gradients accumulated inside the GEMM (gradients reach main_grad through PyTorch's autograd)",
    "communication overlap, user buffers, NCCL (collectives run over gloo)",
    "attention's context-parallel schedules (keys and values are gathered; every cp_comm_type computes the same)",
    "CUDA streams, events, graphs, device memory, devices other than one per process, device capability (reads 9.0)",
    "torch.compile (switched off), Triton code generation and autotuning, races, speed",
)


class CpuModeError(FlaSafeError, RuntimeError):
    """The stand-in was asked for where it must not be used."""


class StandinError(FlaSafeError, NotImplementedError):
    """Something was asked of the stand-in that it does not represent."""


_STANDIN_DIRECTORY = str(Path(__file__).parent / "standin")
_active = False
_noticed = False


def is_active() -> bool:
    """Whether :func:`activate` has run in this process."""
    return _active


def activate() -> None:
    """Put the stand-ins in place; call it once `torch` is imported and before Megatron is. Later calls do nothing.

    After it `import transformer_engine` finds a pure PyTorch package whose version says that it is a stand-in, tensors
    asked for on 'cuda' are made on the CPU, and `torch.cuda`'s calls answer for one device a process.
    `torch.cuda.is_available()` stays False. `TORCHDYNAMO_DISABLE=1` is set, for this process and its children.

    Raises:
        CpuModeError: CUDA is available, or a real TransformerEngine is installed or already imported.
    """
    global _active
    if _active:
        return
    import torch

    if torch.cuda.is_available():
        raise CpuModeError(
            f"FLA_SAFE_CPU=1 on a machine where CUDA is available ({torch.cuda.device_count()} devices)",
            "no CUDA device: the stand-in for TransformerEngine and torch.cuda is for machines without a GPU",
            "unset FLA_SAFE_CPU, or hide the devices with CUDA_VISIBLE_DEVICES=",
        )
    _refuse_real_transformer_engine()

    # Dynamo reads this when it is first imported, which Megatron does; it cannot trace through the stand-in's mode.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # Last on the path: should a real package appear after all, it wins and the version says so.
    sys.path.append(_STANDIN_DIRECTORY)

    from fla_safe.cpu import cuda, vision

    cuda.install()
    vision.install()
    if os.environ.get("TRITON_INTERPRET") == "1":
        # Real FLA kernels on request: Triton must learn of it before FLA is imported.
        from fla_safe.cpu import interpreter

        interpreter.activate()
    _active = True


def _refuse_real_transformer_engine() -> None:
    found = sys.modules.get("transformer_engine")
    spec = getattr(found, "__spec__", None) if found is not None else importlib.util.find_spec("transformer_engine")
    if spec is None or (spec.origin or "").startswith(_STANDIN_DIRECTORY):
        return
    raise CpuModeError(
        f"FLA_SAFE_CPU=1 beside an installed transformer_engine ({spec.origin})",
        "no TransformerEngine: two packages of that name cannot live in one process",
        "unset FLA_SAFE_CPU, or make an environment without the extra `gpu` (pip uninstall transformer-engine)",
    )


def notice() -> None:
    """Print once, on rank 0 of a distributed job, what this process does not represent."""
    global _noticed
    if _noticed or os.environ.get("RANK") != "0":
        return
    _noticed = True
    lines = "\n".join(f"  - {item}" for item in NOT_REPRESENTED)
    print(
        f"fla_safe.cpu: CPU stand-in for TransformerEngine and torch.cuda in use. It does not represent:\n{lines}",
        file=sys.stderr,
        flush=True,
    )
