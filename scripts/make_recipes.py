"""Writes recipes/<model>/<name>.sh from recipes/table.toml, so that the recipes cannot drift apart."""

import re
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["RECIPES", "Model", "Recipe", "gdn_layers_by_stage", "read_table", "render", "size_errors"]

RECIPES = Path(__file__).resolve().parent.parent / "recipes"

# Every fourth layer is full attention, the others are GDN.
FULL_ATTENTION_INTERVAL = 4


@dataclass(frozen=True, slots=True)
class Model:
    """A model and the counts that parallel sizes must fit; `experts` is 0 for dense models."""

    key: str
    id: str
    images: bool
    layers: int
    heads: int
    kv_heads: int
    key_heads: int
    value_heads: int
    experts: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """One script. `nodes` and `gpus` (a node) are read from the name, as is whether all weights are trained."""

    model: Model
    name: str
    tp: int
    pp: int
    cp: int
    max_length: int
    micro_batch: int
    global_batch: int
    sizes_from: str
    ep: int = 1

    @property
    def path(self) -> Path:
        """Below recipes/."""
        return Path(self.model.key) / f"{self.name}.sh"

    @property
    def full(self) -> bool:
        """Whether all weights are trained, or only LoRA's."""
        return self.name.startswith("full")

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return self._shape()[0]

    @property
    def gpus(self) -> int:
        """GPUs of a node."""
        return self._shape()[1]

    @property
    def replicas(self) -> int:
        """Data parallelism."""
        return self.nodes * self.gpus // (self.tp * self.pp * self.cp)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a replica in a step."""
        return self.global_batch // (self.micro_batch * self.replicas)

    def _shape(self) -> tuple[int, int]:
        found = re.fullmatch(r"(?:full|lora)_(\d+)x(\d+)", self.name)
        if found is None:
            raise ValueError(f"recipe name {self.name!r}: expected full_<nodes>x<gpus> or lora_<nodes>x<gpus>")
        return int(found[1]), int(found[2])


def read_table(path: Path = RECIPES / "table.toml") -> list[Recipe]:
    """The recipes of a table, in its order.

    Raises:
        TypeError, KeyError: a field that is missing or unknown.
    """
    table = tomllib.loads(path.read_text())
    models = {key: Model(key=key, **fields) for key, fields in table["models"].items()}
    return [Recipe(**(table["defaults"] | entry | {"model": models[entry["model"]]})) for entry in table["recipes"]]


def size_errors(recipe: Recipe) -> list[str]:
    """Why a model cannot be divided like that; Megatron would say so once all processes have started."""
    model, world = recipe.model, recipe.nodes * recipe.gpus
    tp, pp, ep, cp = recipe.tp, recipe.pp, recipe.ep, recipe.cp
    errors = [
        f"{name} {count} not divisible by {over} {size}"
        for name, count, over, size in (
            ("GPUs", world, "TP x PP x CP", tp * pp * cp),
            ("GPUs", world, "PP x EP", pp * ep),
            ("layers", model.layers, "PP", pp),
            ("attention heads", model.heads, "TP", tp),
            ("GDN key heads", model.key_heads, "TP x CP", tp * cp),
            ("GDN value heads", model.value_heads, "TP x CP", tp * cp),
            ("GDN value heads", model.value_heads, "key heads", model.key_heads),
            ("experts", model.experts, "EP", ep),
        )
        if count % size
    ]
    # Key and value heads of attention are copied where TP exceeds their number.
    if model.kv_heads % tp and tp % model.kv_heads:
        errors.append(f"KV heads {model.kv_heads} and TP {tp} do not divide one another")
    if ep > 1 and not model.experts:
        errors.append(f"EP {ep} for a model without experts")
    if not errors and recipe.global_batch % (recipe.micro_batch * recipe.replicas):
        errors.append(f"global batch {recipe.global_batch} not divisible by {recipe.micro_batch} x {recipe.replicas}")
    return errors


def gdn_layers_by_stage(recipe: Recipe) -> list[int]:
    """GDN layers of each pipeline stage."""
    size = recipe.model.layers // recipe.pp
    stages = [range(stage * size, (stage + 1) * size) for stage in range(recipe.pp)]
    return [sum(1 for layer in stage if (layer + 1) % FULL_ATTENTION_INTERVAL) for stage in stages]


def render(recipe: Recipe) -> str:
    """Text of the script."""
    blocks = [_header(recipe), _checks(recipe), _command(recipe)]
    return "\n\n".join(blocks) + "\n"


def _header(recipe: Recipe) -> str:
    model = recipe.model
    what = f"{'full' if recipe.full else 'LoRA'} fine-tuning of {model.id}"
    data = "packed image-text dialogues" if model.images else "packed dialogues"
    details = ["full recompute"]
    if model.images:
        details.append("frozen vision tower and aligner")
    if recipe.full:
        details.append("optimizer on the host")
    sizes = f"TP{recipe.tp} PP{recipe.pp} EP{recipe.ep} CP{recipe.cp}"
    # Forward, forward again when recomputing, backward.
    calls = sorted({3 * layers * recipe.micro_batches for layers in gdn_layers_by_stage(recipe)})
    use = f"DATA=<train.jsonl> OUTPUT=<folder> bash recipes/{recipe.path} [megatron sft flags]"
    script = f"recipes/{recipe.path}"
    if recipe.nodes > 1:
        use += (
            " on every node, with its NODE_RANK and the first node's MASTER_ADDR, or under Slurm:"
            f" sbatch --nodes={recipe.nodes} recipes/slurm.sh {script}."
        )
    else:
        use += "."
    fields = {
        "What": f"{what} on {data}: {', '.join(details)}.",
        "Hardware": f"{_count(recipe.nodes, 'node')} of {recipe.gpus} GPUs with 80 GB or more.",
        "Sizes": f"{sizes}, {_count(recipe.replicas, 'model replica')},"
        f" {recipe.micro_batches} micro-batches a step each;"
        f" packs of up to {recipe.max_length} tokens, {recipe.micro_batch} to a micro-batch."
        f" Sizes from {recipe.sizes_from}.",
        "Expected": f"{' or '.join(map(str, calls))} GDN kernel calls a step and rank, counted from the sizes."
        " Memory, loss and speed: not verified, see card.yaml beside this file.",
        "How long": "one epoch of your data (EPOCHS); not verified.",
        "Use": f"{use} MODEL is {model.id} if not set; it may be a checkpoint folder."
        " Further variables of a run are in recipes/environment.sh.",
    }
    lines = ["#!/usr/bin/env bash"]
    for name, text in fields.items():
        lines += textwrap.wrap(
            text,
            width=118,
            initial_indent=f"# {name + ':':<11}",
            subsequent_indent=f"#{'':12}",
            break_on_hyphens=False,
            break_long_words=False,
        )
    lines.append("# Written by scripts/make_recipes.py from recipes/table.toml: change it there.")
    return "\n".join(lines) + "\nset -euo pipefail"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _checks(recipe: Recipe) -> str:
    numbers = (recipe.tp, recipe.pp, recipe.ep, recipe.cp, recipe.micro_batch, recipe.global_batch)
    return f"""\
RECIPE=${{BASH_SOURCE[0]}} RECIPE_NODES={recipe.nodes} RECIPE_MODEL={recipe.model.id}
: "${{MODEL:=$RECIPE_MODEL}}"
: "${{DATA:?a JSONL file of dialogues, or the hub name of a data set}}"
: "${{OUTPUT:?a folder to write to{", which all nodes share" if recipe.nodes > 1 else ""}}}"
. "$(dirname "$RECIPE")/../environment.sh"
. "$(dirname "$RECIPE")/../launch.sh"
check_inputs
check_nodes
check_sizes {" ".join(map(str, numbers))} "$@"\
"""


def _command(recipe: Recipe) -> str:
    model = recipe.model
    groups: list[list[tuple[str, object]]] = [
        [("gdn_impl", "fla_safe"), ("gdn_guard", "warn")],
        [
            ("model", '"$MODEL"'),
            ("dataset", '"$DATA"'),
            ("split_dataset_ratio", 0),
            ("load_from_cache_file", "true"),
            ("dataset_num_proc", 8),
            ("dataloader_num_workers", 8),
            ("packing", "true"),
            ("max_length", recipe.max_length),
        ],
        [
            ("num_train_epochs", '"${EPOCHS:-1}"'),
            ("micro_batch_size", recipe.micro_batch),
            ("global_batch_size", recipe.global_batch),
            ("lr", "1e-5" if recipe.full else "1e-4"),
            ("min_lr", "1e-6" if recipe.full else "1e-5"),
            ("lr_warmup_fraction", 0.05),
        ],
        [
            ("tensor_model_parallel_size", recipe.tp),
            ("pipeline_model_parallel_size", recipe.pp),
            ("context_parallel_size", recipe.cp),
            ("sequence_parallel", str(recipe.tp > 1).lower()),
        ],
    ]
    if model.experts:
        groups[-1].insert(2, ("expert_model_parallel_size", recipe.ep))
        groups.append(
            [
                ("moe_permute_fusion", "true"),
                ("moe_grouped_gemm", "true"),
                ("moe_shared_expert_overlap", "true"),
                ("moe_aux_loss_coeff", "1e-6"),
            ]
        )
    groups.append([("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1)])
    if recipe.full:
        groups.append(
            [
                ("tuner_type", "full"),
                ("optimizer_cpu_offload", "true"),
                ("optimizer_offload_fraction", 1.0),
                ("use_precision_aware_optimizer", "true"),
            ]
        )
    else:
        groups.append([("tuner_type", "lora"), ("lora_rank", 16), ("lora_alpha", 32), ("target_modules", "all-linear")])
    if model.images:
        groups[-1] += [("freeze_llm", "false"), ("freeze_vit", "true"), ("freeze_aligner", "true")]
    groups.append(
        [
            ("attention_backend", "flash"),
            ("cross_entropy_loss_fusion", "true"),
            ("finetune", "true"),
            ("output_dir", '"$OUTPUT"'),
            ("logging_steps", 1),
            ("report_to", "tensorboard"),
            ("save_steps", 200),
            ("no_save_optim", "true"),
            ("no_save_rng", "true"),
        ]
    )
    lines = [f"    --{flag} {value} \\" for group in groups for flag, value in group]
    return "exec megatron sft \\\n" + "\n".join(lines) + '\n    "$@"'


def _main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit with 1 if a script differs.")] = False,
) -> None:
    """Write every recipe of the table, or compare them with it."""
    different = []
    for recipe in read_table():
        if errors := size_errors(recipe):
            raise SystemExit(f"recipes/{recipe.path}: {'; '.join(errors)}")
        path, text = RECIPES / recipe.path, render(recipe)
        if path.is_file() and path.read_text() == text:
            continue
        different.append(str(recipe.path))
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
    print(
        "\n".join(f"recipes/{name}: {'differs' if check else 'written'}" for name in different)
        or "all as the table says"
    )
    if check and different:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(_main)
