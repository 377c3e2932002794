"""Puts the check of `diagnosis.watch` on a model's GDN layers, with the names of what lies around each."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from fla_safe.diagnosis.watch import LayerSite, LayerWatch, Watch
from fla_safe.megatron.layer import SafeForward

__all__ = ["rank_in_words", "watch_layers"]


def watch_layers(models: Sequence[torch.nn.Module], watch: Watch) -> int:
    """Check every GDN layer of this rank's model chunks from now on; returns their number."""
    count = 0
    for chunk, model in enumerate(models):
        modules = dict(model.named_modules())
        for name, layer in modules.items():
            if isinstance(layer, SafeForward):
                prefix = f"chunk {chunk}: " if len(models) > 1 else ""
                LayerWatch(layer, _site(prefix + name, name, layer, modules), watch)
                count += 1
    return count


def rank_in_words(rank: int) -> str:
    """The rank in the job, and in the groups of Megatron's layout."""
    if not parallel_state.model_parallel_is_initialized():
        return f"rank {rank}"
    places = {
        "TP": parallel_state.get_tensor_model_parallel_rank(),
        "PP": parallel_state.get_pipeline_model_parallel_rank(),
        "CP": parallel_state.get_context_parallel_rank(),
        "DP": parallel_state.get_data_parallel_rank(),
    }
    return f"rank {rank} ({', '.join(f'{name} {place}' for name, place in places.items())})"


def _site(label: str, name: str, layer: Any, modules: dict[str, torch.nn.Module]) -> LayerSite:
    block_name, _, _ = name.rpartition(".")
    block, (list_name, _, index) = modules.get(block_name), block_name.rpartition(".")
    blocks = list(modules[list_name].children()) if index.isdigit() and list_name in modules else []
    at = int(index) if blocks else 0
    before = _block(blocks[at - 1]) if blocks and at > 0 else "the embedding or the pipeline stage before"
    after = _block(blocks[at + 1]) if blocks and at + 1 < len(blocks) else "the output layer or the next pipeline stage"
    mlp = getattr(block, "mlp", None)
    if mlp is not None:
        after = f"this layer's {type(mlp).__name__}, or {after}"
    split = layer.tp_size > 1 or layer.cp_size > 1
    number = getattr(block, "layer_number", None) or getattr(layer, "layer_number", None) or at + 1
    return LayerSite(label, int(number), before, f"{after}, or further on", split)


def _block(block: torch.nn.Module) -> str:
    parts = [getattr(block, name, None) for name in ("self_attention", "mlp")]
    kinds = " and ".join(type(part).__name__ for part in parts if part is not None) or type(block).__name__
    return f"layer {getattr(block, 'layer_number', '?')} ({kinds})"
