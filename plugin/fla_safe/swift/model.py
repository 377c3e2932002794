"""Swaps the GDN layer class before ms-swift builds a model, and verifies the built model on every rank."""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch

from fla_safe.settings import Settings

__all__ = ["register"]


def register(module: ModuleType) -> None:
    """Wrap `get_mcore_model`, through which trainers, reference and teacher models, export and Ray build.

    Args:
        module: `swift.megatron.model.utils`, just executed; its users import the name after this.
    """
    module.get_mcore_model = _wrap(module.get_mcore_model)  # type: ignore[attr-defined]


def _wrap(build: Callable[..., list[torch.nn.Module]]) -> Callable[..., list[torch.nn.Module]]:
    @wraps(build)
    def get_mcore_model(args: Any, hf_config: Any) -> list[torch.nn.Module]:
        settings = Settings.read(
            getattr(args, "gdn_impl", "default"),
            kernel=getattr(args, "gdn_kernel", "auto"),
            guard=getattr(args, "gdn_guard", "warn"),
            check=getattr(args, "gdn_check", "off"),
            bundle=getattr(args, "gdn_bundle", None),
            cache_root=getattr(args, "gdn_cache_root", None),
        )
        if settings.gdn_impl == "default":
            return build(args, hf_config)
        # Imported here: only a job that uses the flag pays for Megatron's imports, or learns that they fail.
        from fla_safe.megatron.bridge import safe_layers, verify_model
        from fla_safe.megatron.consensus import together
        from fla_safe.megatron.packing import prepare_before_forward
        from fla_safe.swift.callback import attach
        from fla_safe.swift.freeze import freeze_kernels

        with together("choosing the GDN layers"):
            swap = safe_layers(args.megatron_model_meta.model_type, settings)
        with swap as meta:
            args.megatron_model_meta = meta
            models = build(args, hf_config)
        with together("checking the built model"):
            verify_model(models, settings)
        for model in models:
            prepare_before_forward(model)
        freeze_kernels(args, models, settings)
        if settings.check != "off":
            from fla_safe.swift.checking import check_layers

            check_layers(args, models, settings)
        attach(args)
        return models

    return get_mcore_model
