"""The steps of FLA's gated delta rule, put together so that nothing is summed or kept that the mixer does not want.

FLA's own backward function sums the gradients of value heads that share a key head, adds second addends in launches
of their own, and holds every intermediate until it returns. Here sums are left to the kernel that reads the parts
(`KernelGrads`), intermediates die with their last reader, and under activation recomputation the states of the forward
pass go to the backward pass, which would compute them again.
"""

import ast
import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from textwrap import dedent
from types import FunctionType
from typing import Any, Final

import torch

from fla_safe.gdn.chunk.function import sum_heads
from fla_safe.gdn.chunk.grads import KernelGrads
from fla_safe.gdn.chunk.rebind import rebind, unwrap
from fla_safe.gdn.segments import CHUNK_SIZE

__all__ = ["FlaParts", "digest", "load_parts", "without"]

_NAMES: Final = {
    "cumulate": "chunk_local_cumsum",
    "intra": "chunk_gated_delta_rule_fwd_intra",
    "states": "chunk_gated_delta_rule_fwd_h",
    "output": "chunk_fwd_o",
    "representation": "recompute_w_u_fwd",
    "grad_values": "chunk_bwd_dv_local",
    "grad_states": "chunk_gated_delta_rule_bwd_dhu",
    "grad_inputs": "chunk_bwd_dqkwg",
    "grad_representation": "prepare_wy_repr_bwd",
}
"""Field of `FlaParts` -> function in `fla.ops.gated_delta_rule.chunk`."""

_SUMS: Final = {
    "grad_inputs": (
        "if H != HV:\n    dq = dq.view(B, T, H, HV // H, K).sum(3)\n    dk = dk.view(B, T, H, HV // H, K).sum(3)",
        "if dg is not None:\n    dg = dg.sum(0)",
    ),
    "grad_representation": ("if H != HV:\n    dk = dk.view(B, T, H, HV // H, K).sum(3)",),
}
"""Statements that are left out of FLA's host functions."""

_KNOWN: Final = {
    "chunk_gated_delta_rule_fwd": ("26fcd5225ae8d17e", "2d359437a4605c77"),
    "chunk_gated_delta_rule_bwd": ("cc890b53b111ae65", "38baaf43fbd7f147"),
}
"""FLA's functions that put the steps together -> `digest` of each text that `FlaParts` does the same as.

From fla-core 0.5.1, and from 0.5.2 and 0.6.0. Of another text nobody knows what it passes to the steps: 0.5.0 names the
base of the exponential to each.
"""


type Packing = Mapping[str, torch.Tensor | None]
"""The keyword arguments `cu_seqlens` and `chunk_indices`."""


@dataclass(frozen=True, slots=True)
class FlaParts:
    """Host functions of one FLA version, each of which launches kernels; see `_NAMES`. `base2`: 1 / ln 2."""

    base2: float
    cumulate: Callable[..., Any]
    intra: Callable[..., Any]
    states: Callable[..., Any]
    output: Callable[..., Any]
    representation: Callable[..., Any]
    grad_values: Callable[..., Any]
    grad_states: Callable[..., Any]
    grad_inputs: Callable[..., Any]
    grad_representation: Callable[..., Any]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float,
        packing: Packing,
        keep_states: bool,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The output, and `(cumulated g, A)`, followed by `(w, h, new v)` if `keep_states`."""
        cumulated = self.cumulate(g, chunk_size=CHUNK_SIZE, scale=self.base2, **packing)
        w, u, A = self.intra(k=k, v=v, g=cumulated, beta=beta, **packing)
        h, new_v, _ = self.states(k=k, w=w, u=u, g=cumulated, **packing)
        del u
        states = (w, h, new_v) if keep_states else ()
        del w
        return self.output(q=q, k=k, v=new_v, h=h, g=cumulated, scale=scale, **packing), (cumulated, A, *states)

    def backward(
        self, saved: tuple[torch.Tensor, ...], do: torch.Tensor, scale: float, packing: Packing
    ) -> KernelGrads:
        """`saved`: q, k, v, cumulated g, beta, A, and the states if the forward pass kept them."""
        q, k, v, g, beta, A, *states = saved
        if states:
            w, h, new_v = states
        else:
            w, u = self.representation(k=k, v=v, beta=beta, A=A, g=g, **packing)
            h, new_v, _ = self.states(k=k, w=w, u=u, g=g, **packing)
            del u
        dv = self.grad_values(q=q, k=k, g=g, do=do, scale=scale, **packing)
        dh, _, du = self.grad_states(q=q, k=k, w=w, g=g, do=do, dv=dv, scale=scale, **packing)
        del dv
        if not states:
            # Asked for its shape and dtype alone, those of dw: no memory, where the most is in use.
            w = w.new_empty(()).expand(w.shape)
        dq, dk, dw, dg = self.grad_inputs(q=q, k=k, v=new_v, do=do, h=h, dh=dh, w=w, g=g, dv=du, scale=scale, **packing)
        del w, h, new_v, dh
        dk2, dv, dbeta, dg2 = self.grad_representation(k=k, v=v, beta=beta, A=A, dw=dw, du=du, g=g, **packing)
        return KernelGrads(dq, dk, dv, dg, dbeta, dk2, dg2, CHUNK_SIZE)

    def total(
        self, grads: KernelGrads, key_heads: int, packing: Packing
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of q, k, v, g and beta from what `backward` returned, which is overwritten."""
        dq, dk, dv, dg, dbeta, dk2, dg2, _ = grads
        dg = dg[0] if dg.shape[0] == 1 else dg.sum(0)
        dg = self.cumulate(dg.add_(dg2), chunk_size=CHUNK_SIZE, reverse=True, **packing)  # type: ignore[arg-type]
        return sum_heads(dq, key_heads), sum_heads(dk.add_(dk2), key_heads), dv, dg, dbeta  # type: ignore[arg-type]


def load_parts(chunk: Any, replacements: Mapping[str, Any]) -> FlaParts | None:
    """The steps, or None if this FLA puts them together otherwise than the versions that we know.

    Args:
        chunk: module `fla.ops.gated_delta_rule.chunk`.
        replacements: as in `rebind`.
    """
    for name, known in _KNOWN.items():
        whole = unwrap(getattr(chunk, name, None))
        if not isinstance(whole, FunctionType) or digest(whole) not in known:
            return None
    found = {}
    for field, name in _NAMES.items():
        shorter = without(unwrap(getattr(chunk, name)), _SUMS.get(field, ()))
        if shorter is None:
            return None
        found[field] = rebind(shorter, replacements)
    return FlaParts(chunk.RCP_LN2, **found)


def digest(function: FunctionType) -> str | None:
    """Of a function's text, whatever its decorators, comments and white space; None without its text."""
    try:
        lines = inspect.getsource(function).splitlines()
    except OSError:
        return None
    first = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def "))
    text = "".join("".join(line.partition("#")[0].split()) for line in lines[first:])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def without(function: FunctionType, statements: tuple[str, ...]) -> FunctionType | None:
    """`function` without some statements of its body; None if one of them is not there exactly once."""
    if not statements:
        return function
    try:
        tree = ast.parse(dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    unwanted = sorted(ast.dump(ast.parse(statement).body[0]) for statement in statements)
    kept = [statement for statement in definition.body if ast.dump(statement) not in unwanted]
    if sorted(ast.dump(statement) for statement in definition.body if statement not in kept) != unwanted:
        return None
    definition.body, definition.decorator_list = kept, []
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)  # tracebacks show FLA's own lines
    scope: dict[str, Any] = {}
    exec(compile(tree, function.__code__.co_filename, "exec"), function.__globals__, scope)
    return scope[function.__name__]  # type: ignore[no-any-return]
