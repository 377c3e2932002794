"""Times a cold start: from imported libraries to the end of the first forward and backward pass of a mixer.

    python scripts/bench_start.py --way stock --way table --way bundle --table table.json --bundle shape.fsb

Each way runs in a process of its own with empty caches. "stock" is mcore-bridge 1.6.5's mixer on FLA's functions,
"tune", "table" and "bundle" are ours until the freeze, with nothing, a decision table, or a bundle to start from.
"""

import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

HERE = Path(__file__).parent


def _child(way: str, given: Path | None, rows: int, tp: int) -> None:
    sys.path.insert(0, str(HERE))
    import torch

    from bench_layer import Bench, Case

    torch.zeros(1, device="cuda")
    bench = Bench(Case(rows, tp, 20))
    began = time.perf_counter()
    importlib.import_module("fla.modules")
    importlib.import_module("fla.ops.gated_delta_rule")
    imported = time.perf_counter() - began
    steps: dict[str, Any] = {}
    began = time.perf_counter()
    if way == "stock":
        step = bench.step(bench.stock, "mixer")
        step()
        torch.cuda.synchronize()
    else:
        from fla_safe.gdn.backends import resolve
        from fla_safe.gdn.steady.rehearsal import Rows
        from fla_safe.gdn.steady.warmup import take_over, warm_up
        from fla_safe.gdn.variant import MixerVariant
        from fla_safe.settings import Settings

        settings = Settings(
            gdn_impl="fla_safe", kernel="fla", guard="strict", bundle=given if way == "bundle" else None
        )
        runtime = take_over(settings)
        if way == "table":
            from fla_safe.runtime.tuning.decisions import DecisionTable

            assert given is not None
            runtime.tuning.table = DecisionTable.load(given)
        backend = resolve("fla", "cuda", layout=bench.layout, dtype=torch.bfloat16)
        bf16 = torch.bfloat16
        mixer = MixerVariant(bench.layout, backend, bf16, 4, False, (bf16, bf16, bf16, bf16), 1e-6)
        steady = warm_up(runtime, [mixer], Rows(rows, 1, True), torch.device("cuda", 0), settings, lambda text: None)
        leaves = mixer.draw(rows, 1, "cuda")
        mixer(leaves, bench.segments).sum().backward()
        torch.cuda.synchronize()
        steps = steady.runtime.report()["timings"] | steady.runtime.counters()
    print(
        f"{way:7} {time.perf_counter() - began:7.1f} s after {imported:.1f} s of importing FLA  {steps or ''}",
        flush=True,
    )


def main(
    way: Annotated[list[str], typer.Option(help="stock, tune, table, bundle; in turn.")],
    table: Annotated[Path | None, typer.Option(help="For 'table'.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="For 'bundle'.")] = None,
    rows: Annotated[int, typer.Option(help="Tokens.")] = 14000,
    tp: Annotated[int, typer.Option(help="Tensor parallel size of the Qwen3.5-35B-A3B shard.")] = 2,
    child: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Print seconds of each way."""
    if child:
        _child(way[0], table if way[0] == "table" else bundle, rows, tp)
        return
    for name in way:
        given = [*(["--table", str(table)] if table else []), *(["--bundle", str(bundle)] if bundle else [])]
        with tempfile.TemporaryDirectory() as empty:
            subprocess.run(
                [sys.executable, __file__, "--way", name, "--rows", str(rows), "--tp", str(tp), *given, "--child"],
                env={**os.environ, "TRITON_CACHE_DIR": empty, "FLA_CACHE_DIR": empty},
                check=False,
            )


if __name__ == "__main__":
    typer.run(main)
