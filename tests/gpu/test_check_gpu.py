"""`--gdn_check` on FLA's kernels in the fused mixer: faults are named, its syncs do not count, replay is right.

Alone: `pytest -m gpu tests/gpu/test_check_gpu.py`.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: compiled Triton kernels"),
]

if torch.cuda.is_available():
    try:
        from checked_layers import HIDDEN, LAYOUTS, Model
    except Exception as error:  # TransformerEngine and Megatron fail to import in many ways
        pytest.skip(f"needs Megatron's layers: {type(error).__name__}: {error}", allow_module_level=True)
    from fla_safe.diagnosis import call as watching
    from fla_safe.diagnosis.finding import NonFiniteError
    from fla_safe.diagnosis.record import PARAMETERS, Record, read
    from fla_safe.diagnosis.replay import replay
    from fla_safe.diagnosis.watch import Watch
    from fla_safe.gdn.chunk import fla as fla_chunk
    from fla_safe.megatron.watching import watch_layers
    from fla_safe.runtime.audit import Audit

OFFSETS = (0, 3, 3, 700, 775)
NAN = float("nan")


def packed() -> Any:
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device="cuda")
    return SimpleNamespace(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets)


def model(recompute: str = "reentrant") -> Any:
    made = Model(2, "wide", torch.bfloat16, recompute=recompute).cuda()
    for block in made.layers:
        layer = block.self_attention
        layer.A_log, layer.dt_bias = (torch.nn.Parameter(p.float()) for p in (layer.A_log, layer.dt_bias))
    return made


def rows() -> torch.Tensor:
    draw = torch.Generator("cuda").manual_seed(0)
    return torch.randn(780, 1, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=draw).requires_grad_()


@pytest.mark.parametrize("recompute", ["none", "reentrant", "other"], ids=lambda kind: f"recompute-{kind}")
def test_the_check_finds_nothing_in_a_sound_model_and_changes_no_bit_of_its_mixers(
    recompute: str, tmp_path: Path
) -> None:
    results = []
    for check in (False, True):
        made = model(recompute)
        if check:
            watch_layers([made], Watch("every", rank=0, where="rank 0", directory=tmp_path))
        out = made(rows(), packed())
        out.float().square().mean().backward()
        layers = [block.self_attention for block in made.layers]
        assert all(layer._backend.name == "fla" and layer._backend.mixer is not None for layer in layers)
        results.append([out, *(p.grad for layer in layers for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def spoil_kernel(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    kernel = type(fla_chunk.load())
    real = getattr(kernel, where)

    def spoilt(self: Any, *arguments: Any) -> Any:
        result = real(self, *arguments)
        (result[0] if where == "forward" else result.dv)[0, 702, 1, 5] = NAN
        return result

    monkeypatch.setattr(kernel, where, spoilt)


@pytest.mark.parametrize(
    ("fault", "stage", "tensor", "segment"),
    [
        ("parameter", "parameters", "A_log", None),
        ("gates", "convolution, l2norm and gates", "g", 0),
        ("forward", "chunk kernel", "o", 3),
        ("backward", "chunk kernel", "gradient of v", 3),
        ("gradient", "layer output", "gradient of layer output", 2),
    ],
)
def test_a_planted_fault_is_named_and_its_file_replayed(
    fault: str, stage: str, tensor: str, segment: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model()
    layer = made.layers[1].self_attention
    watch_layers([made], Watch("every", rank=0, where="rank 0", directory=tmp_path))
    if fault in ("forward", "backward"):
        spoil_kernel(monkeypatch, fault)
        layer = made.layers[0].self_attention if fault == "forward" else layer
    elif fault != "gradient":
        with torch.no_grad():
            layer.A_log[1] = NAN if fault == "parameter" else 200.0
    grad = torch.ones_like(rows())
    if fault == "gradient":
        grad[10, 0, 3] = NAN
    with pytest.raises(NonFiniteError) as caught:
        made(rows(), packed()).backward(grad)
    found = caught.value.finding
    assert found is not None
    assert (found.stage, found.tensor, found.place.segment) == (stage, tensor, segment)
    assert found.layer == ("layers.0.self_attention" if fault == "forward" else "layers.1.self_attention")
    monkeypatch.undo()
    record = read(tmp_path / "gdn_check_rank0.pt")
    assert record.kernel["fused"]
    result = replay(record, "cuda")
    # A spoilt kernel is sound again: its inputs must then give what float64 gives.
    assert result.reproduced is (fault not in ("forward", "backward")), result
    assert result.note == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_replay_of_a_sound_call_is_right(dtype: torch.dtype) -> None:
    layout, draw = LAYOUTS["wide"], torch.Generator().manual_seed(4)
    shapes = ((layout.conv_dim, 4), None, (layout.value_heads,), (layout.value_heads,), (layout.value_dim,))
    parameters = {
        name: None if shape is None else torch.randn(shape, generator=draw).to(dtype)
        for name, shape in zip(PARAMETERS, shapes, strict=True)
    }
    record = Record(
        torch.randn(780, 1, layout.proj_dim, generator=draw).to(dtype),
        parameters,
        torch.randn(780, 1, layout.value_width, generator=draw).to(dtype),
        {},
        layout,
        OFFSETS,
        {"norm_eps": 1e-6, "use_qk_l2norm": True, "zero_centered_norm": False},
        {"name": "fla", "version": fla_chunk.load().version, "fused": True},
    )
    result = replay(record, "cuda")
    assert not result.reproduced, [row for row in result.rows if not row.good]
    assert result.kernel.startswith("fla")


@pytest.fixture
def audit() -> Iterator[Any]:
    audit = Audit("sections", watch_syncs=True)
    yield audit
    audit.stop()


@pytest.mark.parametrize("apart", [True, False], ids=["as-it-is", "inside-of-the-section"])
def test_syncs_of_the_check_do_not_count(
    apart: bool, audit: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, params, x = model("none"), packed(), rows()
    made(x, params).sum().backward()  # tuned, compiled and prepared
    watch_layers([made], Watch("every", rank=0, where="rank 0", directory=tmp_path))
    if not apart:
        monkeypatch.setattr(watching, "_apart", lambda layer: nullcontext())
    for block in made.layers:
        block.self_attention.section = audit.section
    audit.start()
    made(x, params).sum().backward()
    torch.cuda.synchronize()
    assert (audit.syncs == 0) is apart
    assert audit.file_ops == 0, audit.examples
