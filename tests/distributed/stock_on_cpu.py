"""ms-swift plugin: lets mcore-bridge's own GDN layer run on a CPU, where FLA's kernels cannot.

The three functions that the layer's module takes from FLA are replaced by plain-torch ones of the same signatures; the
layer itself, its gathering, scattering and projections, stays as it is.
"""

from typing import Any

import mcore_bridge.model.modules.gated_delta_net as stock
import torch

from fla_safe.gdn import ops
from fla_safe.gdn.segments import PackedSegments


def segments_of(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> PackedSegments | None:
    return None if cu_seqlens is None else PackedSegments.prepare(cu_seqlens, x.shape[1])


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: Any = None, activation: Any = None, cu_seqlens: Any = None
) -> tuple[torch.Tensor, None]:
    assert activation == "silu"
    return ops.causal_conv1d(x, weight, bias, segments=segments_of(x, cu_seqlens)), None


def chunk_gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, g: Any, beta: Any, cu_seqlens: Any = None, **rest: Any
) -> tuple[torch.Tensor, None]:
    assert not any(rest.values()), rest
    return ops.gated_delta_rule(q, k, v, g, beta, segments=segments_of(q, cu_seqlens)), None


stock.causal_conv1d, stock.l2norm, stock.chunk_gated_delta_rule = causal_conv1d, ops.l2norm, chunk_gated_delta_rule
