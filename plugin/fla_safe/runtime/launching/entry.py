"""Generates the Python function that a frozen kernel is called through.

It binds arguments by the interpreter's own means, reads of each tensor its address, dtype and device, looks the class
of the call up in one dictionary and enters the C launcher; whatever it does not recognise goes to `miss`. Generated
because a loop over arguments costs more than the launch: Triton binds arguments with a generated function, too.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from fla_safe.runtime.kernels import Kernel
from fla_safe.runtime.launching.plans import GENERAL, Form, NeedsArguments, Plan
from fla_safe.runtime.launching.shapes import CallShape, Kind, Value

__all__ = ["UNSET", "Entry", "generate"]

Entry = Callable[..., Any]


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"


UNSET = _Unset()
"""Default of every parameter: tells an argument that was left out from one that is None."""


def generate(
    kernel: Kernel,
    plans: Mapping[CallShape, Plan],
    positional: int,
    *,
    miss: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
    full_meta: bool,
    widen: Callable[[], None],
) -> Entry | None:
    """Entry `f(grid, *args, **kwargs)` for the planned classes; None when their arguments do not allow one.

    Args:
        positional: how many arguments callers pass by position.
        miss: takes over what is not planned, with grid, args and kwargs as the caller gave them.
        full_meta: grid functions get all arguments, not only constants.
        widen: told when a grid function turns out to need arguments.
    """
    kinds = [{shape.values[i].kind for shape in plans} for i in range(len(kernel.parameters))]
    if any(len(k) > 1 and not any(k <= together for together in _TOGETHER) for k in kinds):
        return None
    forms = {variant.form for plan in plans.values() for variant in plan.values()}
    form: Form = forms.pop() if len(forms) == 1 else "call"
    options = sorted({name for shape in plans for name, _ in shape.options})
    source = _source(kernel, kinds, positional, options, form, full_meta)
    space = _namespace(kernel, plans, kinds, options, form)
    space.update(miss=miss, widen=widen)
    space = {f"_fs_{name}": value for name, value in space.items()}
    exec(compile(source, f"<fla_safe launch of {kernel.name}>", "exec"), space)
    return space["_fs_launch"]  # type: ignore[no-any-return]


_TOGETHER: tuple[set[Kind], ...] = (
    {"none", "tensor"},
    {"none", "number"},
    {"constant", "absent"},
    {"dead", "absent"},
)
"""Kinds that one parameter may have in different calls."""


def _source(
    kernel: Kernel, kinds: list[set[Kind]], positional: int, options: list[str], form: Form, full_meta: bool
) -> str:
    """Text of the entry. Names of its own start with `@` here, so that no parameter of a kernel can shadow them."""
    names = [n for n, k in zip(kernel.parameters, kinds, strict=True) if k != {"absent"}]
    leading = list(kernel.parameters[:positional])
    keyword = [n for n in names if n not in leading] + options
    guards: list[str] = []
    key, pointers, sizes, floats, launched = ["@device"], [], [], [], []
    for i, (name, kind) in enumerate(zip(kernel.parameters, kinds, strict=True)):
        if "tensor" in kind:
            pointers.append(f"@p{i}")
            launched.append(f"@p{i}")
            if "none" in kind:
                guards += [
                    f"if {name} is None:",
                    f"    @p{i} = 0; @t{i} = @d{i} = None",
                    "else:",
                    f"    @p{i} = {name}.data_ptr(); @t{i} = {name}.dtype; @d{i} = {name}.get_device()",
                ]
                key += [f"@t{i}", f"@d{i}"]
            else:
                guards.append(f"@p{i} = {name}.data_ptr()")
                key += [f"{name}.dtype", f"{name}.get_device()"]
        elif kind == {"size"}:
            sizes.append(name)
            launched.append(name)
        elif kind == {"float"}:
            floats.append(name)
            launched.append(name)
        elif "number" in kind:
            key += [name, f"@type({name})"]
            launched.append(name)
        else:
            if kind & {"none", "constant"}:
                key.append(name)
            launched.append("None")
    key += options
    given = ", ".join(f"{n!r}: {n}" for n in [*leading, *keyword])
    head = ", ".join(
        ["@grid", *(f"{n}=@UNSET" for n in leading), "*@rest", *(f"{n}=@UNSET" for n in keyword), "**@more"]
    )
    call = f"return @miss(@grid, ({''.join(n + ', ' for n in leading)}*@rest,), {{{given}, **@more}})"
    awkward = f" if not ({' | '.join(pointers)}) & 15 else @awkward(@key, ({', '.join(pointers)},))" if pointers else ""
    known = f"{{{given}}}"
    if options or any("absent" in kind for kind in kinds):
        known = f"{{@n: @v for @n, @v in {known}.items() if @v is not @UNSET}}"
    meta = f"@meta.with_arguments({known})" if full_meta else "@meta"
    lines = [f"def @launch({head}):", "    try:"]
    lines += [f"        {line}" for line in guards]
    lines += ["        @device = @current_device()", f"        @key = ({', '.join(key)},)"]
    if sizes:
        # Sizes are 32-bit in every planned binary; a negative one is not planned for either.
        lines.append(f"        if ({' | '.join(sizes)}) >> 31: raise KeyError")
    # An integer or None in the place of a float is other code.
    lines += [f"        if @type({name}) is not @float: raise KeyError" for name in floats]
    lines += [
        f"        @variant = @usual[@key]{awkward}",
        "    except (KeyError, TypeError, AttributeError):",
        f"        {call}",
        "    if @rest or @more or @knobs.launch_enter_hook is not @enter or @knobs.launch_exit_hook is not @leave "
        "or @enter_calls or @leave_calls or @pre_run_hooks:",
        f"        {call}",
        f"    {_UNPACK[form]} = @variant",
        "    if callable(@grid):",
        "        try:",
        f"            @grid = @grid({meta})",
        "        except @NeedsArguments:",
        "            @widen()",
        f"            @grid = @grid(@meta.with_arguments({known}))",
        "    @n = len(@grid)",
        "    " + _LAUNCH[form].format(", ".join(launched)),
        "    return @compiled",
    ]
    return ("\n".join(lines) + "\n").replace("@", "_fs_")


_GRID = "@grid[0], @grid[1] if @n > 1 else 1, @grid[2] if @n > 2 else 1, @stream_of(@device)"
_UNPACK: dict[Form, str] = {
    "flat": "@run, @function, @cooperative, @pdl, @packed, @meta, @compiled",
    "tuple": "@run, @function, @cooperative, @pdl, @packed, @annotations, @signature, @meta, @compiled",
    "call": "@run, @function, @packed, @meta, @compiled",
}
_LAUNCH: dict[Form, str] = {
    "flat": f"@run({_GRID}, @function, @cooperative, @pdl, None, None, @packed, None, None, None, {{}})",
    "tuple": f"@run({_GRID}, @function, @cooperative, @pdl, @packed, None, None, None, None, None, @annotations, "
    "@signature, ({},))",
    "call": f"@run({_GRID}, @function, @packed, None, None, None, {{}})",
}


def _namespace(
    kernel: Kernel, plans: Mapping[CallShape, Plan], kinds: list[set[Kind]], options: list[str], form: Form
) -> dict[str, Any]:
    """Names that the generated code reads: the tables of variants, the device, the hooks to watch."""
    from triton import knobs
    from triton.runtime import driver

    usual: dict[Any, tuple[Any, ...]] = {}
    others: dict[Any, dict[int, tuple[Any, ...]]] = {}
    for shape, plan in plans.items():
        key = _key(shape, kinds, options)
        others[key] = {mask: variant.parts(form) for mask, variant in plan.items() if mask}
        if 0 in plan:
            usual[key] = plan[0].parts(form)

    where = [i for i, kind in enumerate(kinds) if "tensor" in kind]

    def awkward(key: Any, pointers: tuple[int, ...]) -> tuple[Any, ...]:
        mask = sum((pointer % 16 != 0) << i for i, pointer in zip(where, pointers, strict=True))
        variants = others[key]
        return variants.get(mask) or variants[GENERAL]

    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return {
        "UNSET": UNSET,
        "NeedsArguments": NeedsArguments,
        "usual": usual,
        "awkward": awkward,
        "knobs": knobs.runtime,
        "enter": enter,
        "leave": leave,
        "enter_calls": getattr(enter, "calls", ()),
        "leave_calls": getattr(leave, "calls", ()),
        "pre_run_hooks": kernel.jit.pre_run_hooks,
        "type": type,
        "float": float,
        "current_device": _device_function(driver.active.get_current_device),
        "stream_of": driver.active.get_current_stream,
    }


def _key(shape: CallShape, kinds: list[set[Kind]], options: Collection[str]) -> tuple[Any, ...]:
    """The tuple that generated code computes for a call of this class."""
    key: list[Any] = [shape.device]
    for value, kind in zip(shape.values, kinds, strict=True):
        if "tensor" in kind:
            key += value.value if value.kind == "tensor" else (None, None)
        elif "number" in kind:
            key += [value.value, type(value.value)]
        elif kind & {"none", "constant"}:
            key.append(_plain(value))
    given = dict(shape.options)
    return (*key, *(given.get(name, UNSET) for name in options))


def _plain(value: Value) -> Any:
    return UNSET if value.kind == "absent" else value.value


def _device_function(asked: Callable[[], int]) -> Callable[[], int]:
    """torch's C function under `torch.cuda.current_device`, whose lazy initialisation is over by now."""
    import torch

    if asked is torch.cuda.current_device and hasattr(torch._C, "_cuda_getDevice"):
        return torch._C._cuda_getDevice  # type: ignore[no-any-return]
    return asked
