"""`torch.compile` whose graphs are looked at: one graph without a break, the fused attention in it, no score matrix."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch._dynamo
import torch._functorch.config
from functorch.compile import make_boxed_func
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from fla_safe.errors import FlaSafeError

__all__ = ["Compiled", "Compiler", "GraphBreakError", "NotCompiledError", "ScoresHeldError", "Seen", "no_more_graphs"]

Compiler = Literal["inductor", "aot_eager"]


class GraphBreakError(FlaSafeError, RuntimeError):
    """The drafter does not compile to one graph; flex_attention would run eagerly and hold every score."""


class NotCompiledError(FlaSafeError, RuntimeError):
    """The drafter ran, but not as the compiled graphs with fused attention that it was meant to run as."""


class ScoresHeldError(FlaSafeError, RuntimeError):
    """A compiled graph holds a tensor as large as the scores of all queries and keys."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One compiled graph.

    Attributes:
        backward: which of the two passes it is.
        calls: names of the operators in it.
        largest: elements of the largest tensor that it computes or is given.
        shape: of that tensor.
    """

    backward: bool
    calls: frozenset[str]
    largest: int
    shape: tuple[int, ...]


class Compiled:
    """A function compiled as a whole, with fixed shapes.

    Args:
        function: a function of tensors and modules that returns a loss; one for all threads and devices.
        compiler: "aot_eager" makes the same two graphs and runs them operator by operator: no C++ or Triton compiler.
        fused: name of the operator that must be in the forward graph, and as `<name>_backward` in the backward graph;
            "" for none.
        variants: how many shapes and devices it will be compiled for.
        limit: elements that no tensor of a graph may reach (`Sizes.largest`).
    """

    def __init__(
        self,
        function: Callable[..., torch.Tensor],
        *,
        compiler: Compiler,
        fused: str = "",
        limit: int = 2**62,
        variants: int = 1,
    ) -> None:
        self.compiler: Compiler = compiler
        self.fused = fused
        self.limit = limit
        self.seen: list[Seen] = []
        self._lock = threading.Lock()
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, variants)
        self._function = torch.compile(function, backend=self._backend, fullgraph=True, dynamic=False)

    def __call__(self, *args: Any) -> torch.Tensor:
        """Run it.

        Raises:
            GraphBreakError: something in the function cannot be part of a graph.
            ScoresHeldError: see there; raised when the graph is made.
        """
        try:
            return self._function(*args)
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, FlaSafeError):
                raise error.inner_exception from None
            raise
        except Unsupported as error:
            reason = str(error).strip().splitlines()
            raise GraphBreakError(
                f"the drafter's graph breaks: {reason[0] if reason else type(error).__name__}",
                "one graph for the whole drafter, or flex_attention may run eagerly and hold every score",
                "take out of the drafter what TORCH_LOGS=graph_breaks names",
            ) from error

    def require(self) -> None:
        """Check, after a first forward and backward pass, that they ran as compiled graphs with fused attention.

        Raises:
            NotCompiledError: no graph was made, or one without the fused operator.
        """
        for backward in (False, True):
            wanted = self.fused and f"{self.fused}{'_backward' if backward else ''}"
            graphs = [seen for seen in self.seen if seen.backward == backward]
            lacking = [seen for seen in graphs if wanted and wanted not in seen.calls]
            if not graphs or lacking:
                which = "backward" if backward else "forward"
                raise NotCompiledError(
                    f"the drafter's {which} pass ran without {wanted if lacking else 'a compiled graph'}",
                    "a compiled graph for each pass" + (f" with {wanted} in it" if wanted else ""),
                    "unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE, and keep torch.compiler.disable out of it",
                )

    @property
    def largest(self) -> Seen:
        """The graph with the largest tensor."""
        return max(self.seen, key=lambda seen: seen.largest)

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        # Graphs that come from a cache are not shown to `inner`; Inductor's own cache below it stays on.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(graph, inputs, inner_compile=self._inner)

    def _inner(self, graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        seen = _look(graph, backward=bool(options.get("is_backward")))
        with self._lock:
            self.seen.append(seen)
        if seen.largest >= self.limit:
            raise ScoresHeldError(
                f"the {'backward' if seen.backward else 'forward'} graph holds a tensor {list(seen.shape)}",
                f"no tensor of {self.limit} elements, as the scores of all heads, queries and keys would be",
                "attend with flex_attention inside the compiled function",
            )
        if self.compiler == "aot_eager":
            return make_boxed_func(graph.forward)
        return compile_fx_inner(graph, inputs, **options)


@contextmanager
def no_more_graphs() -> Iterator[None]:
    """Within it a call that would be compiled raises, in all threads: the stance is the process's."""
    with torch.compiler.set_stance("fail_on_recompile"):
        yield


def _look(graph: torch.fx.GraphModule, *, backward: bool) -> Seen:
    calls: set[str] = set()
    largest = 0
    shape: tuple[int, ...] = ()
    for node in graph.graph.nodes:
        if node.op == "call_function":
            calls.add(getattr(node.target, "__name__", str(node.target)).split(".")[0])
        values = node.meta.get("val")
        for value in values if isinstance(values, (list, tuple)) else [values]:
            if isinstance(value, torch.Tensor) and int(value.numel()) > largest:
                largest, shape = int(value.numel()), tuple(int(n) for n in value.shape)
    return Seen(backward, frozenset(calls), largest, shape)
