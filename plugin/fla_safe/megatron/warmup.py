"""Before training, runs every kernel variant that a model's GDN layers can meet: tuned, checked, agreed, frozen."""

import atexit
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fla_safe.gdn.flash_qla import watch_compilations
from fla_safe.gdn.rehearsal import GUARDED, Rows, rehearse, repeats
from fla_safe.gdn.variant import MixerVariant
from fla_safe.gdn.verify import GoldenCheck, Verdict
from fla_safe.megatron.consensus import together
from fla_safe.megatron.kernel_choice import Timings, choose_kernels
from fla_safe.megatron.layer import SafeForward
from fla_safe.runtime import Runtime, RuntimeSettings, activate
from fla_safe.runtime.artifacts.kept import keys_in_use, save_bundle
from fla_safe.runtime.launching.ahead import threads_of_this_rank
from fla_safe.runtime.tuning.keys import TuningKey
from fla_safe.runtime.tuning.outside import OutsideTuning
from fla_safe.runtime.tuning.settle import Check
from fla_safe.settings import Settings

__all__ = ["SteadyState", "Workload", "reach_steady_state"]

TABLES = Path(__file__).parents[1] / "tables"


@dataclass(frozen=True, slots=True)
class Workload:
    """What a job will ask of its GDN layers.

    Attributes:
        tokens: longest row T, over all context-parallel ranks.
        batch: B; 1 when packed.
        packed: whether rows hold several segments.
        dtype: of the activations.
    """

    tokens: int
    batch: int
    packed: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class SteadyState:
    """A process after the freeze.

    Attributes:
        runtime: counters and report.
        variants: kinds of GDN layers on this rank.
        given_back: bytes of artifacts of configs that lost.
        timings: of chunk kernels that competed.
    """

    runtime: Runtime
    variants: tuple[MixerVariant, ...]
    given_back: int
    timings: Timings

    @property
    def table_hash(self) -> str:
        """Equal on all ranks of one GPU architecture."""
        return self.runtime.table.hash()

    @property
    def learned(self) -> bool:
        """Whether anything was tuned or compiled that a bundle would have spared."""
        store = self.runtime.store
        counts = None if store is None else store.store.counts
        return bool(self.runtime.tuning.rounds or (counts is not None and counts.written > counts.seeded))

    @property
    def writes_bundle(self) -> bool:
        """Whether this is the first rank of its GPU architecture that has GDN layers' decisions to save."""
        agreed = self.runtime.agreed
        ranks = [] if agreed is None else agreed.ranks.get(self.runtime.stamp.arch, ())
        return _rank() in ranks[:1]

    def save_bundle(self, directory: Path) -> Path:
        """Write decisions and kernels as `gdn_bundle.fsb`; with several GPU architectures in the job, one for each.

        Raises:
            BundleError: the file cannot be written.
        """
        agreed, store = self.runtime.agreed, self.runtime.store
        assert agreed is not None
        assert store is not None
        name = "gdn_bundle.fsb" if len(agreed.ranks) == 1 else f"gdn_bundle_{self.runtime.stamp.arch}.fsb"
        save_bundle(directory / name, self.runtime.table, store.store)
        return directory / name

    def report(self) -> dict[str, Any]:
        """JSON-serialisable."""
        table = self.runtime.table
        return self.runtime.report() | {
            "variants": [str(variant) for variant in self.variants],
            "kernel_timings_ms": self.timings,
            "unverified": [str(key) for key in table if not (entry := table.entry(key)) or not entry.verified],
        }


def reach_steady_state(
    models: Sequence[torch.nn.Module],
    settings: Settings,
    workload: Workload,
    say: Callable[[str], None],
    *,
    device: torch.device | None = None,
) -> SteadyState:
    """Warm up and freeze. Every rank of the job calls it, also one without GDN layers; models must be on their GPU.

    Args:
        models: this rank's model chunks.
        settings: guard mode, bundle and artifact directory.
        say: told what is being tuned, checked or compiled.
        device: of the activations; None is the current CUDA device.

    Raises:
        AgreementError: a rank failed or went silent; the same error on all ranks, in bounded time.
        WrongResultsError, NoWorkingConfigError: on the rank whose kernels give wrong results whatever their configs.
    """
    device = device or torch.device("cuda", torch.cuda.current_device())
    layers = [m for model in models for m in model.modules() if isinstance(m, SafeForward)]
    for layer in layers:
        if settings.kernel != "auto" and layer.kernel_name == "auto":
            layer.kernel_name = settings.kernel
    rows = Rows(workload.tokens, workload.batch, workload.packed)
    with together("taking over Triton"):
        runtime = activate(
            RuntimeSettings(
                guard=settings.guard,
                guarded=GUARDED,
                audit="sections",
                judge=repeats,
                isolate=True,
                cache_root=settings.cache_root,
                bundle=settings.bundle,
                tables=sorted(TABLES.glob("*.json")),
            )
        )
    _isolate_tilelang(runtime)
    with together("resolving the GDN kernels"):
        variant_of = {id(layer): _variant(layer, workload, device) for layer in layers}
    variants = dict.fromkeys(variant_of.values())
    tuned = [variant for variant in variants if variant.backend.name == "fla"]
    if settings.tune_in_child:
        runtime.tuning.elsewhere = _elsewhere(runtime, tuned, rows, device)
    # Takes this rank's directory of artifacts away, too.
    atexit.register(runtime.deactivate)

    def run_all() -> None:
        for variant in variants:
            rehearse(variant, rows, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    timings: Timings = {}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        with runtime.warmup(progress=say):
            run_all()
            if settings.kernel == "auto" and device.type == "cuda":
                faster, timings = choose_kernels(tuned, rows, device, runtime.share, runtime.say)
                for layer in layers:
                    if (backend := faster.get(variant_of[id(layer)])) is not None:
                        layer._backend = backend
                # Those that lost stay in: their kernels go into the bundle, for the next start to measure again.
                variants |= dict.fromkeys(replace(variant, backend=backend) for variant, backend in faster.items())
                if faster:
                    run_all()
        checks = {
            str(variant): _golden(variant, rows, device) for variant in variants if variant.backend.name != "torch"
        }
        runtime.freeze(progress=say, checks=checks, again=run_all)
    runtime.tuning.elsewhere = None
    given_back = 0 if runtime.store is None else runtime.store.store.prune(keys_in_use(runtime.launching))
    torch.cuda.empty_cache()
    for layer in layers:
        layer.section = runtime.section
    if any(variant.backend.name == "flash_qla" for variant in variants):
        atexit.register(watch_compilations(partial(_compiled_late, runtime)))
    return SteadyState(runtime, tuple(variants), given_back, timings)


def _isolate_tilelang(runtime: Runtime) -> None:
    """TileLang, which compiles FlashQLA, keeps its kernels beside this rank's others, not in a shared directory."""
    if runtime.store is not None:
        os.environ.setdefault("TILELANG_CACHE_DIR", str(runtime.store.directory.path / "tilelang"))


def _compiled_late(runtime: Runtime, kernel: str) -> None:
    if runtime.guard.frozen:
        runtime.guard.late_compile(f"flash_qla.{kernel}", "arguments that TileLang has no kernel for")


def _variant(layer: SafeForward, workload: Workload, device: torch.device) -> MixerVariant:
    weight, bias, A_log, dt_bias = layer._mixer_parameters()
    return MixerVariant(
        layer._mixer_layout,
        layer.backend_for(device, workload.dtype),
        workload.dtype,
        weight.shape[-1],
        bias is not None,
        (weight.dtype, A_log.dtype, dt_bias.dtype, layer.out_norm.weight.dtype),
        layer.out_norm.eps,
        layer.use_qk_l2norm,
        layer.out_norm.zero_centered_gamma,
    )


def _elsewhere(
    runtime: Runtime, variants: Sequence[MixerVariant], rows: Rows, device: torch.device
) -> Callable[[TuningKey], None]:
    outside = OutsideTuning(
        runtime.tuning,
        "fla_safe.gdn.rehearsal:in_child",
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


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
