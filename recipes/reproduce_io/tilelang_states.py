"""Writes stand-ins for the three states in which TileLang is found: absent, half-installed, working."""

from pathlib import Path
from typing import Literal, get_args

__all__ = ["STATES", "State", "write"]

State = Literal["absent", "half", "working"]
STATES: tuple[State, ...] = get_args(State)

# The chain of modules that `import tilelang` (0.1.9) runs through before it meets a dependency that is missing. Like
# the original it reads its own metadata and adds a handler to its logger, each time.
_CHAIN = {
    "__init__": "import importlib.metadata, logging\n"
    "__version__ = importlib.metadata.version('tilelang')\n"
    "logging.getLogger('tilelang').addHandler(logging.NullHandler())\n"
    "from tilelang import jit\n",
    "jit/__init__": "from tilelang.cache import cached\n",
    "cache/__init__": "from tilelang.cutedsl import kernel_cache\nfrom tilelang.cache.kernel_cache import cached\n",
    "cutedsl/__init__": "from tilelang.cutedsl import kernel_cache\n",
    "cutedsl/kernel_cache": "from tilelang.cache.kernel_cache import cached\n",
    "cache/kernel_cache": "import a_dependency_that_is_not_installed\ncached = None\n",
}
# Functions that are never called: they give each module the size of the original's, about 10 KB.
_BODY = "".join(
    f"\n\ndef reserve_{i}(first, second, third=None):\n    total = first + second\n    if third is not None:\n"
    f"        total += third * {i}\n    return {{'total': total, 'first': first, 'second': second, 'index': {i}}}\n"
    for i in range(45)
)
# Enough of a working package for FLA to define its TileLang kernels at import; none is called (FLA_TILELANG=0).
_WORKING = """
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


def write(state: State, folder: Path) -> Path | None:
    """Write the package below `folder`; the directory for PYTHONPATH, or None for the state `absent`."""
    if state == "absent":
        return None
    modules = {"__init__": _WORKING, "language": _WORKING}
    if state == "half":
        modules = {name: text + _BODY for name, text in _CHAIN.items()}
    for name, text in modules.items():
        path = folder / "tilelang" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    metadata = folder / "tilelang-0.1.9.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tilelang\nVersion: 0.1.9\n" + "x" * 8000 + "\n")
    return folder
