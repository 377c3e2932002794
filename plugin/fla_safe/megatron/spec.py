"""GDN for plain megatron-core: `gated_delta_net_spec(config)` is the ModuleSpec to use in place of Megatron's."""

from typing import Any

import torch

from fla_safe.errors import MissingDependencyError
from fla_safe.megatron.layer import SafeForward

try:
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_gated_delta_net_module_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet as CoreGatedDeltaNet
    from megatron.core.transformer.spec_utils import ModuleSpec
except ImportError as error:
    raise MissingDependencyError(
        f"megatron-core's GatedDeltaNet does not import ({error})",
        "megatron-core>=0.18,<0.20",
        "pip install 'fla-safe[train]'",
    ) from error

__all__ = ["SafeGatedDeltaNet", "TorchGatedDeltaNet", "gated_delta_net_spec"]


class SafeGatedDeltaNet(SafeForward, CoreGatedDeltaNet):  # type: ignore[misc, valid-type]
    """megatron-core's GDN: parameters `[q | k | v | z | beta | alpha]`, names and checkpoints as in that library."""

    layout_kind = "sectioned"

    def _rank_slices(self, device: torch.device) -> tuple[torch.Tensor | None, Any, slice]:
        rank, size = self.pg_collection.cp.rank(), self.cp_size
        if self._slices is None or self._slices[0].device != device:
            layout = self._layout
            qk, v, heads = layout.key_heads * layout.key_dim, layout.value_heads * layout.value_dim, layout.value_heads
            columns = _sorted_by_rank((qk, qk, v, v, heads, heads), size)
            channels = _sorted_by_rank((qk, qk, v), size).view(size, -1)[rank]
            self._slices = columns.to(device), channels.to(device)
        width = self._mixer_layout.value_heads
        return *self._slices, slice(rank * width, (rank + 1) * width)

    _slices: tuple[torch.Tensor, torch.Tensor] | None = None


class TorchGatedDeltaNet(SafeGatedDeltaNet):
    """The same layer on the plain-torch kernel."""

    kernel_name = "torch"


def _sorted_by_rank(sections: tuple[int, ...], ranks: int) -> torch.Tensor:
    """Index that regroups columns from section-major to rank-major order; every rank gets its part of each section."""
    starts = [sum(sections[:i]) for i in range(len(sections))]
    parts = [torch.arange(start, start + width).view(ranks, -1) for start, width in zip(starts, sections, strict=True)]
    return torch.cat(parts, dim=1).flatten()


def gated_delta_net_spec(config: Any, backend: Any = None, *, kernel: str = "auto") -> ModuleSpec:
    """The `self_attention` ModuleSpec for megatron-core's `gated_delta_net` variant, with this package's layer.

    Args:
        config: the `TransformerConfig` (`experimental_attention_variant="gated_delta_net"`).
        backend: megatron-core's BackendSpecProvider; None takes the one it would choose.
        kernel: "auto" (FLA's kernels on a GPU) or "torch".

    Example:
        >>> specs = get_transformer_block_with_experimental_attention_variant_spec(config)  # doctest: +SKIP
        >>> for layer in specs.layer_specs:  # doctest: +SKIP
        ...     if issubclass(layer.submodules.self_attention.module, GatedDeltaNet):
        ...         layer.submodules.self_attention = gated_delta_net_spec(config)
    """
    spec = (
        get_gated_delta_net_module_spec(config) if backend is None else get_gated_delta_net_module_spec(config, backend)
    )
    spec.module = TorchGatedDeltaNet if kernel == "torch" else SafeGatedDeltaNet
    return spec
