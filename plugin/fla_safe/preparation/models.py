"""Head counts of the public models with gated delta net layers."""

from dataclasses import dataclass
from typing import Final

from fla_safe.errors import FlaSafeError
from fla_safe.gdn.layout import ProjectionLayout

__all__ = ["MODELS", "Heads", "UnknownModelError", "heads_of"]


class UnknownModelError(FlaSafeError, ValueError):
    """No shape is known under this name."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Gated delta net heads of a whole model: H, HV, K, V, and the convolution's width W."""

    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    conv_width: int = 4

    def shard(self, ranks: int) -> ProjectionLayout:
        """Heads of one of `ranks` tensor (times context) parallel ranks, in mcore-bridge's order.

        Raises:
            UnknownModelError: the heads cannot be divided.
        """
        if self.key_heads % ranks or self.value_heads % ranks:
            raise UnknownModelError(
                f"{self.key_heads} key and {self.value_heads} value heads over {ranks} ranks",
                "a number of ranks that divides both",
                "lower the tensor parallel size",
            )
        return ProjectionLayout(
            "interleaved", self.key_heads // ranks, self.value_heads // ranks, self.key_dim, self.value_dim
        )


MODELS: Final = {
    # linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, linear_value_head_dim, linear_conv_kernel_dim.
    # 16, 32, 128, 128, 4 are the defaults of transformers' Qwen3NextConfig, Qwen3_5TextConfig and Qwen3_5MoeTextConfig;
    # the larger models' config.json say 48 or 64 value heads.
    "qwen3_5_4b": Heads(16, 32),
    "qwen3_5_9b": Heads(16, 32),
    "qwen3_5_27b": Heads(16, 48),
    "qwen3_5_35b_a3b": Heads(16, 32),
    "qwen3_5_122b_a10b": Heads(16, 64),
    "qwen3_5_397b_a17b": Heads(16, 64),
    "qwen3_next_80b_a3b": Heads(16, 32),
}
"""Name, as in `recipes/` -> heads."""


def heads_of(name: str) -> Heads:
    """Heads of a named model.

    Raises:
        UnknownModelError: there is none of that name.
    """
    try:
        return MODELS[name]
    except KeyError:
        raise UnknownModelError(
            f"model {name!r}", f"one of {', '.join(MODELS)}", "name one of these, or give --heads H,HV,K,V"
        ) from None
