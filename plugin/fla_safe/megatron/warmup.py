"""Before training, brings every GDN layer of a model to the steady state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fla_safe.gdn.steady.rehearsal import Rows
from fla_safe.gdn.steady.state import SteadyState
from fla_safe.gdn.steady.warmup import take_over, warm_up
from fla_safe.gdn.variant import MixerVariant
from fla_safe.megatron.consensus import together
from fla_safe.megatron.layer import SafeForward
from fla_safe.settings import Settings

__all__ = ["Workload", "reach_steady_state"]


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


def reach_steady_state(
    models: Sequence[torch.nn.Module],
    settings: Settings,
    workload: Workload,
    say: Callable[[str], None],
    *,
    device: torch.device | None = None,
    earlier: SteadyState | None = None,
) -> SteadyState:
    """Warm up and freeze. Every rank of the job calls it, also one without GDN layers; models must be on their GPU.

    Args:
        models: this rank's model chunks.
        settings: guard mode, bundle and artifact directory.
        say: told what is being tuned, checked or compiled.
        device: of the activations; None is the current CUDA device.
        earlier: of another model in this process, whose kernels are to stay.

    Raises:
        AgreementError: a rank failed or went silent; the same error on all ranks, in bounded time.
        WrongResultsError, NoWorkingConfigError: on the rank whose kernels give wrong results whatever their configs.
    """
    device = device or torch.device("cuda", torch.cuda.current_device())
    layers = [m for model in models for m in model.modules() if isinstance(m, SafeForward)]
    for layer in layers:
        if settings.kernel != "auto" and layer.kernel_name == "auto":
            layer.kernel_name = settings.kernel
    with together("taking over Triton"):
        runtime = take_over(settings)
    with together("resolving the GDN kernels"):
        variant_of = {id(layer): _variant(layer, workload, device) for layer in layers}
    rows = Rows(workload.tokens, workload.batch, workload.packed)
    steady = warm_up(runtime, variant_of.values(), rows, device, settings, say)
    if earlier is not None:
        # A policy and its reference must not run on two kernels because these measured differently the second time.
        chosen = {variant: kernel for variant, kernel in steady.faster.items() if variant not in earlier.variants}
        variants = tuple(dict.fromkeys((*earlier.variants, *steady.variants)))
        steady = replace(steady, variants=variants, faster={**earlier.faster, **chosen})
    for layer in layers:
        layer.section = runtime.section
        backend = steady.faster.get(variant_of[id(layer)])
        if backend is not None:
            layer._backend = backend
    return steady


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
