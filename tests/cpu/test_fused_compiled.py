"""What the interpreter cannot show: the fused kernels compile for Hopper, to what they say, into few registers."""

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fake_triton.isolated import isolated
from fla_safe.gdn import fused

SPILLED = 16
"""Bytes a thread that a kernel may put on the stack: in masked blocks, which are few (docs/performance.md)."""


def _resources(compiled: Any, folder: Path) -> dict[str, int]:
    import triton

    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    return {name: int(size) for name, size in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}


@pytest.mark.parametrize("environ", [pytest.param({"FLA_SAFE_TEST_CODEGEN": "real"}, id="sm_90")])
@pytest.mark.parametrize("kind", ["interleaved", "sectioned"])
@isolated
def test_the_fused_kernels_compile_for_hopper_without_spilling(
    gpu: Any, kind: Any, environ: Any, tmp_path: str
) -> None:
    import torch

    from fla_safe.gdn.chunk.grads import KernelGrads
    from fla_safe.gdn.fused import launch
    from fla_safe.gdn.layout import ProjectionLayout
    from fla_safe.gdn.segments import PackedSegments

    rows, layout, bf16 = 128, ProjectionLayout(kind, 8, 16, 128, 128), torch.bfloat16
    shape = launch.mixer_shape(layout, 1, 4, False, True, True, False, 1e-6)
    segments = PackedSegments.prepare(torch.tensor([0, 40, 100], dtype=torch.int32), rows)
    proj = torch.empty(rows, 1, layout.proj_dim, dtype=bf16)
    gates = launch.Gates(torch.empty(layout.conv_dim, 4, dtype=bf16), None, torch.empty(16), torch.empty(16))
    norm = torch.empty(128, dtype=bf16)

    inputs = launch.run_in(proj, gates, shape, segments)
    out = launch.run_out(inputs.v, proj, norm, shape, segments)
    _, out_sums = launch.grad_out(out, inputs.v, proj, norm, shape, segments)
    dproj = torch.empty_like(proj)
    launch.grad_gate(out, inputs.v, proj, norm, dproj, shape, segments)
    # As FLA's kernels leave them: one gradient a value head, and second addends.
    part = torch.empty(1, rows, 16, 128, dtype=bf16)
    parts = KernelGrads(part, part, inputs.v, inputs.g[None], inputs.g, part, inputs.g, 64)
    in_sums = launch.grad_in(parts, proj, gates, dproj, shape, segments)
    launch.total_sums(in_sums, out_sums, gates, norm, shape)

    kernels = (
        launch.mixer_in_forward,
        launch.mixer_out_forward,
        launch.mixer_out_backward,
        launch.gate_backward,
        launch.mixer_in_backward,
        launch.add_sums,
    )
    for kernel in kernels:
        (compiled,) = next(iter(kernel.device_caches.values()))[0].values()
        used = _resources(compiled, Path(tmp_path))
        assert used["REG"] <= launch._GRAD_REGISTERS, (kernel.fn.__name__, used)
        assert used["STACK"] + used["LOCAL"] <= SPILLED, (kernel.fn.__name__, used)


def _assigned(nodes: Any) -> set[str]:
    return {
        name.id
        for node in nodes
        for name in ast.walk(node)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    }


def _aliases_that_a_loop_changes(source: str) -> list[str]:
    """Assignments `a = b` of a kernel before a loop that assigns both: Triton may then not carry `a`."""
    found = []

    def look(statements: list[ast.stmt], aliases: list[tuple[str, str]]) -> None:
        for statement in statements:
            match statement:
                case ast.Assign([ast.Name(a)], ast.Name(b)):
                    aliases = [*aliases, (a, b)]
                case ast.For(body=body) | ast.While(body=body):
                    changed = _assigned(body)
                    found.extend(f"{a} = {b}" for a, b in aliases if {a, b} <= changed)
                    look(body, [])
                case ast.If(body=body, orelse=orelse):
                    look(body, aliases)
                    look(orelse, aliases)

    for kernel in ast.walk(ast.parse(source)):
        if isinstance(kernel, ast.FunctionDef):
            look(kernel.body, [])
    return found


def test_no_loop_variable_begins_as_anothers_alias() -> None:
    """The interpreter runs it as Python does; compiled, `p2` was zero for ever (scripts/upstream/triton_aliased...)."""
    shift = (
        "def f(x):\n  p1 = zeros()\n  p2 = {}\n  if x:\n    for i in range(9):\n      p2 = p1\n      p1 = load(x + i)"
    )
    assert _aliases_that_a_loop_changes(shift.format("p1")) == ["p2 = p1"]
    assert _aliases_that_a_loop_changes(shift.format("zeros()")) == []
    for file in Path(str(fused.__file__)).parent.glob("*.py"):
        assert _aliases_that_a_loop_changes(file.read_text()) == [], file.name
