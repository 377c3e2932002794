"""Loads the TransformerEngine stand-in under another name, so that a test process needs no activation."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import fla_safe.cpu

__all__ = ["clean_environment", "load", "run_python", "run_ranks"]


def load() -> ModuleType:
    """The stand-in as module `standin_te`; the name `transformer_engine` stays free."""
    if "standin_te" not in sys.modules:
        folder = Path(fla_safe.cpu.__file__).parent / "standin" / "transformer_engine"
        spec = importlib.util.spec_from_file_location(
            "standin_te", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["standin_te"] = module
        spec.loader.exec_module(module)
    return sys.modules["standin_te"]


def clean_environment(**extra: str) -> dict[str, str]:
    """Only what a process needs to start: nothing that the caller's shell set for training."""
    kept = ("PATH", "HOME", "TMPDIR", "LANG", "SSL_CERT_FILE", "LD_LIBRARY_PATH")
    base = {name: os.environ[name] for name in kept if name in os.environ}
    return {**base, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **extra}


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter with a clean environment."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=300,
    )


def run_ranks(checks: Sequence[str], folder: Path, world: int = 2) -> list[str]:
    """Run functions of standin_ranks.py, in order, in `world` gloo processes, and return each rank's output.

    A rank prints `passed <check>` after each and stops at the first failure; starting Python once for all saves time.
    """
    script = Path(__file__).with_name("standin_ranks.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(world), str(folder / "store"), *checks],
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    return [process.communicate(timeout=300)[0] for process in processes]
