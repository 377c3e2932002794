"""Before training, runs every kernel variant that a model's GDN layers can meet: tuned, agreed, compiled, frozen."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from fla_safe.gdn.backends import Backend
from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.mixer import mixer
from fla_safe.gdn.segments import PackedSegments
from fla_safe.megatron.layer import SafeForward
from fla_safe.runtime import Runtime, RuntimeSettings, activate
from fla_safe.runtime.agreement import Agreement
from fla_safe.runtime.rank_store import RankStore, open_rank_store
from fla_safe.runtime.stamp import Stamp
from fla_safe.runtime.triton_cache import scope
from fla_safe.settings import Settings

__all__ = ["SteadyState", "Workload", "reach_steady_state"]

TABLES = Path(__file__).parents[1] / "tables"
# Only kernels of these packages are ours to answer for; others in the process keep Triton's own rules.
GUARDED = ("fla", "fla_safe")


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
        store: this rank's compiled kernels.
        table_hash: equal on all ranks of one GPU architecture.
        overruled: decisions of this rank that another rank's replaced.
    """

    runtime: Runtime
    store: RankStore
    table_hash: str
    overruled: int

    def report(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return self.runtime.report() | {
            "artifacts": {
                "directory": str(self.store.directory.path),
                "bundle": self.store.bundle_id,
                "refused": {path: str(error) for path, error in self.store.refused.items()},
            },
            "overruled": self.overruled,
        }


@dataclass(frozen=True, slots=True)
class _Variant:
    """Layers that run the same kernels with the same keys; `warm` needs no more than this."""

    layout: ProjectionLayout
    backend: Backend
    conv_width: int
    conv_bias: bool
    parameters: tuple[torch.dtype, ...]
    norm_eps: float
    use_qk_l2norm: bool
    zero_centered_norm: bool


def reach_steady_state(
    models: Sequence[torch.nn.Module],
    settings: Settings,
    workload: Workload,
    say: Callable[[str], None],
) -> SteadyState:
    """Warm up and freeze. Every rank of the job calls it, also one without GDN layers; models must be on their GPU.

    Args:
        models: this rank's model chunks.
        settings: guard mode, bundle and artifact directory.
        say: told what is being tuned or compiled.

    Raises:
        AgreementError: a rank failed or went silent; the same error on all ranks, in bounded time.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    stamp = Stamp.current()
    layers = [m for model in models for m in model.modules() if isinstance(m, SafeForward)]
    with Agreement.of_job() as agreement:
        store = open_rank_store(
            os.environ,
            stamp,
            cache_root=settings.artifacts,
            bundle=settings.bundle,
            tables=sorted(TABLES.glob("*.json")),
        )
        agreed: dict[str, Any] = {}

        def agree(table: Any) -> Any:
            result = agreement.agree(table, stamp)
            agreed.update(hash=result.hash, overruled=result.overruled)
            return result.table

        def progress(text: str) -> None:
            agreement.progress(text)
            say(text)

        runtime = activate(
            RuntimeSettings(guard=settings.guard, table=store.table, guarded=GUARDED, agree=agree, audit="sections")
        )
        with scope(), torch.random.fork_rng(devices=[device]):
            with runtime.warmup(progress=progress):
                for variant in dict.fromkeys(_variant(layer, workload, device) for layer in layers):
                    _warm(variant, workload, device)
                torch.cuda.synchronize()
            runtime.freeze(progress=progress)
    torch.cuda.empty_cache()
    for layer in layers:
        layer.section = runtime.section
    return SteadyState(runtime, store, agreed["hash"], agreed["overruled"])


def _variant(layer: SafeForward, workload: Workload, device: torch.device) -> _Variant:
    weight, bias, A_log, dt_bias = layer._mixer_parameters()
    return _Variant(
        layer._mixer_layout,
        layer.backend_for(device, workload.dtype),
        weight.shape[-1],
        bias is not None,
        (weight.dtype, A_log.dtype, dt_bias.dtype, layer.out_norm.weight.dtype),
        layer.out_norm.eps,
        layer.use_qk_l2norm,
        layer.out_norm.zero_centered_gamma,
    )


def _warm(variant: _Variant, workload: Workload, device: torch.device) -> None:
    """Forward and backward, plain and under recomputation, at the longest row and at rows of awkward lengths."""
    for tokens in dict.fromkeys((workload.tokens, 1, 63, 64, 65, 272)):
        if tokens > workload.tokens:
            continue
        segments = None
        if workload.packed:
            bounds = sorted({0, 1, tokens // 3, tokens // 2, tokens})
            offsets = torch.tensor(bounds, dtype=torch.int32, device=device)
            segments = PackedSegments.prepare(offsets, tokens, device=device)
        for recompute in (False, True):
            _run(variant, workload, tokens, segments, recompute, device)


def _run(
    variant: _Variant,
    workload: Workload,
    tokens: int,
    segments: PackedSegments | None,
    recompute: bool,
    device: torch.device,
) -> None:
    layout = variant.layout
    weight_dtype, A_dtype, bias_dtype, norm_dtype = variant.parameters

    def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_()

    proj = random(tokens, 1 if workload.packed else workload.batch, layout.proj_dim, dtype=workload.dtype)

    def forward(proj: torch.Tensor) -> torch.Tensor:
        return mixer(
            proj,
            layout=layout,
            conv_weight=random(layout.conv_dim, variant.conv_width, dtype=weight_dtype),
            conv_bias=random(layout.conv_dim, dtype=weight_dtype) if variant.conv_bias else None,
            A_log=random(layout.value_heads, dtype=A_dtype),
            dt_bias=random(layout.value_heads, dtype=bias_dtype),
            norm_weight=random(layout.value_dim, dtype=norm_dtype),
            norm_eps=variant.norm_eps,
            segments=segments,
            kernel=variant.backend,
            use_qk_l2norm=variant.use_qk_l2norm,
            zero_centered_norm=variant.zero_centered_norm,
        )

    out = checkpoint(forward, proj, use_reentrant=True) if recompute else forward(proj)
    out.sum().backward()
