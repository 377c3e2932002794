"""What a chunk kernel's backward pass leaves to be added up by whoever reads it next."""

from typing import NamedTuple

import torch

__all__ = ["KernelGrads"]


class KernelGrads(NamedTuple):
    """Gradients of a chunk kernel's inputs, in parts.

    Attributes:
        dq, dk: `[B, T, n * H, K]`: one gradient for each of the `n` value heads (or one in all) that share a key head.
        dv: `[B, T, HV, V]`.
        dg: `[B, T, HV]`, or `[m, B, T, HV]` of which the `m` are addends.
        dbeta: `[B, T, HV]`.
        dk2, dg2: further addends, shaped like dk and one dg.
        chunk: 0, or the chunk size within which dg is the gradient of the cumulated g: a row's own gradient is then the
            sum from the row to the last of its chunk. Chunks start with their segment.
    """

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dg: torch.Tensor
    dbeta: torch.Tensor
    dk2: torch.Tensor | None = None
    dg2: torch.Tensor | None = None
    chunk: int = 0
