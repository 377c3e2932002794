"""Times a gated delta net's mixer, and the layer with its projections, as mcore-bridge runs it and as we do.

    python scripts/bench_layer.py --quick                      one shape, about four minutes with an empty Triton cache
    python scripts/bench_layer.py --json layer.json --plot layer.png

One process, one GPU. "stock" is what mcore-bridge 1.6.5 does between its projections with FLA's functions; it is
measured before and after ours, for a process is either in Triton's hands or in the runtime's. Ours is measured as in
training: warmed up and frozen, all its ways in turns. Needs fla-core and, on Hopper, Triton >= 3.7.1.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from fla_safe.errors import FlaSafeError
from fla_safe.gdn import backends
from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.mixer import composed_mixer, mixer
from fla_safe.gdn.segments import PackedSegments
from fla_safe.installed import installed
from fla_safe.runtime import RuntimeSettings, activate
from fla_safe.runtime.tuning.decisions import DecisionTable
from gpu_measure import Ceilings, Measurement, measure, measure_ceilings
from layer_report import plot, print_kernels, print_results

HIDDEN, KEY_HEADS, VALUE_HEADS, HEAD_DIM, WINDOW = 2048, 16, 32, 128, 4
"""Qwen3.5-35B-A3B."""


@dataclass(frozen=True, slots=True)
class Case:
    """One shape: `rows` tokens in `segments` sequences, the shard of one of `tp` ranks."""

    rows: int
    tp: int
    segments: int

    @property
    def layout(self) -> ProjectionLayout:
        return ProjectionLayout("interleaved", KEY_HEADS // self.tp, VALUE_HEADS // self.tp, HEAD_DIM, HEAD_DIM)

    def __str__(self) -> str:
        return f"T {self.rows}, TP {self.tp}, {self.segments} sequences"


class Bench:
    """Tensors of one case, and the ways to run it."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.bfloat16) -> None:
        self.layout = layout = case.layout
        torch.manual_seed(0)
        bounds = torch.randperm(case.rows - 1)[: case.segments - 1].sort().values + 1
        self.offsets = torch.cat([torch.tensor([0]), bounds, torch.tensor([case.rows])]).to("cuda", torch.int32)
        self.segments = PackedSegments.prepare(self.offsets, case.rows)

        def leaf(*shape: int, scale: float = 1.0, kind: torch.dtype = dtype) -> torch.Tensor:
            return (torch.randn(*shape, device="cuda") * scale).to(kind).requires_grad_()

        self.hidden = leaf(case.rows, 1, HIDDEN)
        self.in_weight = leaf(layout.proj_dim, HIDDEN, scale=HIDDEN**-0.5)
        self.out_weight = leaf(HIDDEN, layout.value_width, scale=layout.value_width**-0.5)
        self.proj = leaf(case.rows, 1, layout.proj_dim)
        self.dout = torch.randn(case.rows, 1, layout.value_width, device="cuda").to(dtype)
        self.dlayer = torch.randn(case.rows, 1, HIDDEN, device="cuda").to(dtype)
        self.parameters = {
            "conv_weight": leaf(layout.conv_dim, 1, WINDOW, scale=0.5),
            "A_log": leaf(layout.value_heads, kind=torch.float32),
            "dt_bias": leaf(layout.value_heads, kind=torch.float32),
            "norm_weight": leaf(layout.value_dim),
        }
        self.stock_norm = _stock_norm()

    def stock(self, proj: torch.Tensor) -> torch.Tensor:
        """mcore-bridge 1.6.5 between its projections."""
        from fla.modules.convolution import causal_conv1d
        from fla.modules.l2norm import l2norm
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        layout, p = self.layout, self.parameters
        H, HV, K, V, r = layout.key_heads, layout.value_heads, layout.key_dim, layout.value_dim, layout.group
        rows, batch = proj.shape[:2]
        grouped = proj.view(rows, batch, H, -1).transpose(0, 1)
        qkv, z, b, a = grouped.split([2 * K + r * V, r * V, r, r], dim=-1)
        z, b, a = z.reshape(batch, rows, HV, V), b.reshape(batch, rows, HV), a.reshape(batch, rows, HV)
        qkv = causal_conv1d(
            x=qkv.reshape(batch, rows, -1),
            weight=p["conv_weight"].squeeze(1),
            bias=None,
            activation="silu",
            cu_seqlens=self.offsets,
        )[0]
        q, k, v = qkv.view(batch, rows, H, -1).split([K, K, r * V], dim=-1)
        q, k = l2norm(q.contiguous()), l2norm(k.contiguous())
        if r > 1:
            q, k = q.repeat_interleave(r, dim=2), k.repeat_interleave(r, dim=2)
        v = v.reshape(batch, rows, HV, V)
        g = -p["A_log"].exp() * F.softplus(a.contiguous().float() + p["dt_bias"])
        o = chunk_gated_delta_rule(q, k, v, g=g, beta=b.contiguous().sigmoid(), cu_seqlens=self.offsets)[0]
        out = self.stock_norm(o.reshape(-1, V), p["norm_weight"])
        out = (out * F.silu(z.reshape(-1, V).float())).to(o.dtype)
        return out.view(batch, rows, -1).transpose(0, 1).contiguous()

    def ways(self, variants: bool) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        """Name -> mixer."""
        arguments: dict[str, Any] = {
            **self.parameters,
            "conv_bias": None,
            "layout": self.layout,
            "norm_eps": 1e-6,
            "segments": self.segments,
        }
        found: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"stock": self.stock}
        for name, kernel in self.kernels().items():
            found[f"fused, {name}"] = partial(mixer, kernel=kernel, **arguments)
            if variants:
                found[f"composed, {name}"] = partial(composed_mixer, kernel=kernel, **arguments)
                kept = dataclasses.replace(kernel, mixer=dataclasses.replace(kernel.mixer, keep_inputs=True))
                found[f"fused, {name}, inputs kept"] = partial(mixer, kernel=kept, **arguments)
        return found

    def kernels(self) -> dict[str, Any]:
        """Name -> chunk kernel."""
        found = {"FLA": backends.resolve("fla", "cuda", layout=self.layout, dtype=self.proj.dtype)}
        try:
            found["FlashQLA"] = backends.resolve("flash_qla", "cuda", layout=self.layout, dtype=self.proj.dtype)
        except FlaSafeError as error:
            print(f"without FlashQLA: {error}")
        return found

    def step(self, way: Callable[[torch.Tensor], torch.Tensor], scope: str) -> Callable[[], object]:
        """Forward and backward of "mixer", of "layer", or of the mixer with activation recomputation ("recompute")."""
        leaves = list(self.parameters.values())

        def run_mixer() -> object:
            return torch.autograd.grad(way(self.proj), [self.proj, *leaves], self.dout)

        def recompute() -> object:
            out = checkpoint(way, self.proj, use_reentrant=False, preserve_rng_state=False)
            return torch.autograd.grad(out, [self.proj, *leaves], self.dout)

        def layer() -> object:
            out = F.linear(way(F.linear(self.hidden, self.in_weight)), self.out_weight)
            inputs = [self.hidden, self.in_weight, self.out_weight, *leaves]
            return torch.autograd.grad(out, inputs, self.dlayer)

        return {"mixer": run_mixer, "recompute": recompute, "layer": layer}[scope]

    def chunk_alone(self, kernel: Any) -> Callable[[], object]:
        """Forward and backward of a chunk kernel, its sums over heads and chunks included, without anything around."""
        layout, rows = self.layout, self.proj.shape[0]
        H, HV, K, V = layout.key_heads, layout.value_heads, layout.key_dim, layout.value_dim

        def leaf(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=self.proj.dtype)

        q, k = (F.normalize(leaf(1, rows, H, K), dim=-1).requires_grad_() for _ in range(2))
        v, beta = leaf(1, rows, HV, V).requires_grad_(), leaf(1, rows, HV).sigmoid().requires_grad_()
        g = (-F.softplus(leaf(1, rows, HV).float())).requires_grad_()
        do = leaf(1, rows, HV, V)

        def run() -> object:
            o = kernel.gated_delta_rule(q, k, v, g, beta, K**-0.5, self.segments)
            return torch.autograd.grad(o, [q, k, v, g, beta], do)

        return run


@contextmanager
def frozen_kernels(steps: Iterable[Callable[[], object]], table: Path | None) -> Iterator[None]:
    """The steady state of a job around the body: the runtime is active, warmed up with `steps`, and frozen.

    `table`: decisions to start from if the file is there; those in use are written back.
    """
    known = DecisionTable.load(table) if table is not None and table.is_file() else None
    runtime = activate(RuntimeSettings(guard="strict", table=known, guarded=("fla", "fla_safe"), audit="off"))
    try:
        with runtime.warmup(progress=lambda text: None):
            for step in steps:
                step()
        runtime.freeze()
        if table is not None:
            runtime.table.save(table)
        yield
        print(f"  frozen: {runtime.counters()}, table {runtime.report()['table_hash'][:12]}")
    finally:
        runtime.deactivate()


def _stock_norm() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    try:
        from transformer_engine.pytorch import RMSNorm
    except Exception:  # its import fails in many ways where it does not fit the machine
        return lambda x, weight: F.rms_norm(x, (x.shape[-1],), weight, 1e-6)
    norm = RMSNorm(HEAD_DIM, eps=1e-6, device="cuda", params_dtype=torch.bfloat16)

    def apply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        norm._parameters["weight"] = weight
        return norm(x)

    return apply


def floor_ms(case: Case, ceilings: Ceilings) -> dict[str, float]:
    """Milliseconds that moving the fewest bytes takes (each tensor read once, written once), and the matrix work.

    "around": without the chunk kernel, forward and backward with q, k, v kept. "chunk": its inputs, outputs and their
    gradients once, or its operations (the delta rule by chunks of 64), whichever takes longer.
    """
    layout, T = case.layout, case.rows
    HV, K, V, C = layout.value_heads, layout.key_dim, layout.value_dim, 64
    qkv, o = 2 * T * layout.conv_dim, 2 * T * layout.value_width
    around = (2 * qkv + 3 * o) + (5 * o + 3 * qkv) + 2 * 6 * T * HV * 4
    chunk_bytes = (qkv + o) + (qkv + 2 * o + qkv)
    # Per token and value head: k k^T, q k^T, A k, A v, attention v (C each), state read and written (K V each).
    forward = 2 * T * HV * (2 * C * K + C * (K + V) + C * V + 3 * K * V)
    return {
        "around": around / ceilings.copy * 1e3,
        "chunk": max(chunk_bytes / ceilings.copy, 3 * forward / ceilings.matrix) * 1e3,
        "projections": 6 * T * HIDDEN * (layout.proj_dim + layout.value_width) / ceilings.matrix * 1e3,
    }


def run_case(
    case: Case, scopes: list[str], repeats: int, variants: bool, ceilings: Ceilings, table: Path | None
) -> list[dict[str, Any]]:
    """Measure all ways of one case and print a table a scope: stock, ours in turns, stock again."""
    bench, floors, records = Bench(case), floor_ms(case, ceilings), []
    ways = bench.ways(variants)
    steps = {scope: {name: bench.step(way, scope) for name, way in ways.items()} for scope in scopes}
    stocks = {scope: {"stock": steps[scope].pop("stock")} for scope in scopes}
    before = {scope: measure(stocks[scope], repeats)["stock"] for scope in scopes}
    ours: dict[str, dict[str, Measurement]] = {}
    alone = {name: bench.chunk_alone(kernel) for name, kernel in bench.kernels().items()}
    with frozen_kernels([*(step for scope in scopes for step in steps[scope].values()), *alone.values()], table):
        chunks = {name: round(m.busy, 3) for name, m in measure(alone, max(3, repeats // 3)).items()}
        for scope in scopes:
            ours[scope] = measure(steps[scope], repeats)
    after = {scope: measure(stocks[scope], repeats, profiled=0)["stock"] for scope in scopes}
    for scope in scopes:
        stock, drift = before[scope], after[scope].wall / before[scope].wall - 1
        for timed in ("wall", "in_a_row", "host"):
            setattr(stock, timed, min(getattr(stock, timed), getattr(after[scope], timed)))
        results = {"stock": stock, **ours[scope]}
        floor = floors["around"] + floors["chunk"] + (floors["projections"] if scope == "layer" else 0.0)
        print(
            f"\n{case}: {scope}, forward + backward; floor {floor:.2f} ms; chunk kernels alone {chunks} ms; "
            f"stock afterwards {drift:+.1%} of before (the faster one counts)"
        )
        busy = {name: chunks["FlashQLA" if "FlashQLA" in name else "FLA"] for name in results}
        print_results(results, busy, floor)
        for name, m in results.items():
            record = {**dataclasses.asdict(case), "scope": scope, "way": name, **dataclasses.asdict(m)}
            records.append(record | {"chunk_busy": busy[name], "floor": floor, "floors": floors})
        print_kernels(results)
    return records


def main(
    quick: Annotated[bool, typer.Option(help="T 14000 at TP2 only, mixer only, few repeats.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all numbers here.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Write a bar chart here.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Token counts.")] = None,
    tp: Annotated[list[int] | None, typer.Option(help="Tensor parallel sizes.")] = None,
    scope: Annotated[list[str] | None, typer.Option(help="mixer, recompute, layer.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed calls of each way.")] = 15,
    variants: Annotated[bool, typer.Option(help="Also the composed mixer, and ours with its inputs kept.")] = False,
    table: Annotated[Path | None, typer.Option(help="Decision table to start from and to write back.")] = None,
) -> None:
    """Measure and print; see the top of this file."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs a CUDA GPU")
    ceilings = measure_ceilings()
    versions = installed()
    print(f"{torch.cuda.get_device_name()}, {versions}")
    print(f"copy {ceilings.copy / 1e12:.2f} TB/s, bfloat16 matrix product {ceilings.matrix / 1e12:.0f} TFLOP/s")
    if quick:
        cases, scopes, repeats = [Case(14000, 2, 20)], scope or ["mixer"], min(repeats, 10)
    else:
        scopes = scope or ["mixer", "recompute", "layer"]
        cases = [
            Case(t, p, n)
            for t, p in product(rows or [4096, 14000, 28000], tp or [1, 2, 4, 8])
            for n in (max(2, t // 1400), t // 100)
        ]
    records: list[dict[str, Any]] = []
    for case in cases:
        records += run_case(case, scopes, repeats, variants, ceilings, table)
        torch.cuda.empty_cache()
        if json_path is not None:
            head = {"gpu": torch.cuda.get_device_name(), "versions": versions, "ceilings": dataclasses.asdict(ceilings)}
            json_path.write_text(json.dumps(head | {"records": records}, indent=1))
    if plot_path is not None:
        plot(records, plot_path)


if __name__ == "__main__":
    typer.run(main)
