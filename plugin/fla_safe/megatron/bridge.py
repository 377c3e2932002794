"""GDN for mcore-bridge (ms-swift): the layer class, its swap in the model registry, and the check of a built model."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from fla_safe.errors import FlaSafeError, MissingDependencyError
from fla_safe.gdn.backends import require
from fla_safe.megatron.layer import SafeForward
from fla_safe.megatron.versions import check_versions
from fla_safe.settings import Settings

try:
    from mcore_bridge.model.modules import GatedDeltaNet as BridgeGatedDeltaNet
    from mcore_bridge.model.register import get_model_meta, register_model
    from transformer_engine.pytorch import fp8_autocast
except ImportError as error:
    raise MissingDependencyError(
        f"mcore-bridge does not import ({error})",
        "mcore-bridge>=1.6,<1.7 with TransformerEngine, or its stand-in on a machine without a GPU (FLA_SAFE_CPU=1)",
        "pip install 'fla-safe[train,gpu]'",
    ) from error

__all__ = [
    "NoGdnLayersError",
    "NotReplacedError",
    "SafeGatedDeltaNet",
    "TorchGatedDeltaNet",
    "safe_layers",
    "verify_model",
]


class NoGdnLayersError(FlaSafeError, ValueError):
    """`--gdn_impl` was given for a model without GDN layers, or whose GDN layers are not Megatron's."""


class NotReplacedError(FlaSafeError, RuntimeError):
    """A built model has GDN layers that are not this package's."""


class SafeGatedDeltaNet(SafeForward, BridgeGatedDeltaNet):  # type: ignore[misc, valid-type]
    """mcore-bridge's GDN: parameters per key head `[q k v z b a]`, names, LoRA and checkpoints as in that library."""

    layout_kind = "interleaved"

    def _project_in(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self.config.linear_decoupled_in_proj:
            return super()._project_in(hidden_states)
        qkvz, _ = self.in_proj_qkvz(hidden_states)
        with fp8_autocast(enabled=False) if self.config.fp8_param else nullcontext():
            ba, _ = self.in_proj_ba(hidden_states)
        heads = (*qkvz.shape[:-1], self._layout.key_heads, -1)
        return torch.cat((qkvz.view(heads), ba.view(heads)), dim=-1).flatten(-2)

    def _rank_slices(self, device: torch.device) -> tuple[torch.Tensor | None, Any, slice]:
        # Everything is ordered by key head, so a rank's part is contiguous.
        rank, layout = self.pg_collection.cp.rank(), self._mixer_layout
        channels = slice(rank * layout.conv_dim, (rank + 1) * layout.conv_dim)
        return None, channels, slice(rank * layout.value_heads, (rank + 1) * layout.value_heads)


class TorchGatedDeltaNet(SafeGatedDeltaNet):
    """The same layer on the plain-torch kernel."""

    kernel_name = "torch"


LAYERS: dict[str, type[SafeGatedDeltaNet]] = {"fla_safe": SafeGatedDeltaNet, "torch": TorchGatedDeltaNet}


def safe_layers(model_type: str, settings: Settings) -> AbstractContextManager[Any]:
    """Check that the swap can be made, and return a context in which mcore-bridge builds `model_type` with our layer.

    The context yields the model's changed registry entry (`ModelMeta`) and restores the registry on exit, so that a
    teacher or reference model built later without the flag is untouched.

    Raises:
        UnsupportedVersionError: see `check_versions`.
        NoGdnLayersError: `USE_MCORE_GDN=0`, or a model type without GDN layers.
        BackendError: `--gdn_kernel` names a kernel that cannot run here, whatever the model.
    """
    check_versions("megatron-core", "mcore-bridge", "fla-core")
    if settings.gdn_impl == "fla_safe" and settings.kernel != "auto":
        require(settings.kernel, "cuda" if torch.cuda.is_available() else "cpu")
    flag = f"--gdn_impl {settings.gdn_impl}"
    if not settings.mcore_gdn:
        raise NoGdnLayersError(
            f"{flag} with USE_MCORE_GDN=0", "Megatron's GDN layers", "unset USE_MCORE_GDN, or use --gdn_impl default"
        )
    meta = get_model_meta(model_type)
    current = getattr(meta.loader, "gated_delta_net", None)
    if current is None:
        raise NoGdnLayersError(
            f"{flag} for model type {model_type!r}, which has no GDN layers",
            "a hybrid model (Qwen3-Next, Qwen3.5)",
            "use --gdn_impl default",
        )
    layer = LAYERS[settings.gdn_impl]
    if current is not BridgeGatedDeltaNet and not issubclass(current, SafeGatedDeltaNet):
        raise NoGdnLayersError(
            f"{flag} for model type {model_type!r}, whose GDN class is {current.__module__}.{current.__qualname__}",
            "mcore-bridge's GatedDeltaNet",
            "unset USE_MCORE_GDN, or use --gdn_impl default for this model",
        )
    return _registered(meta, layer)


@contextmanager
def _registered(meta: Any, layer: type[SafeGatedDeltaNet]) -> Iterator[Any]:
    loader = type(f"FlaSafe{meta.loader.__name__}", (meta.loader,), {"gated_delta_net": layer})
    changed = dataclasses.replace(meta, loader=loader)
    register_model(changed, exist_ok=True)
    try:
        yield changed
    finally:
        register_model(meta, exist_ok=True)


def gdn_layers(models: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    """Every GDN layer, ours or not, of the model chunks of this rank, by what only GDN layers have."""
    return [
        (name, module)
        for model in models
        for name, module in model.named_modules()
        if hasattr(module, "A_log") and hasattr(module, "dt_bias")
    ]


def verify_model(models: Sequence[torch.nn.Module], settings: Settings) -> None:
    """Every GDN layer of this rank is ours, and the model as a whole has some (a pipeline stage may have none).

    Raises:
        NotReplacedError, NoGdnLayersError.
    """
    flag = f"--gdn_impl {settings.gdn_impl}"
    strangers = [
        f"{name} ({type(module).__module__}.{type(module).__qualname__})"
        for name, module in gdn_layers(models)
        if type(module) is not LAYERS[settings.gdn_impl]
    ]
    if strangers:
        raise NotReplacedError(
            f"{flag}, and these GDN layers are not ours: {', '.join(strangers)}",
            f"all of them {LAYERS[settings.gdn_impl].__qualname__}",
            "report this with the versions that `fla-safe doctor` prints",
        )
    # Asked of the configuration, not of this rank's layers: it is the same on all ranks.
    config: Any = models[0].config
    frequency = config.linear_attention_freq
    some = any(frequency) if isinstance(frequency, list | tuple) else bool(frequency and frequency > 1)
    if config.experimental_attention_variant != "gated_delta_net" or not some:
        raise NoGdnLayersError(f"{flag} for a model without GDN layers", "a hybrid model", "use --gdn_impl default")
