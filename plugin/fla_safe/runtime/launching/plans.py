"""From a class of calls to the binaries that run it: what is compiled at the freeze, and how each is launched."""

from dataclasses import dataclass
from typing import Any, Literal

from fla_safe.runtime.kernels import Kernel
from fla_safe.runtime.launching.shapes import CallShape

__all__ = ["GENERAL", "Form", "Meta", "NeedsArguments", "Plan", "Variant", "build", "form_of", "variant_of"]

Form = Literal["flat", "tuple", "call"]
"""How the C launcher takes arguments: one by one (Triton up to 3.6), in a tuple (3.7 and later), or through Python."""

GENERAL = -1
"""Mask under which a plan keeps the binary that assumes no alignment."""


class NeedsArguments(Exception):
    """A grid function asked for something else than a constant of the binary."""


class Meta(dict[str, Any]):
    """Constants of a binary, for grid functions; made once. Any other question needs the call's arguments."""

    def __missing__(self, name: str) -> Any:
        raise NeedsArguments(name)

    def _ask(self, *_: Any, **__: Any) -> Any:
        raise NeedsArguments

    get = keys = values = items = copy = __iter__ = __contains__ = __len__ = __or__ = __ror__ = _ask  # type: ignore[assignment]

    def with_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """A plain mapping of constants and arguments, the arguments as the caller gave them."""
        return {**dict(dict.items(self)), **arguments}


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """One binary, ready to launch. `compiled` keeps its module loaded."""

    compiled: Any
    run: Any
    form: Form
    meta: Meta

    def parts(self, form: Form) -> tuple[Any, ...]:
        """Fields that a generated launcher of this form unpacks."""
        c, r = self.compiled, self.run
        if form == "flat":
            return (r.launch, c.function, r.launch_cooperative_grid, r.launch_pdl, c.packed_metadata, self.meta, c)
        if form == "tuple":
            head = (r.launch, c.function, r.launch_cooperative_grid, r.launch_pdl, c.packed_metadata)
            return (*head, r.arg_annotations, r.kernel_signature, self.meta, c)
        return (r, c.function, c.packed_metadata, self.meta, c)


Plan = dict[int, Variant]
"""Binaries of one class of calls by mask of misaligned tensors; mask 0 is the usual one."""


def form_of(run: Any) -> Form:
    """How this launcher object may be entered directly. Anything not known for certain is called as Triton calls it."""
    from triton.backends.nvidia.driver import CudaLauncher

    if type(run) is not CudaLauncher or getattr(run, "gsan_enabled", False):
        return "call"
    if getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1):
        return "call"
    if not all(hasattr(run, name) for name in ("launch", "launch_cooperative_grid", "launch_pdl")):
        return "call"
    return "tuple" if hasattr(run, "arg_annotations") and hasattr(run, "kernel_signature") else "flat"


def variant_of(kernel: Kernel, compiled: Any) -> Variant:
    """Load a compiled kernel on the current device and wrap it."""
    if hasattr(compiled, "result"):
        compiled = compiled.result()
    run = compiled.run  # loads the module
    names = kernel.parameters
    constants = {names[p[0]]: value for p, value in compiled.src.constants.items() if len(p) == 1}
    live = {n: v for n, v in constants.items() if n in kernel.constexprs and n not in kernel.dead}
    return Variant(compiled, run, form_of(run), Meta(live))


def build(kernel: Kernel, shape: CallShape, masks: set[int]) -> Plan:
    """Compile (or find in memory) the binaries of one class of calls on the current device.

    Args:
        masks: patterns of misaligned tensors that have been seen; 0 and the general binary are always made.
    """
    plan: Plan = {}
    for mask in sorted(masks | {0}):
        plan[mask] = variant_of(kernel, compile_only(kernel.outer, shape.arguments(kernel, mask)))
    metadata = plan[0].compiled.metadata
    options = {"num_warps": metadata.num_warps, "num_stages": metadata.num_stages, "num_ctas": metadata.num_ctas}
    if getattr(metadata, "maxnreg", None) is not None:
        options["maxnreg"] = metadata.maxnreg
    names = kernel.parameters
    constants = {names[p[0]]: value for p, value in plan[0].compiled.src.constants.items() if len(p) == 1}
    arguments = {**shape.general_arguments(kernel, constants), **options}
    plan[GENERAL] = variant_of(kernel, compile_only(kernel.jit, arguments))
    return plan


def compile_only(kernel: Any, arguments: dict[str, Any]) -> Any:
    """The binary that Triton would launch for these arguments."""
    return kernel.run(grid=(1, 1, 1), warmup=True, **arguments)
