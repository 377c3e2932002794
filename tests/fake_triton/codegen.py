"""Stub code generation: every stage writes a text of realistic size, so that caching and file access stay real."""

import threading
from typing import Any

from fake_triton.device import FakeGpu

__all__ = ["replace"]

# Mean sizes in bytes of the sm_90 artefacts of FLA's gated delta rule kernels.
SIZES = {"source": 18_000, "ttir": 14_000, "ttgir": 22_000, "llir": 80_000, "ptx": 60_000, "cubin": 40_000}


class _Text:
    def __init__(self, size: int) -> None:
        self.size = size

    def __str__(self) -> str:
        return "x" * self.size


def replace(gpu: FakeGpu) -> None:
    """Swap the front end and all CUDA stages; `gpu.compiled` gets the kernel's name for each compilation."""
    from triton.backends.nvidia import compiler as nvidia
    from triton.compiler.compiler import ASTSource

    names = threading.local()

    def make_ir(self: Any, *_: Any, **__: Any) -> _Text:
        gpu.compiled.append(self.name)
        names.current = self.name
        return _Text(SIZES["source"])

    def stage(extension: str) -> Any:
        def text(_: Any, metadata: dict[str, Any]) -> Any:
            if extension != "cubin":
                return _Text(SIZES[extension])
            metadata.update(shared=1024, name=names.current, tmem_size=0)
            metadata.update(global_scratch_size=0, global_scratch_align=1)
            metadata.update(profile_scratch_size=0, profile_scratch_align=1)
            return b"\x7fELF" + b"c" * SIZES["cubin"]

        return text

    def add_stages(self: Any, stages: dict[str, Any], *_: Any, **__: Any) -> None:
        stages.update({e: stage(e) for e in ("ttir", "ttgir", "llir", "ptx", "cubin")})

    ASTSource.make_ir = make_ir
    nvidia.CUDABackend.add_stages = add_stages
    nvidia.CUDABackend.load_dialects = lambda *_: None
