"""A tuning key, the config chosen for it, and the errors of tables that hold them."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from fla_safe.errors import FlaSafeError

__all__ = [
    "ConfigLike",
    "Decision",
    "Entry",
    "MergeConflictError",
    "Scalar",
    "Source",
    "TableError",
    "TableSchemaError",
    "TuningKey",
    "UnknownConfigError",
]

type Scalar = bool | int | float | str | None
Source = Literal["tuned", "shipped", "bundle", "agreed", "single"]

SIZE_ONLY = "*"
"""Value written in a key for an argument that only states the size of the problem and must not cause tuning."""


class TableError(FlaSafeError, ValueError):
    """Base of everything that can be wrong with a decision table. The job tunes instead of using it."""


class TableSchemaError(TableError):
    """The text is no decision table: not JSON, not UTF-8, wrong types, unknown fields, or its hash does not match."""


class UnknownConfigError(TableError):
    """A decision names a config that the kernel's own configuration space does not contain."""


class MergeConflictError(TableError):
    """Two tables decide differently for one key, and the policy is to refuse that."""


class ConfigLike(Protocol):
    """What is read from a `triton.Config`."""

    kwargs: dict[str, Any]
    num_warps: int
    num_stages: int
    num_ctas: int
    maxnreg: int | None


ConfigT = TypeVar("ConfigT", bound=ConfigLike)


@dataclass(frozen=True, slots=True, order=True)
class TuningKey:
    """A kernel and what its best config may depend on.

    Args:
        kernel: qualified name, `"module.function"`.
        parts: the autotuner's key, one `"name=value"` each in declaration order (`"NB=*"` for a size), then one
            `"argument:dtype"` for each tensor argument.
    """

    kernel: str
    parts: tuple[str, ...]

    @classmethod
    def of(
        cls,
        kernel: str,
        values: Mapping[str, object],
        dtypes: Mapping[str, object] | None = None,
        *,
        size_only: Collection[str] = (),
    ) -> "TuningKey":
        """Normalise an autotuner's key: `size_only` arguments become `*`, dtypes lose their library's prefix."""
        parts = [f"{name}={SIZE_ONLY if name in size_only else value}" for name, value in values.items()]
        parts += [f"{name}:{str(dtype).removeprefix('torch.')}" for name, dtype in (dtypes or {}).items()]
        return cls(kernel, tuple(parts))

    def as_dict(self) -> dict[str, object]:
        """Plain mapping for JSON."""
        return {"kernel": self.kernel, "parts": list(self.parts)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TuningKey":
        """The inverse of `as_dict`; unchecked."""
        return cls(data["kernel"], tuple(data["parts"]))

    def __str__(self) -> str:
        return f"{self.kernel}[{', '.join(self.parts)}]"


@dataclass(frozen=True, slots=True)
class Decision:
    """The fields of a `triton.Config` that decide the code (hooks belong to the kernel, not to the choice).

    Args:
        kwargs: meta-parameters, sorted by name.
        num_warps, num_stages, num_ctas: as in `triton.Config`.
        maxnreg: register limit a thread, or None.
    """

    kwargs: tuple[tuple[str, Scalar], ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1
    maxnreg: int | None = None

    @classmethod
    def from_config(cls, config: ConfigLike) -> "Decision":
        """Take the choice out of a `triton.Config`.

        Raises:
            UnknownConfigError: the config replaces the kernel's code (`ir_override`), which a table cannot carry.
        """
        if getattr(config, "ir_override", None):
            raise UnknownConfigError(
                f"a config with ir_override={getattr(config, 'ir_override', None)!r}",
                "configs that only set meta-parameters",
                "remove ir_override from the kernel's configs, or do not tune this kernel",
            )
        return cls(
            tuple(sorted(config.kwargs.items())),
            config.num_warps,
            config.num_stages,
            config.num_ctas,
            getattr(config, "maxnreg", None),
        )

    def as_kwargs(self) -> dict[str, Scalar]:
        """Keyword arguments of a launch, as `triton.Config.all_kwargs` gives them (None left out)."""
        rest = {
            "num_warps": self.num_warps,
            "num_ctas": self.num_ctas,
            "num_stages": self.num_stages,
            "maxnreg": self.maxnreg,
        }
        return dict(self.kwargs) | {k: v for k, v in rest.items() if v is not None}

    def as_dict(self) -> dict[str, object]:
        """Plain mapping for JSON."""
        return {
            "kwargs": dict(self.kwargs),
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "num_ctas": self.num_ctas,
            "maxnreg": self.maxnreg,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Decision":
        """The inverse of `as_dict`; unchecked."""
        return cls(**{**data, "kwargs": tuple(sorted(data["kwargs"].items()))})

    def select(self, configs: Iterable[ConfigT], kernel: str = "the kernel") -> ConfigT:
        """The kernel's own config object that this decision names.

        Raises:
            UnknownConfigError: `configs` holds none. A config that upstream does not offer is never made up, because
                upstream removes configs that miscompile.
        """
        offered = list(configs)
        for config in offered:
            if not getattr(config, "ir_override", None) and Decision.from_config(config) == self:
                return config
        raise UnknownConfigError(
            f"a decision for {kernel} names {self}",
            f"one of the {len(offered)} configs that the installed kernel offers",
            "use a table made with the installed version of the kernel's library, or let the job tune",
        )

    def __str__(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self.as_kwargs().items())


@dataclass(frozen=True, slots=True)
class Entry:
    """A decision and where it comes from. Only `decision` is part of the table's hash.

    Args:
        decision: the config.
        median_us: measured time of one launch in microseconds, if it was measured.
        verified: it passed the correctness and bitwise-repeat check of `repeats`.
        source: how it came into the table.
    """

    decision: Decision
    median_us: float | None = None
    verified: bool = False
    source: Source = "tuned"
