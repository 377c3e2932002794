"""Which kernel may run where: yes or no, with a reason that says what to change."""

import subprocess
import sys
from types import ModuleType

import pytest
import torch
from packaging.version import Version

from fla_safe.gdn.backends import BackendError, resolve, supports
from fla_safe.gdn.chunk import fla as fla_chunk
from fla_safe.gdn.chunk.rebind import rebind
from fla_safe.gdn.layout import ProjectionLayout

CUDA = torch.device("cuda")


@pytest.fixture
def fla_0_6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla_chunk, "fla_version", lambda: Version("0.6.0"))


def test_torch_runs_everywhere() -> None:
    kernel = resolve("torch", "cpu")
    assert (kernel.name, kernel.version) == ("torch", torch.__version__)
    assert kernel.supports("cuda", dtype=torch.float64)[0]


def test_unknown_kernel_is_refused() -> None:
    with pytest.raises(BackendError, match=r"no kernel is called 'flash'.*torch, fla"):
        resolve("flash", "cpu")


REFUSED = {
    "float64": ({"device": "cuda", "dtype": torch.float64}, "float64"),
    "wide-keys": ({"device": "cuda", "layout": ProjectionLayout("sectioned", 1, 1, 257, 8)}, "up to 256, not 257"),
    "odd-16-bit": (
        {"device": "cuda", "layout": ProjectionLayout("sectioned", 1, 1, 16, 7), "dtype": torch.bfloat16},
        "even head dimensions",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_fla_refuses_what_its_kernels_cannot(name: str, fla_0_6: None) -> None:
    arguments, reason = REFUSED[name]
    able, why = supports("fla", **arguments)  # type: ignore[arg-type]
    assert not able
    assert reason in why


@pytest.mark.parametrize(
    ("version", "able"), [("0.4.1", False), ("0.4.2", True), ("0.6.3", True), ("0.7.0", False), (None, False)], ids=str
)
def test_fla_versions(version: str | None, able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla_chunk, "fla_version", lambda: version and Version(version))
    assert supports("fla", CUDA)[0] is able


@pytest.mark.parametrize(
    ("triton_version", "capability", "key_dim", "able"),
    [
        ("3.6.0", (9, 0), 64, False),
        ("3.6.0+git1", (9, 0), 33, False),
        ("3.6.0", (9, 0), 128, True),
        ("3.6.0", (9, 0), 32, True),
        ("3.7.1", (9, 0), 64, True),
        ("3.3.1", (9, 0), 64, True),
        ("3.6.0", (8, 0), 64, True),
    ],
)
def test_hopper_with_a_triton_that_miscompiles(
    triton_version: str,
    capability: tuple[int, int],
    key_dim: int,
    able: bool,
    fla_0_6: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import triton

    monkeypatch.setattr(triton, "__version__", triton_version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    layout = ProjectionLayout("sectioned", 1, 2, key_dim, 8)
    found, why = supports("fla", CUDA, layout=layout, dtype=torch.float32)
    assert found is able
    assert able or "upgrade Triton" in why


def test_fla_on_a_cpu_needs_the_interpreter() -> None:
    script = "from fla_safe.gdn.backends import supports; print(supports('fla', 'cpu'))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env={}, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("(False")
    assert "TRITON_INTERPRET=1" in done.stdout or "not installed" in done.stdout


def test_interpreter_after_triton_is_refused() -> None:
    script = "import triton; from fla_safe.cpu import interpreter; interpreter.activate()"
    done = subprocess.run([sys.executable, "-c", script], env={}, capture_output=True, text=True, check=False)
    assert "InterpreterModeError" in done.stderr
    assert "set TRITON_INTERPRET=1 before Python starts" in done.stderr


def test_rebind_takes_wrappers_off_everything_below_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
from functools import wraps
log = []
def dispatch(f):
    @wraps(f)
    def wrapper(*args):
        log.append(f.__name__)
        return f(*args)
    return wrapper
def kept(f):
    @wraps(f)
    def wrapper(*args):
        log.append('kept')
        return f(*args)
    return wrapper
CONSTANT = 1
@dispatch
def leaf(x, *, more=10): return x + CONSTANT + more
@kept
def other(x): return 2 * x
@dispatch
def root(x): return [leaf(y) for y in (other(x), x)]
"""
    module = ModuleType("fla.fake")
    monkeypatch.setitem(sys.modules, "fla.fake", module)
    exec(source, module.__dict__)
    assert rebind(module.root, {"CONSTANT": 5})(3) == [21, 18]
    assert module.log == ["kept"]
    assert module.root(3) == [17, 14]
