"""Takes mixers from the first kernel to the steady state: tuned, checked, agreed, compiled, frozen."""

import atexit
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch

from fla_safe.gdn import calls
from fla_safe.gdn.backends import Backend
from fla_safe.gdn.chunk.flash_qla import watch_compilations
from fla_safe.gdn.steady.golden import GoldenCheck, Verdict
from fla_safe.gdn.steady.kernel_choice import Timings, choose_kernels
from fla_safe.gdn.steady.rehearsal import GUARDED, Rows, rehearse, repeats
from fla_safe.gdn.steady.state import SteadyState
from fla_safe.gdn.variant import MixerVariant
from fla_safe.runtime import Runtime, RuntimeSettings, activate
from fla_safe.runtime.artifacts.kept import keys_in_use
from fla_safe.runtime.launching.ahead import threads_of_this_rank
from fla_safe.runtime.tuning.keys import TuningKey
from fla_safe.runtime.tuning.outside import OutsideTuning
from fla_safe.runtime.tuning.settle import Check
from fla_safe.settings import Settings
from fla_safe.tables import shipped_tables

__all__ = ["take_over", "warm_up"]


def take_over(settings: Settings) -> Runtime:
    """Activate the runtime for gated delta net kernels; call it before any of them is resolved.

    Raises:
        ArtifactError: there is no place for this rank's directory.
    """
    runtime = activate(
        RuntimeSettings(
            guard=settings.guard,
            guarded=GUARDED,
            audit="sections",
            judge=repeats,
            isolate=True,
            cache_root=settings.cache_root,
            bundle=settings.bundle,
            tables=shipped_tables(),
        )
    )
    if runtime.store is not None:
        # TileLang, which compiles FlashQLA, keeps its kernels beside this rank's others, not in a shared directory.
        os.environ.setdefault("TILELANG_CACHE_DIR", str(runtime.store.directory.path / "tilelang"))
        if settings.kernel == "te":  # the cuDNN frontend likewise; it keeps other operations' kernels there, too
            os.environ.setdefault("CUDNN_FRONTEND_COMPILED_CACHE", str(runtime.store.directory.path / "cudnn"))
    # Takes this rank's directory of artifacts away, too.
    atexit.register(runtime.deactivate)
    return runtime


def warm_up(
    runtime: Runtime,
    mixers: Iterable[MixerVariant],
    rows: Rows,
    device: torch.device,
    settings: Settings,
    say: Callable[[str], None],
) -> SteadyState:
    """Warm up and freeze. Every rank of the job calls it, also one without mixers.

    Args:
        runtime: from `take_over`.
        mixers: of this rank, on the kernels that `settings` asks for; "auto" means FLA's to begin with.
        rows: that the job will send.
        device: of the activations.
        settings: which kernels, and whether configs are tried in a process of their own.
        say: told what is being tuned, checked or compiled.

    Raises:
        AgreementError: a rank failed or went silent; the same error on all ranks, in bounded time.
        WrongResultsError, NoWorkingConfigError: on the rank whose kernels give wrong results whatever their configs.
    """
    variants = dict.fromkeys(mixers)
    tuned = [variant for variant in variants if variant.backend.name == "fla"]
    if settings.tune_in_child:
        runtime.tuning.elsewhere = _elsewhere(runtime, tuned, rows, device)

    def run_all() -> None:
        for variant in variants:
            rehearse(variant, rows, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    faster: dict[MixerVariant, Backend] = {}
    timings: Timings = {}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        with runtime.warmup(progress=say):
            run_all()
            if settings.kernel == "auto" and device.type == "cuda":
                faster, timings = choose_kernels(tuned, rows, device, runtime.share, runtime.say)
                # Those that lost stay in: their kernels go into the bundle, for the next start to measure again.
                variants |= dict.fromkeys(replace(variant, backend=backend) for variant, backend in faster.items())
                if faster:
                    run_all()
        checks = {
            str(variant): _golden(variant, rows, device) for variant in variants if variant.backend.name != "torch"
        }
        runtime.freeze(progress=say, checks=checks, again=run_all)
    calls.guard(runtime.section)
    runtime.tuning.elsewhere = None
    given_back = 0 if runtime.store is None else runtime.store.store.prune(keys_in_use(runtime.launching))
    torch.cuda.empty_cache()
    if any(variant.backend.name == "flash_qla" for variant in variants):
        atexit.register(watch_compilations(partial(_compiled_late, runtime)))
    return SteadyState(runtime, tuple(variants), faster, given_back, timings)


def _compiled_late(runtime: Runtime, kernel: str) -> None:
    if runtime.guard.frozen:
        runtime.guard.late_compile(f"flash_qla.{kernel}", "arguments that TileLang has no kernel for")


def _elsewhere(
    runtime: Runtime, variants: Sequence[MixerVariant], rows: Rows, device: torch.device
) -> Callable[[TuningKey], None]:
    outside = OutsideTuning(
        runtime.tuning,
        "fla_safe.gdn.steady.rehearsal:in_child",
        {"variants": [v.as_dict() for v in variants], "rows": rows.as_dict(), "device": device.index},
        {"guarded": GUARDED, "size_arguments": runtime.settings.size_arguments, "packages": runtime.settings.packages},
        directory=None if runtime.store is None else runtime.store.store.directory,
        tell=runtime.say,
        compile_threads=threads_of_this_rank(),
    )

    def tune(key: TuningKey) -> None:
        torch.cuda.empty_cache()  # the child needs room on the same device
        outside(key)

    return tune


def _golden(variant: MixerVariant, rows: Rows, device: torch.device) -> Check:
    """The check of one variant; what a table says was checked before is looked at once, not for repeats."""
    golden: list[GoldenCheck] = []

    def check(verified: bool) -> Verdict:
        if not golden:
            golden.append(GoldenCheck(variant, device, packed=rows.packed, batch=rows.batch))
        return golden[0](repeats=1 if verified else None)

    return check
