"""`fla-safe warmup`: tunes, checks and compiles before a job does, and writes a bundle or a decision table."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["warmup"]


def warmup(
    out: Annotated[
        Path, typer.Argument(help="Bundle to write (.fsb), or a decision table (.json).", show_default=False)
    ],
    model: Annotated[list[str] | None, typer.Option(help="Named shape, as the folders in recipes/.")] = None,
    tp: Annotated[list[int] | None, typer.Option(help="Tensor (times context) parallel sizes; default 1.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="Take model, sizes and rows from a recipe's script.")] = None,
    heads: Annotated[str | None, typer.Option(help="H,HV,K,V of a model that has no name here.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Longest row T.")] = 16384,
    batch: Annotated[int, typer.Option(min=1, help="B, without packing.")] = 1,
    packed: Annotated[bool, typer.Option(help="Rows hold several segments.")] = True,
    dtype: Annotated[str, typer.Option(help="Of activations and parameters: bfloat16, float16, float32.")] = "bfloat16",
    kernel: Annotated[str, typer.Option(help="auto, fla, flash_qla, te; as --gdn_kernel.")] = "auto",
    start: Annotated[Path | None, typer.Option(help="Bundle to start from: only what it lacks is tuned.")] = None,
    cache_root: Annotated[Path | None, typer.Option(help="As --gdn_cache_root.")] = None,
) -> None:
    """Tune, check and compile the kernels of named shapes or of a recipe, and write a bundle for --gdn_bundle."""
    from fla_safe.console import named_errors
    from fla_safe.preparation.models import Heads, UnknownModelError, heads_of
    from fla_safe.preparation.recipe import read_recipe
    from fla_safe.progress import progress_bar
    from fla_safe.settings import Settings, SettingsError

    with named_errors():
        if dtype not in ("bfloat16", "float16", "float32"):
            raise SettingsError(f"--dtype {dtype}", "bfloat16, float16 or float32", "correct the option")
        settings = Settings.read(
            "fla_safe",
            kernel=kernel,
            guard="off",
            bundle=None if start is None else str(start),
            cache_root=None if cache_root is None else str(cache_root),
        )
        wanted = [(heads_of(name), size) for name in model or () for size in tp or (1,)]
        if heads is not None:
            counts = heads.split(",")
            if len(counts) != 4 or not all(count.isdigit() and int(count) for count in counts):
                raise UnknownModelError(f"--heads {heads}", "four whole numbers: H,HV,K,V", "correct the option")
            wanted += [(Heads(*map(int, counts)), size) for size in tp or (1,)]
        if recipe is not None:
            plan = read_recipe(recipe)
            wanted.append((heads_of(plan.model), plan.ranks))
            tokens, batch, packed = plan.tokens, plan.batch, plan.packed
        if not wanted:
            raise UnknownModelError("no shape was named", "--model, --heads or --recipe", "name one")
        layouts = list(dict.fromkeys(found.shard(size) for found, size in wanted))

        from fla_safe.preparation.tuned import prepare

        with progress_bar(lambda text: typer.echo(f"fla-safe: {text}", err=True)) as say:
            made = prepare(out, layouts, settings, tokens=tokens, batch=batch, packed=packed, dtype=dtype, say=say)
    typer.echo(made)
