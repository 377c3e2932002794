"""From Megatron's `PackedSeqParams` to `PackedSegments`, once per micro-batch for all layers and recomputation."""

from dataclasses import dataclass
from typing import Any

import torch

from fla_safe.gdn.segments import OffsetsError, PackedSegments
from fla_safe.megatron.context_parallel import TokenOrder, token_order

__all__ = ["Packing", "packing_for", "prepare_before_forward"]

# Where the prepared value lives: on the micro-batch's own object, so that it dies with it.
ATTRIBUTE = "_fla_safe_packing"


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """What every GDN layer of a micro-batch shares.

    Attributes:
        segments: the pack's segments, None for an unpacked batch.
        order: token order under context parallelism, None without.
    """

    segments: PackedSegments | None
    order: TokenOrder | None


def packing_for(
    params: Any, *, total: int, batch: int, device: torch.device, context_parallel_size: int = 1
) -> Packing:
    """The micro-batch's `Packing`: prepared by the first caller (one device-to-host copy), then found on `params`.

    Args:
        params: Megatron's `PackedSeqParams`, or None for an unpacked batch.
        total: T, rows of the whole sequence over all context-parallel ranks.
        batch: B; must be 1 when packed.
        device: the activations' device.

    Raises:
        OffsetsError: `params` describes something that is not a pack of `total` rows.
        ContextParallelError: segments that Megatron cannot have divided over the group.
    """
    if params is None or getattr(params, "qkv_format", "thd") != "thd":
        return _unpacked(total, context_parallel_size, device)
    offsets = _offsets(params)
    known: Packing | None = getattr(params, ATTRIBUTE, None)
    if known is not None and known.segments is not None and batch == 1 and known.segments.matches(offsets, total):
        return known
    segments = PackedSegments.prepare(offsets, total, device=device, batch=batch)
    _check_keys_agree(params, offsets)
    order = None
    if context_parallel_size > 1:
        order = token_order(segments.offsets_host, context_parallel_size, device)
    packing = Packing(segments, order)
    setattr(params, ATTRIBUTE, packing)
    return packing


def prepare_before_forward(model: torch.nn.Module) -> None:
    """Prepare a micro-batch's segments when the model is entered, before work for this micro-batch is queued.

    The one device-to-host copy then waits for nothing; in the first GDN layer it would wait for the vision tower.
    """
    config: Any = model.config

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        params = kwargs.get("packed_seq_params")
        if params is None or getattr(params, "qkv_format", None) != "thd":
            return
        offsets = _offsets(params)
        total = getattr(params, "total_tokens", None)
        if total is not None:
            packing_for(
                params,
                total=int(total),
                batch=1,
                device=offsets.device,
                context_parallel_size=config.context_parallel_size,
            )

    model.register_forward_pre_hook(hook, with_kwargs=True)


_UNPACKED: dict[tuple[int, int, torch.device], Packing] = {}


def _unpacked(total: int, context_parallel_size: int, device: torch.device) -> Packing:
    if context_parallel_size == 1:
        return _PLAIN
    key = (total, context_parallel_size, device)
    packing = _UNPACKED.get(key)
    if packing is None:
        packing = Packing(None, token_order((0, total), context_parallel_size, device))
        if len(_UNPACKED) >= 16:
            _UNPACKED.clear()
        _UNPACKED[key] = packing
    return packing


_PLAIN = Packing(None, None)


def _offsets(params: Any) -> torch.Tensor:
    padded = getattr(params, "cu_seqlens_q_padded", None)
    offsets = padded if padded is not None else params.cu_seqlens_q
    if offsets is None:
        raise OffsetsError(
            "packed_seq_params (qkv_format 'thd') without cu_seqlens_q",
            "int32 offsets (0, ..., T)",
            "set cu_seqlens_q, or pass packed_seq_params=None for an unpacked batch",
        )
    return offsets


def _check_keys_agree(params: Any, offsets: torch.Tensor) -> None:
    padded = getattr(params, "cu_seqlens_kv_padded", None)
    keys = padded if padded is not None else getattr(params, "cu_seqlens_kv", None)
    if keys is None or keys is offsets:
        return
    # Runs once per micro-batch, right after the copy of the offsets: the device has nothing left to wait for.
    if keys.shape != offsets.shape or not torch.equal(keys, offsets):
        raise OffsetsError(
            "cu_seqlens_q and cu_seqlens_kv differ",
            "one list of segments: a recurrence has no separate keys",
            "pass the same offsets for queries and keys",
        )
