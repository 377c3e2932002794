"""Reads from a recipe's script what a warm-up must know: model, parallel sizes, rows."""

import re
from dataclasses import dataclass
from pathlib import Path

from fla_safe.preparation.models import UnknownModelError

__all__ = ["Plan", "read_recipe"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a job asks of its gated delta nets.

    Attributes:
        model: a name in `models.MODELS`.
        ranks: tensor times context parallel size.
        tokens: longest row T.
        batch: B; 1 when packed.
        packed: whether rows hold several segments (packs, or samples without padding).
    """

    model: str
    ranks: int
    tokens: int
    batch: int
    packed: bool


def read_recipe(script: Path) -> Plan:
    """Plan of a script that calls `megatron sft` with plain values, as those in `recipes/` do.

    Raises:
        UnknownModelError: there is no such script, or it does not say one of the values.
    """
    try:
        text = script.read_text()
    except OSError as error:
        raise UnknownModelError(f"recipe {script}: {error}", "a readable script", "correct the path") from error

    def value(flag: str, default: str | None = None) -> str:
        found = re.search(rf"--{flag}[ =]+([^\s\\]+)", text)
        if found is None and default is None:
            raise UnknownModelError(
                f"{script} does not say --{flag}", "a script with plain values", "give --model, --tp and --tokens"
            )
        return found.group(1) if found else str(default)

    # Without packing, Megatron-SWIFT still lays samples side by side, unless it is told not to.
    packed = "true" in (value("packing", "false").lower(), value("padding_free", "true").lower())
    micro_batch = _number(script, "micro_batch_size", value("micro_batch_size", "1"))
    flag = "packing_length" if re.search(r"--packing_length[ =]", text) else "max_length"
    longest = _number(script, flag, value(flag))
    ranks = _number(script, "tensor_model_parallel_size", value("tensor_model_parallel_size", "1"))
    ranks *= _number(script, "context_parallel_size", value("context_parallel_size", "1"))
    # ms-swift lays the packs of a micro-batch into one row (template/base.py, data_collator).
    tokens, batch = (longest * micro_batch, 1) if packed else (longest, micro_batch)
    return Plan(script.resolve().parent.name, ranks, tokens, batch, packed)


def _number(script: Path, flag: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise UnknownModelError(
            f"{script} says --{flag} {text}", "a whole number of at least 1", "give --model, --tp and --tokens"
        )
    return int(text)
