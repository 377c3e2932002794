"""Two launchers below Triton's own `CudaLauncher`: one that records arguments, one that is Triton's real C code.

The real one is built against a stub `libcuda.so.1` whose functions succeed and do nothing, which leaves exactly the
host cost of a launch without the driver's. It needs a C compiler.
"""

import ctypes
import re
import subprocess
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_triton.device import FakeGpu, Launch

__all__ = ["Function", "record", "use_real_code"]


class Function(int):
    """A CUfunction handle (an address to the C launcher) that knows what it stands for."""

    kernel: str
    signature: str

    @classmethod
    def of(cls, address: int, kernel: str) -> "Function":
        """Handle number `address` of a loaded kernel."""
        handle = cls(address)
        handle.kernel = kernel
        return handle


def _address(value: Any) -> Any:
    return value.data_ptr() if hasattr(value, "data_ptr") else value


def record(gpu: FakeGpu) -> None:
    """Make every launch append to `gpu.launches`, in the calling convention of the installed Triton."""
    from triton.backends.nvidia import driver as nvidia

    nvidia.libcuda_dirs = lambda: []
    nvidia.library_dirs = lambda: []

    def append(
        head: tuple[Any, ...], packed: Any, hooks: tuple[Any, Any, Any], signature: list[str], args: Any
    ) -> None:
        metadata, enter, leave = hooks
        x, y, z, stream, function = head
        if enter is not None:
            enter(metadata)
        live = tuple(_address(a) for a, kind in zip(args, signature, strict=True) if kind != "constexpr")
        gpu.launches.append(
            Launch(function.kernel, (x, y, z), gpu.current_device(), stream, live, str(signature), packed[0])
        )
        if leave is not None:
            leave(metadata)

    if hasattr(nvidia, "make_launcher"):  # up to 3.6: one generated C module for each signature

        def make_launcher(constants: Any, signature: dict[int, str], *_: Any) -> str:
            return repr([str(kind) for kind in signature.values()])

        def compile_module_from_src(src: str, name: str, **_: Any) -> Any:
            signature = eval(src)  # what make_launcher above returned

            def launch(*a: Any) -> None:
                append(a[:5], a[9], a[10:13], signature, a[13:])

            return types.SimpleNamespace(launch=launch)

        nvidia.make_launcher = make_launcher
        nvidia.compile_module_from_src = compile_module_from_src
        return

    # 3.7 and later: one C function for all signatures, which gets annotations and all arguments in one tuple.
    nvidia.annotate_arguments = lambda signature: [str(kind) for kind in signature]
    nvidia.make_kernel_signature = lambda signature: b""

    def launch(*a: Any) -> None:
        append(a[:5], a[7], a[8:11], a[13], a[15])

    gpu.launch_entry = launch  # type: ignore[attr-defined]


_STUB = """
#include <stdint.h>
int cuPointerGetAttribute(void *data, int which, uint64_t pointer) { *(uint64_t *)data = pointer; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "stub"; return 0; }
"""


def use_real_code(directory: Path) -> Callable[..., Any] | None:
    """Build the stub library in `directory` and let Triton compile its own C launcher against it.

    Returns the one C `launch` function where Triton has such (3.7 and later), else None.
    """
    from triton.backends.nvidia import driver as nvidia

    source = Path(nvidia.__file__).with_name("driver.c").read_text()
    own = set(re.findall(r"int (cu\w+)\(", _STUB))
    others = sorted(set(re.findall(r"\bcu[A-Z]\w+(?=\s*\()", source)) | {"cuLaunchKernelEx"})
    stub = directory / "stub.c"
    stub.write_text(_STUB + "".join(f"int {name}() {{ return 0; }}\n" for name in others if name not in own))
    library = directory / "libcuda.so.1"
    flags = ["-O2", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.check_call(["gcc", *flags, str(stub), "-o", str(library)])
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    nvidia.libcuda_dirs = lambda: [str(directory)]
    nvidia.library_dirs = lambda: [str(directory)]
    if hasattr(nvidia, "make_launcher"):
        nvidia.PyCUtensorMap = type("PyCUtensorMap", (), {})
        return None
    build = getattr(nvidia, "compile_module_from_file", None)
    arguments = {"name": "cuda_utils", "library_dirs": [str(directory)], "libraries": ["libcuda.so.1"]}
    arguments["include_dirs"] = nvidia.include_dirs
    if build is not None:
        module = build(src_path=str(Path(nvidia.__file__).with_name("driver.c")), **arguments)
    else:
        module = nvidia.compile_module_from_src(src=source, **arguments)
    for name in ("PyCUtensorMap", "PyKernelArg", "ARG_CONSTEXPR", "ARG_KERNEL", "ARG_TUPLE"):
        setattr(nvidia, name, getattr(module, name))
    return module
