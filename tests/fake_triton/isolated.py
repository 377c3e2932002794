"""Run a test's body in a fresh interpreter: what it patches in torch and Triton cannot leak into other tests.

    @isolated(gpu="record")
    def test_something(gpu, state): ...     # parametrised values must be JSON; `gpu` is the installed FakeGpu

In the child the plain function is imported by name and called. Environment variables and directories for `sys.path`
come from the test's `environ` and `path`; FLA_SAFE_TEST_CODEGEN=real in `environ` compiles for sm_90.
"""

import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["child", "isolated", "versions_from"]

_CHILD = "FLA_SAFE_TEST_CHILD"
_CODEGEN = "FLA_SAFE_TEST_CODEGEN"
_HERE = Path(__file__).resolve().parent.parent


def versions_from(variable: str, missing: str) -> list[Any]:
    """Parameters for the directories named in an environment variable (separated as in PATH), or one skipped."""
    import pytest

    places = [p for p in os.environ.get(variable, "").split(os.pathsep) if p]
    skipped = pytest.param("", marks=pytest.mark.skip(f"{variable} is unset: {missing}"))
    return [pytest.param(p, id=Path(p).name) for p in places] or [skipped]


def isolated(function: Callable[..., None]) -> Callable[..., None]:
    """Decorator for a test function whose first parameter is `gpu`."""
    signature = inspect.signature(function)
    outer = [p for name, p in signature.parameters.items() if name != "gpu"]

    @functools.wraps(function)
    def test(*args: Any, **kwargs: Any) -> None:
        if os.environ.get(_CHILD):
            function(*args, **kwargs)
            return
        path = list(kwargs.get("path") or ())
        environ = dict(kwargs.get("environ") or {})
        child(
            function, {k: str(v) if isinstance(v, Path) else v for k, v in kwargs.items()}, path=path, environ=environ
        )

    test.__signature__ = signature.replace(parameters=outer)  # type: ignore[attr-defined]
    return test


def child(
    function: Callable[..., None],
    kwargs: dict[str, Any],
    *,
    path: Sequence[str] = (),
    environ: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
    timeout: float = 240,
) -> str:
    """Call `function(gpu, **kwargs)` in a new interpreter and return its output; its failure fails the caller."""
    module = Path(inspect.getfile(function))
    request = json.dumps(
        {"directory": str(module.parent), "module": module.stem, "name": function.__name__, "kwargs": kwargs}
    )
    roots = [*path, str(_HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        **(environ or {}),
        _CHILD: request,
        "PYTHONPATH": os.pathsep.join(p for p in roots if p),
    }
    environment.pop("TRITON_CACHE_DIR", None)
    environment.update({k: v for k, v in (environ or {}).items() if k == "TRITON_CACHE_DIR"})
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "fake_triton.isolated"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{function.__name__} failed in its own process\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def _main() -> None:
    import shutil
    import tempfile

    request = json.loads(os.environ[_CHILD])
    made = None
    if "TRITON_CACHE_DIR" not in os.environ:
        made = os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="fake_triton_cache_")
    try:
        from fake_triton import install

        gpu = install("record", real_codegen=os.environ.get(_CODEGEN) == "real")
        sys.path.insert(0, request["directory"])
        function = getattr(importlib.import_module(request["module"]), request["name"])
        getattr(function, "__wrapped__", function)(gpu, **request["kwargs"])
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


if __name__ == "__main__":
    _main()
