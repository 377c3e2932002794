"""`import torch` with this package installed: cheap, silent, unbreakable, and enough to register the flag."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fla_safe

PACKAGE = Path(fla_safe.__file__).parent
ENTRY_POINTS = "[torch.backends]\nfla_safe = fla_safe.autoload:install\n"


def python(
    code: str, *arguments: str, path: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FLA_SAFE", "TORCH_DEVICE"))}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=env | environment, text=True, capture_output=True, check=False
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A second install of the package, before the real one on the path, that a test may damage."""
    shutil.copytree(PACKAGE, tmp_path / "fla_safe", ignore=shutil.ignore_patterns("__pycache__"))
    metadata = tmp_path / "fla_safe-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fla-safe\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return tmp_path


def test_import_torch_loads_nothing_but_the_autoload_module() -> None:
    done = python("import torch, sys; print(sorted(m for m in sys.modules if m.split('.')[0] == 'fla_safe'))")
    assert done.stdout.strip() == "['fla_safe', 'fla_safe.autoload']"
    assert done.stderr == ""


def test_installing_the_callbacks_takes_less_than_a_millisecond(tmp_path: Path) -> None:
    # In twelfths of what `import http.client` takes, 12 ms of processor time where this was written (ours 0.7): a slow
    # machine is slow at both. Best of five, with compiled bytecode as after `pip install`.
    code = (
        "import sys, time, importlib.metadata, importlib.abc\n"
        "start = time.process_time()\n"
        "from fla_safe.autoload import install\n"
        "install()\n"
        "installed = time.process_time()\n"
        "import http.client\n"
        "print((installed - start) / (time.process_time() - installed))"
    )
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    assert min(float(python(code, **compiled).stdout) for _ in range(5)) < 1 / 12


def test_works_from_a_target_directory_on_pythonpath(copy: Path) -> None:
    done = python("import torch, fla_safe; print(fla_safe.__file__)", path=copy)
    assert done.stdout.strip() == str(copy / "fla_safe" / "__init__.py")


def test_a_damaged_install_cannot_break_import_torch_without_standard_error(copy: Path) -> None:
    (copy / "fla_safe" / "cpu" / "__init__.py").write_text("raise ValueError('broken')")
    command = f"exec {sys.executable} -c \"import torch; print('fine')\" 2>&-"
    env = os.environ | {"PYTHONPATH": str(copy), "FLA_SAFE_CPU": "1"}
    done = subprocess.run(["sh", "-c", command], env=env, text=True, stdout=subprocess.PIPE, check=False)
    assert done.stdout.strip() == "fine"


@pytest.mark.parametrize("damage", ["everything else is missing", "the CPU stand-in raises"])
def test_a_damaged_install_cannot_break_import_torch(copy: Path, damage: str) -> None:
    if damage == "everything else is missing":
        for entry in (copy / "fla_safe").iterdir():
            if entry.name not in {"__init__.py", "autoload.py"}:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    else:
        (copy / "fla_safe" / "cpu" / "__init__.py").write_text("raise ValueError('broken')")
    done = python("import torch; print('fine')", path=copy, FLA_SAFE_CPU="1")
    assert done.stdout.strip() == "fine"
    assert "--gdn_impl is not available" in done.stderr


FAKE_SWIFT = """
import sys, types, importlib.abc, importlib.machinery, dataclasses

@dataclasses.dataclass
class MegatronArguments:
    iterations: int = 1

class Source(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] == 'swift':
            return importlib.machinery.ModuleSpec(name, self, is_package=name.count('.') < 3)
    def exec_module(self, module):
        if module.__name__.endswith('megatron_args'):
            MegatronArguments.__module__ = module.__name__
            {define}

sys.meta_path.insert(0, Source())
import torch
import swift.megatron.arguments.megatron_args as module
"""


def test_the_argument_class_gets_the_field_and_keeps_its_identity() -> None:
    code = FAKE_SWIFT.replace("{define}", "module.MegatronArguments = MegatronArguments") + (
        "import pickle\n"
        "cls = module.MegatronArguments\n"
        "value = cls(gdn_impl='fla_safe')\n"
        "assert isinstance(value, MegatronArguments) and cls.__qualname__ == 'MegatronArguments'\n"
        "assert pickle.loads(pickle.dumps(value)) == value\n"
        "assert type(module.__loader__).__name__ == 'Source', module.__loader__\n"
        "print({f.name: f.default for f in dataclasses.fields(cls)})"
    )
    done = python(code)
    added = {
        "gdn_impl": "default",
        "gdn_kernel": "auto",
        "gdn_guard": "warn",
        "gdn_check": "off",
        "gdn_bundle": None,
        "gdn_cache_root": None,
        "gdn_report": None,
    }
    assert ast.literal_eval(done.stdout) == {"iterations": 1} | added, done.stderr


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        pytest.param(["--gdn_impl", "fla_safe"], {}, id="as documented"),
        pytest.param(["--gdn_impl=fla_safe"], {}, id="with an equals sign"),
        pytest.param(["--gdn-impl", "fla_safe"], {}, id="with hyphens"),
        pytest.param(["--gdn_i", "fla_safe"], {}, id="abbreviated"),
        pytest.param([], {"RAY_SWIFT_ARGS": '["--gdn-impl", "fla_safe"]'}, id="in a Ray worker"),
    ],
)
def test_an_unknown_ms_swift_is_refused_when_the_flag_is_asked_for(
    arguments: list[str], environment: dict[str, str]
) -> None:
    code = FAKE_SWIFT.replace("{define}", "pass")
    done = python(code, *arguments, "--ignore_args_error", "true", **environment)
    assert done.returncode != 0
    assert "UnsupportedSwiftError" in done.stderr
    assert "ms-swift>=4.5,<4.7" in done.stderr


def test_an_unknown_ms_swift_is_left_alone_without_the_flag() -> None:
    done = python(FAKE_SWIFT.replace("{define}", "pass") + "print('fine')")
    assert done.stdout.strip() == "fine"
    assert "--gdn_impl is not available" in done.stderr


def test_a_failed_registration_never_trains_on_stock_layers(copy: Path) -> None:
    """With `--ignore_args_error true`, ms-swift would only warn about the unknown flag."""
    (copy / "fla_safe" / "cpu" / "__init__.py").write_text("raise ValueError('broken')")
    done = python(
        "import torch\nimport swift.megatron.arguments.megatron_args",
        "--gdn_impl=fla_safe",
        path=copy,
        FLA_SAFE_CPU="1",
    )
    assert done.returncode != 0
    assert "could not register --gdn_impl: broken" in done.stderr
