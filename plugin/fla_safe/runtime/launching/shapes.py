"""The class of a call: everything about its arguments that decides which binary runs, and nothing that does not."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fla_safe.runtime.kernels import PINNED, Kernel

__all__ = ["AWKWARD", "CallShape", "Kind", "StandIn", "Value", "describe_call"]

Kind = Literal["absent", "dead", "constant", "tensor", "none", "number", "size", "float"]

AWKWARD = 7
"""An integer that belongs to no special class: not 1, not a multiple of 16."""
_AWKWARD_64, _AWKWARD_U64 = 2**32 + 7, 2**63 + 7


@dataclass(frozen=True, slots=True)
class Value:
    """One argument. `value` is the constant, the number, or for a tensor `(dtype, device index)`.

    `python_type` is that of a number: 1, 1.0 and True are equal, and different code (Triton itself takes equal
    constants for one).
    """

    kind: Kind
    value: Any = None
    python_type: type | None = None


class StandIn:
    """A pointer argument without memory: Triton specialises on it as on a tensor with this address."""

    __slots__ = ("address", "dtype")

    def __init__(self, dtype: Any, address: int) -> None:
        self.dtype = dtype
        self.address = address

    def data_ptr(self) -> int:
        """The made-up address."""
        return self.address


@dataclass(frozen=True, slots=True)
class CallShape:
    """One class of calls.

    Attributes:
        values: one for each parameter, in order.
        options: further keyword arguments of the call (`num_warps` and such), sorted.
        device: index of the device it ran on.
    """

    values: tuple[Value, ...]
    options: tuple[tuple[str, Any], ...]
    device: int

    def on(self, device: int) -> "CallShape":
        """The same call with its tensors on another device."""
        if device == self.device:
            return self
        moved = tuple(
            replace(v, value=(v.value[0], device)) if v.kind == "tensor" and v.value[1] == self.device else v
            for v in self.values
        )
        return replace(self, values=moved, device=device)

    def arguments(self, kernel: Kernel, mask: int = 0) -> dict[str, Any]:
        """Keyword arguments that make Triton build this class's binary; bit i of `mask` misaligns parameter i."""
        made: dict[str, Any] = dict(self.options)
        for i, (name, v) in enumerate(zip(kernel.parameters, self.values, strict=True)):
            if v.kind == "tensor":
                made[name] = StandIn(v.value[0], 1 if mask >> i & 1 else 16)
            elif v.kind == "dead":
                made[name] = PINNED
            elif v.kind == "none":
                made[name] = None
            elif v.kind == "float":
                made[name] = 0.5
            elif v.kind == "size":
                made[name] = AWKWARD
            elif v.kind != "absent":
                made[name] = v.value
        return made

    def general_arguments(self, kernel: Kernel, constants: Mapping[str, Any]) -> dict[str, Any]:
        """As `arguments`, of the class that assumes nothing; `constants` are all constexprs of the binary."""
        made = self.arguments(kernel, mask=-1)
        for name, v in zip(kernel.parameters, self.values, strict=True):
            if v.kind == "number" and v.python_type is int:
                made[name] = _awkward(v.value)
        made.update({name: value for name, value in constants.items() if name in kernel.constexprs})
        return made


def describe_call(kernel: Kernel, named: Mapping[str, Any], device: int) -> tuple[CallShape, int] | None:
    """Class of a call and the mask of its misaligned parameters (bit i for parameter i).

    None when an argument is of a kind that is not planned for.

    Args:
        named: the call's arguments by name, options included, before heuristics and config add theirs.
    """
    from torch import Tensor

    values: list[Value] = []
    mask = 0
    for i, (name, parameter) in enumerate(zip(kernel.parameters, kernel.jit.params, strict=True)):
        if name not in named:
            if name not in kernel.constexprs:
                return None  # its default, or what a heuristic makes, is an argument of the launch all the same
            values.append(Value("absent"))
            continue
        value = named[name]
        if name in kernel.dead:
            values.append(Value("dead"))
        elif name in kernel.constexprs:
            values.append(Value("constant", value))
        elif isinstance(value, Tensor):
            mask |= (value.data_ptr() % 16 != 0) << i
            values.append(Value("tensor", (value.dtype, value.get_device())))
        elif value is None:
            values.append(Value("none"))
        elif type(value) is int:
            exact = name in kernel.exact or not parameter.do_not_specialize
            small = -(2**31) <= value < 2**31
            if not exact and not small:
                return None
            values.append(Value("number", value, int) if exact else Value("size"))
        elif type(value) is bool:
            values.append(Value("number", value, bool))
        elif type(value) is float:
            values.append(Value("number", value, float) if name in kernel.exact else Value("float"))
        else:
            return None
    options = tuple(sorted((k, v) for k, v in named.items() if k not in kernel.parameters))
    shape = CallShape(tuple(values), options, device)
    try:
        hash(shape)
    except TypeError:
        return None
    return shape, mask


def _awkward(like: int) -> int:
    """An integer of no special class that Triton passes in as many bits as `like`."""
    if -(2**31) <= like < 2**31:
        return AWKWARD
    return _AWKWARD_64 if like < 2**63 else _AWKWARD_U64
