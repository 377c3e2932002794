"""Swaps the GDN layer class before ms-swift builds a model, and verifies the built model on every rank."""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch

from fla_safe.settings import Settings, SettingsError

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
        if getattr(args, "gdn_impl", "default") == "default":
            _settings(args)  # refuses a flag that has no meaning without ours
            return build(args, hf_config)
        # Imported here: only a job that uses the flag pays for Megatron's imports, or learns that they fail.
        from fla_safe.megatron.bridge import safe_layers, verify_model
        from fla_safe.megatron.consensus import together
        from fla_safe.megatron.packing import prepare_before_forward
        from fla_safe.swift.callback import attach
        from fla_safe.swift.freeze import freeze_kernels

        with together("choosing the GDN layers"):
            settings = _settings(args)
            swap = safe_layers(args.megatron_model_meta.model_type, settings)
        with together("building the model"):
            with swap as meta:
                args.megatron_model_meta = meta
                models = build(args, hf_config)
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


def _settings(args: Any) -> Settings:
    impl, library = getattr(args, "gdn_impl", "default"), getattr(args, "bridge_backend", "mcore-bridge")
    if impl != "default" and library != "mcore-bridge":
        raise SettingsError(
            f"--gdn_impl {impl} with --bridge_backend {library}",
            "models that mcore-bridge builds",
            "drop --bridge_backend, or use --gdn_impl default",
        )
    return Settings.read(
        impl,
        kernel=getattr(args, "gdn_kernel", "auto"),
        # From a YAML file `off` comes as False.
        guard=getattr(args, "gdn_guard", "warn") or "off",
        check=getattr(args, "gdn_check", "off") or "off",
        bundle=getattr(args, "gdn_bundle", None),
        cache_root=getattr(args, "gdn_cache_root", None),
    )
