"""Times each fused kernel alone over launch configurations, with the memory bandwidth that it reaches.

    python scripts/bench_fused_kernels.py --rows 14000 --tp 2

Checks the hand-chosen constants of `fla_safe.gdn.fused.launch`; "as in use" is the configuration that they give. Times
are the profiler's: these kernels are shorter than Triton's own launch of them on a slow host.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any
from unittest import mock

import torch
import triton
import typer

from fla_safe.gdn.chunk.grads import KernelGrads
from fla_safe.gdn.fused import launch
from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.segments import CHUNK_SIZE, PackedSegments
from gpu_measure import busy_ms, measure_ceilings


class Kernels:
    """Inputs of one shape, and a call of each kernel with the bytes that it must move."""

    def __init__(self, rows: int, tp: int, sequences: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.layout = layout = ProjectionLayout("interleaved", 16 // tp, 32 // tp, 128, 128)
        HV, K, V = layout.value_heads, layout.key_dim, layout.value_dim
        self.shape = launch.mixer_shape(layout, 1, 4, False, True, True, False, 1e-6)
        bounds = torch.linspace(0, rows, sequences + 1).round().to("cuda", torch.int32)
        self.segments = PackedSegments.prepare(bounds, rows)

        def normal(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(*shape, device="cuda").to(kind)

        self.proj, self.dproj = normal(rows, 1, layout.proj_dim), normal(rows, 1, layout.proj_dim)
        self.gates = launch.Gates(
            normal(layout.conv_dim, 1, 4), None, normal(HV, kind=torch.float32), normal(HV, kind=torch.float32)
        )
        self.norm_weight, self.o, self.dout = normal(V), normal(1, rows, HV, V), normal(rows, 1, HV * V)
        # In as many parts as FLA's kernels leave them.
        gate = normal(1, rows, HV, kind=torch.float32)
        q, v = (1, rows, HV, K), (1, rows, HV, V)
        self.grads = KernelGrads(
            normal(*q), normal(*q), normal(*v), gate[None], normal(1, rows, HV), normal(*q), gate, CHUNK_SIZE
        )
        self.qkv_bytes = rows * layout.conv_dim * dtype.itemsize
        self.o_bytes = rows * layout.value_width * dtype.itemsize

    def calls(self) -> dict[str, tuple[Callable[[], Any], int]]:
        """Kernel -> (call, bytes)."""
        shape, segments = self.shape, self.segments
        in_sums = launch.grad_in(self.grads, self.proj, self.gates, self.dproj, shape, segments)
        out_sums = launch.grad_out(self.dout, self.o, self.proj, self.norm_weight, shape, segments)[1]
        return {
            "in": (lambda: launch.run_in(self.proj, self.gates, shape, segments), 2 * self.qkv_bytes),
            "out": (lambda: launch.run_out(self.o, self.proj, self.norm_weight, shape, segments), 3 * self.o_bytes),
            "grad out": (
                lambda: launch.grad_out(self.dout, self.o, self.proj, self.norm_weight, shape, segments),
                4 * self.o_bytes,
            ),
            "grad gate": (
                lambda: launch.grad_gate(self.dout, self.o, self.proj, self.norm_weight, self.dproj, shape, segments),
                4 * self.o_bytes,
            ),
            "grad in": (
                lambda: launch.grad_in(self.grads, self.proj, self.gates, self.dproj, shape, segments),
                2 * self.qkv_bytes + sum(x.nbytes for x in self.grads if isinstance(x, torch.Tensor)),
            ),
            "sums": (
                lambda: launch.total_sums(in_sums, out_sums, self.gates, self.norm_weight, shape),
                in_sums.nbytes + out_sums.nbytes,
            ),
        }


VARIANTS: dict[str, list[dict[str, int | None]]] = {
    "in": [{}, *({"_IN_AHEAD": ahead} for ahead in (2, 3, 6, 8)), {"_IN_UNROLL": 8, "_IN_AHEAD": 8}],
    "out": [{}],
    "grad out": [{}],
    "grad in": [
        {},
        *({"_GRAD_UNROLL": unroll, "_GRAD_AHEAD": ahead} for unroll, ahead in ((1, 1), (2, 2), (4, 0), (4, 1), (4, 2))),
        {"_GRAD_UNROLL": 4, "_GRAD_REGISTERS": 168},
        {"_GRAD_UNROLL": 4, "_GRAD_AHEAD": 2, "_GRAD_REGISTERS": 168},
    ],
    "grad gate": [{}],
    "sums": [{}],
}


def main(
    rows: Annotated[int, typer.Option(help="Tokens.")] = 14000,
    tp: Annotated[int, typer.Option(help="Tensor parallel size of the Qwen3.5-35B-A3B shard.")] = 2,
    sequences: Annotated[int, typer.Option(help="Sequences of equal length.")] = 20,
) -> None:
    """Print microseconds and TB/s of every kernel and configuration."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs a CUDA GPU")
    kernels = Kernels(rows, tp, sequences)
    copy = measure_ceilings().copy / 1e12
    print(f"{torch.cuda.get_device_name()}, Triton {triton.__version__}, T {rows}, TP {tp}; copy {copy:.2f} TB/s")
    for name, variants in VARIANTS.items():
        for variant in variants:
            with mock.patch.multiple(launch, **variant) if variant else nullcontext():
                for cached in (launch._heads, launch._in_options, launch._out_options):
                    cached.cache_clear()
                call, moved = kernels.calls()[name]
                ms = busy_ms(call)
            label = ", ".join(f"{key[1:].lower()} {value}" for key, value in variant.items()) or "as in use"
            print(f"{name:9} {label:36} {ms * 1e3:8.1f} us {moved / ms / 1e9:6.2f} TB/s {moved / ms / 1e9 / copy:5.0%}")


if __name__ == "__main__":
    typer.run(main)
