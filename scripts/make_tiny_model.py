"""Makes a tiny random Qwen3.5 or Qwen3-Next checkpoint, with tokenizer, processor and chat template."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

__all__ = ["CHAT_TEMPLATE", "Family", "Sizes", "make_tiny_model"]

Family = Literal["qwen3_5_moe", "qwen3_5", "qwen3_next"]

# The real vocabulary's size and special ids: ms-swift's templates look images up by the number.
VOCABULARY = 248320
SPECIAL_TOKENS = {
    "<|endoftext|>": 248044,
    "<|im_start|>": 248045,
    "<|im_end|>": 248046,
    "<|vision_start|>": 248053,
    "<|vision_end|>": 248054,
    "<|vision_pad|>": 248055,
    "<|image_pad|>": 248056,
    "<|video_pad|>": 248057,
    "<think>": 248068,
    "</think>": 248069,
}
MERGES = 1500

CHAT_TEMPLATE = """\
{%- macro render(content) -%}
{%- if content is string -%}{{ content | trim }}
{%- else -%}{%- for part in content -%}
{%- if part.type == 'image' or 'image' in part -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' or 'video' in part -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}{{ part.text }}
{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + render(message.content) + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What makes a model tiny; the defaults train on two CPU cores.

    Attributes:
        hidden: width of the residual stream.
        layers: layers in all; every fourth is full attention, the others are GDN.
        heads, kv_heads, head_dim: of full attention; heads must be a multiple of kv_heads, head_dim of 8.
        key_heads, value_heads, gdn_dim: of GDN; value_heads must be a multiple of key_heads.
        experts, expert_hidden, top_k: of the MoE families.
        vision_layers, vision_hidden: of the vision tower; vision_hidden must be a multiple of 8.

    Raises:
        ValueError: sizes that make no model.
    """

    hidden: int = 64
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    key_heads: int = 2
    value_heads: int = 4
    gdn_dim: int = 16
    experts: int = 4
    expert_hidden: int = 32
    top_k: int = 2
    vision_layers: int = 1
    vision_hidden: int = 32

    def __post_init__(self) -> None:
        sizes = asdict(self)
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}={size}: expected at least 1")
        for name, of in (("value_heads", "key_heads"), ("heads", "kv_heads")):
            if sizes[name] % sizes[of]:
                raise ValueError(f"{name}={sizes[name]}: expected a multiple of {of}={sizes[of]}")
        for name in ("head_dim", "vision_hidden"):  # a quarter is rotated in pairs; two heads, each half rotated
            if sizes[name] % 8:
                raise ValueError(f"{name}={sizes[name]}: expected a multiple of 8")
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k}: expected at most experts={self.experts}")


def make_tiny_model(
    out: Path, *, family: Family = "qwen3_5_moe", sizes: Sizes | None = None, dtype: str = "float32", seed: int = 0
) -> int:
    """Write a checkpoint that transformers and ms-swift load, and return its number of parameters.

    Args:
        family: `qwen3_5_moe` and `qwen3_5` (dense) see pictures, `qwen3_next` is text only.
        dtype: `float32` or `bfloat16`.
        seed: of the random weights; equal arguments give equal weights.
    """
    import torch

    out.mkdir(parents=True, exist_ok=True)
    tokenizer = _make_tokenizer()
    torch.manual_seed(seed)
    model = _make_model(family, sizes or Sizes())
    model.to(getattr(torch, dtype)).save_pretrained(out)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)
    if family != "qwen3_next":
        _make_processor(tokenizer).save_pretrained(out)
    return sum(p.numel() for p in model.parameters())


def _texts() -> Iterator[str]:
    for entry in json.loads((Path(__file__).parent / "photographs.json").read_text()):
        yield from entry["captions"]
        yield from entry["details"]
        for question, answer in entry["questions"]:
            yield question
            yield answer


def _make_tokenizer() -> Any:
    """Byte-level BPE whose merges are learnt from the data maker's text, with the family's special tokens and ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = level
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + MERGES, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    learnt.train_from_iterator(_texts(), trainer)
    state = json.loads(learnt.to_str())["model"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in state["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={**state["vocab"], **SPECIAL_TOKENS}, merges=merges))
    tokenizer.pre_tokenizer = level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=4096
    )


def _make_model(family: Family, sizes: Sizes) -> Any:
    import transformers

    text: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.value_heads,
        "linear_key_head_dim": sizes.gdn_dim,
        "linear_value_head_dim": sizes.gdn_dim,
        "intermediate_size": 2 * sizes.hidden,
        "max_position_embeddings": 4096,
        "eos_token_id": SPECIAL_TOKENS["<|im_end|>"],
        "pad_token_id": SPECIAL_TOKENS["<|endoftext|>"],
    }
    if family != "qwen3_5":
        text |= {
            "num_experts": sizes.experts,
            "num_experts_per_tok": sizes.top_k,
            "moe_intermediate_size": sizes.expert_hidden,
            "shared_expert_intermediate_size": sizes.expert_hidden,
        }
    if family == "qwen3_next":
        return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**text))
    # The rotated quarter of a head is shared by time, height and width.
    pairs = sizes.head_dim // 8
    side = pairs // 4
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [pairs - 2 * side, side, side],
        "mrope_interleaved": True,
    }
    vision = {
        "depth": sizes.vision_layers,
        "hidden_size": sizes.vision_hidden,
        "intermediate_size": 2 * sizes.vision_hidden,
        "num_heads": 2,
        "out_hidden_size": sizes.hidden,
        "patch_size": 16,
        "num_position_embeddings": 64,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    if family == "qwen3_5":
        dense = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
        return transformers.Qwen3_5ForConditionalGeneration(dense)
    text.pop("intermediate_size")
    moe = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision)
    return transformers.Qwen3_5MoeForConditionalGeneration(moe)


def _make_processor(tokenizer: Any) -> Any:
    import transformers

    image = transformers.Qwen2VLImageProcessor(
        patch_size=16, merge_size=2, temporal_patch_size=2, min_pixels=32 * 32, max_pixels=384 * 384
    )
    return transformers.Qwen3VLProcessor(
        image_processor=image,
        tokenizer=tokenizer,
        video_processor=transformers.Qwen3VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    )


def _main(
    out: Annotated[Path, typer.Argument(help="Folder to write to.")],
    family: Annotated[str, typer.Option(help="qwen3_5_moe, qwen3_5 (dense) or qwen3_next (text).")] = "qwen3_5_moe",
    hidden: Annotated[int, typer.Option(help="Width of the residual stream.")] = 64,
    layers: Annotated[int, typer.Option(help="Layers; every fourth is full attention.")] = 4,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    kv_heads: Annotated[int, typer.Option(help="Key-value heads of attention.")] = 2,
    head_dim: Annotated[int, typer.Option(help="Dimension of an attention head.")] = 32,
    key_heads: Annotated[int, typer.Option(help="Key heads of a GDN layer.")] = 2,
    value_heads: Annotated[int, typer.Option(help="Value heads of a GDN layer.")] = 4,
    gdn_dim: Annotated[int, typer.Option(help="Dimension of a GDN head.")] = 16,
    experts: Annotated[int, typer.Option(help="Experts of an MoE layer.")] = 4,
    expert_hidden: Annotated[int, typer.Option(help="Width of an expert.")] = 32,
    top_k: Annotated[int, typer.Option(help="Experts a token.")] = 2,
    vision_layers: Annotated[int, typer.Option(help="Layers of the vision tower.")] = 1,
    vision_hidden: Annotated[int, typer.Option(help="Width of the vision tower.")] = 32,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
) -> None:
    """Make a tiny random checkpoint, offline."""
    if family not in get_args(Family) or dtype not in ("float32", "bfloat16"):
        typer.echo(f"make_tiny_model: family {family}, dtype {dtype}: see --help", err=True)
        raise typer.Exit(2)
    try:
        sizes = Sizes(
            hidden, layers, heads, kv_heads, head_dim, key_heads, value_heads, gdn_dim, experts, expert_hidden, top_k,
            vision_layers, vision_hidden,
        )  # fmt: skip
        parameters = make_tiny_model(out, family=family, sizes=sizes, dtype=dtype, seed=seed)  # type: ignore[arg-type]
    except Exception as error:  # safetensors has an error of its own for a full disk
        typer.echo(f"make_tiny_model: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{out}: {family}, {parameters / 1e6:.1f} M parameters, {dtype}")


if __name__ == "__main__":
    typer.run(_main)
