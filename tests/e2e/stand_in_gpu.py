"""ms-swift plugin: GDN layers of a job on the CPU launch FLA's and our Triton kernels, on a device that does nothing.

Everything above the device is real: ms-swift, Megatron, the warm-up, Triton's and our host path, the file system. What
the kernels would have computed is zeros. Used with `--external_plugins <this file>`, tests/ on PYTHONPATH.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

import fake_triton

# Before FLA is imported. Torch's questions about a device are answered as an H200 would. Every rank makes up its own
# times, so that the ranks would choose different configs.
fake_triton.install("record", seed=int(os.environ["RANK"]))

import fake_triton.fla  # noqa: E402
from fla_safe.gdn import backends  # noqa: E402
from fla_safe.gdn.chunk import fla as fla_chunk  # noqa: E402
from fla_safe.gdn.fused import mixer  # noqa: E402
from fla_safe.gdn.steady.golden import GoldenCheck, Verdict  # noqa: E402
from fla_safe.megatron import layer  # noqa: E402
from fla_safe.megatron import warmup as megatron_warmup  # noqa: E402
from fla_safe.swift import freeze  # noqa: E402

fake_triton.fla.prepare()
fla_chunk.unsupported_reason = lambda *args, **kwargs: None
layer.resolve = partial(backends.resolve, fused=True)


def zeroed(function: Callable[..., Any], which: Callable[[Any, tuple[Any, ...]], Any]) -> Callable[..., Any]:
    """`function`, after which what `which` names of its result and arguments is zero."""

    def call(*args: Any) -> Any:
        result = function(*args)
        for tensor in which(result, args):
            if tensor is not None:
                tensor.zero_()
        return result

    return call


mixer.run_out = zeroed(mixer.run_out, lambda out, args: [out])
mixer.grad_in = zeroed(mixer.grad_in, lambda sums, args: [args[3]])
mixer.total_sums = zeroed(mixer.total_sums, lambda grads, args: [*grads[0], grads[1]])


def check(golden: GoldenCheck, *, repeats: int | None = None) -> Verdict:
    golden._run()
    return Verdict(None)


GoldenCheck.__call__ = check  # type: ignore[method-assign]
freeze.reach_steady_state = partial(megatron_warmup.reach_steady_state, device=torch.device("cpu"))
stock_freeze = freeze.freeze_kernels


def freeze_kernels(args: Any, models: Any, settings: Any) -> None:
    """As on a GPU."""
    with mock.patch("torch.cuda.is_available", return_value=True):
        stock_freeze(args, models, replace(settings, cpu=False, tune_in_child=False))


freeze.freeze_kernels = freeze_kernels
