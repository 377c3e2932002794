"""After the freeze, hundreds of packed steps of FLA's GDN kernels touch no file, tune nothing and compile nothing.

`FLA_SAFE_TEST_FLAS`: directories with other fla-core versions (`pip install --no-deps --target DIR fla-core==X`),
separated as in PATH. The installed version is always tested.
"""

import contextlib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_triton.isolated import child, isolated, versions_from

pytest.importorskip("fla")
STEPS = 300
OTHERS = versions_from("FLA_SAFE_TEST_FLAS", "only the installed FLA is tested")
FLAS = [pytest.param("", id="installed"), *OTHERS]

# Enough of a working package for FLA to define its TileLang kernels at import; none is called (FLA_TILELANG=0).
_ANYTHING = """
class _Anything:
    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything()
"""
TILELANG = {
    "absent": None,
    "working": _ANYTHING,
    "ImportError": "import a_dependency_that_is_missing_here\n",
    "AttributeError": "import os\nos.no_such_name\n",
    "OSError": "import ctypes\nctypes.CDLL('libnvrtc-that-is-missing.so')\n",
}
"""What `tilelang/__init__.py` does on import; None for no such package."""


def _tilelang(kind: str) -> str | None:
    source = TILELANG[kind]
    if source is None:
        return None
    package = Path(tempfile.mkdtemp(prefix="tilelang_")) / "tilelang"
    package.mkdir()
    (package / "__init__.py").write_text("import json\n" + source)
    (package / "language.py").write_text(_ANYTHING)
    return str(package.parent)


def _steps(layer: Any, count: int, seed: int = 7, longest: int = 28000) -> None:
    """Packs of 1 to `longest` tokens in 1 to 200 segments; awkward lengths more often than chance would have them."""
    from fake_triton.fla import packed_offsets

    draw = random.Random(seed)
    for i in range(count):
        total = draw.choice((1, 2, 15, 16, 17, 63, 64, 65, 1024, 1025, draw.randint(1, longest)))
        layer.step(total, packed_offsets(total, draw.randint(1, 200), i))


def _ready(layer_heads: int = 2) -> Any:
    import torch

    from fake_triton.fla import Layer, prepare

    torch.set_num_threads(1)
    prepare()
    return Layer(heads=layer_heads, value_heads=layer_heads)


def _frozen(**settings: Any) -> tuple[Any, Any]:
    """A runtime that has seen two packs, one of them of one token, and the layer."""
    from fake_triton.fla import packed_offsets
    from fla_safe.runtime import RuntimeSettings, activate

    runtime = activate(RuntimeSettings(**{"guard": "strict", "audit": "process", **settings}))
    layer = _ready()
    with runtime.warmup():
        for total, segments in ((1000, 5), (1, 1)):
            layer.step(total, packed_offsets(total, segments))
    runtime.freeze()
    return runtime, layer


def _zero(gpu: Any, runtime: Any, work: Any) -> None:
    """`work` does nothing that is counted, and launches."""
    before = len(gpu.compiled), gpu.benchmarks
    gpu.launches.clear()
    runtime.audit.reset()
    work()
    assert runtime.counters() == dict.fromkeys(runtime.counters(), 0), runtime.report()["file_examples"]
    assert (len(gpu.compiled), gpu.benchmarks) == before
    assert len(gpu.launches) >= 20


@contextlib.contextmanager
def _written_to(directory: str) -> Iterator[None]:
    """Keep creating files in a directory, as ranks with logs in the working directory do."""
    code = "import sys, time\nfor i in range(10**6):\n open(f'{sys.argv[1]}/{i % 500}', 'w')\n time.sleep(.01)"
    writer = subprocess.Popen([sys.executable, "-c", code, directory])
    try:
        yield
    finally:
        writer.kill()
        writer.wait()


def zero_after_the_freeze(gpu: Any, tilelang: str) -> None:
    runtime, layer = _frozen()
    _zero(gpu, runtime, lambda: _steps(layer, STEPS))
    state = {"absent": "absent", "working": "working"}.get(tilelang, "broken")
    assert runtime.report()["probes"]["packages"]["tilelang"].startswith(state)
    assert not runtime.report()["launches"]["indirect"]
    assert "NB" in runtime.report()["launches"]["pinned"]["fla.modules.l2norm.l2norm_fwd_kernel"] if _old() else True


def _old() -> bool:
    import fla

    return str(fla.__version__) < "0.6"


@pytest.mark.parametrize("fla", FLAS)
@pytest.mark.parametrize("tilelang", list(TILELANG))
def test_zero_after_the_freeze(fla: str, tilelang: str) -> None:
    place = _tilelang(tilelang)
    environ = {"FLA_TILELANG": "0"} if tilelang == "working" else {}
    child(zero_after_the_freeze, {"tilelang": tilelang}, path=[p for p in (place, fla) if p], environ=environ)
    if place:
        shutil.rmtree(place)


@pytest.mark.parametrize("fla", FLAS)
def test_zero_while_a_directory_on_sys_path_is_written_to(fla: str) -> None:
    busy = tempfile.mkdtemp(prefix="busy_")
    try:
        with _written_to(busy):
            child(zero_after_the_freeze, {"tilelang": "absent"}, path=[p for p in (busy, fla) if p])
    finally:
        shutil.rmtree(busy)


def test_zero_with_a_cache_directory_that_another_process_uses(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def one() -> None:
        try:
            child(zero_after_the_freeze, {"tilelang": "absent"}, environ={"TRITON_CACHE_DIR": str(tmp_path)})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]


def without_us(gpu: Any) -> None:
    """Stock: the same steps tune, or touch files, in every version that this test names."""
    from fake_triton.fla import packed_offsets
    from fla_safe.runtime.audit import Audit

    layer = _ready(layer_heads=4)
    for total, segments in ((1000, 5), (1, 1)):
        layer.step(total, packed_offsets(total, segments))
    audit = Audit("process")
    audit.start()
    gpu.benchmarks = 0
    for total in (1000, 1000, 1000):
        layer.step(total, packed_offsets(total, 5))
    repeated = audit.file_ops
    for total in (1003, 17000, 28000):
        layer.step(total, packed_offsets(total, 5))
    audit.stop()
    print(f"repeated={repeated} all={audit.file_ops} benchmarks={gpu.benchmarks}")


@pytest.mark.parametrize("fla", FLAS)
def test_without_us_the_same_steps_are_not_zero(fla: str) -> None:
    place = _tilelang("ImportError")
    text = child(without_us, {}, path=[p for p in ("" if not fla.endswith("0.5.1") else place, fla) if p])
    repeated, total, benchmarks = map(int, re.search(r"repeated=(\d+) all=(\d+) benchmarks=(\d+)", text).groups())
    assert total > 0
    assert benchmarks > 0  # l2norm's NB changes with the number of rows in every version
    if fla.endswith("0.5.1"):
        assert repeated >= 9, "0.5.1 imports tilelang on each dispatched call: three a step"
    else:
        assert repeated == 0
    shutil.rmtree(place)


def traced(gpu: Any) -> None:
    _, layer = _frozen(audit="off")
    _steps(layer, 3)
    for mark in ("begin", "end"):
        os.access(f"/mark/{mark}", os.F_OK)
        if mark == "begin":
            _steps(layer, 100, seed=11)


@pytest.mark.parametrize("fla", FLAS)
def test_strace_sees_no_file_system_call_in_100_steps(fla: str, tmp_path: Path) -> None:
    strace = shutil.which("strace")
    log = tmp_path / "log"
    if strace is None or subprocess.run([strace, "-o", str(log), "true"], capture_output=True, check=False).returncode:
        pytest.skip("strace is not installed or may not trace here")
    calls = "trace=%file,read,pread64,getdents64,write"
    place = _tilelang("ImportError")
    child(traced, {}, path=[p for p in (place, fla) if p], prefix=[strace, "-f", "-e", calls, "-o", str(log)])
    shutil.rmtree(place)
    lines = log.read_text(errors="replace").split("/mark/begin")[1].split("/mark/end")[0].splitlines()[1:-1]
    assert not [line for line in lines if "exited" not in line and "resumed" not in line], lines[:10]


@isolated
def test_deactivate_gives_everything_back(gpu: Any) -> None:
    import warnings

    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import ConstexprFunction, JITFunction, KernelInterface

    def state() -> list[Any]:
        classes = (Autotuner, JITFunction, KernelInterface, ConstexprFunction, CompiledKernel)
        return [dict(vars(c)) for c in classes] + [warnings.showwarning, "tilelang" in sys.modules]

    import fla.modules.norm.l2norm as l2norm

    before, own = state(), dict(vars(l2norm.l2norm_fwd_kernel))
    runtime, layer = _frozen()
    norm_gate = sys.modules["fla.modules.norm.fused_norm_gate"].layer_norm_gated_bwd_kernel
    special = next(p for p in norm_gate.fn.fn.params if p.name == "BS")
    assert special.do_not_specialize
    assert state() != before
    runtime.deactivate()
    runtime.deactivate()
    for now, then in zip(state(), before, strict=True):
        changed = {k for k in now.keys() | then.keys() if now.get(k) != then.get(k)} if isinstance(now, dict) else now
        assert now == then, changed
    assert not special.do_not_specialize
    assert set(vars(l2norm.l2norm_fwd_kernel)) - set(own) <= {"do_bench"}
    assert runtime.phase == "inactive"
    from fla_safe.runtime import active

    assert active() is None
    gpu.benchmarks = 0
    _steps(layer, 2)
    assert gpu.benchmarks > 0, "Triton tunes for itself again"


@isolated
def test_activate_is_idempotent_and_warmup_after_a_freeze_freezes_again(gpu: Any) -> None:
    import json

    from fake_triton.fla import packed_offsets
    from fla_safe.runtime import LateTuneError, activate

    runtime, layer = _frozen()
    assert activate() is runtime
    with pytest.raises(LateTuneError):
        layer.step(1000, packed_offsets(1000, 5).int())
    told: list[str] = []
    with runtime.warmup(progress=told.append):
        layer.step(1000, packed_offsets(1000, 5).int())
    assert runtime.phase == "frozen"
    assert any("tuned" in text for text in told)
    _zero(gpu, runtime, lambda: layer.step(999, packed_offsets(999, 5).int()))
    report = json.loads(json.dumps(runtime.report()))
    assert report["counters"] == runtime.counters()
    assert report["table_hash"] == runtime.table.hash()
    assert len(report["decisions"]) == len(runtime.table)
