"""Put the stand-in GPU under Triton and `torch.cuda`; for a process of its own, there is no way back."""

import contextlib
import os
import random
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from fake_triton import codegen, launcher
from fake_triton.device import PROPERTIES, FakeGpu

__all__ = ["install"]


def install(kind: Literal["record", "real"] = "record", *, real_codegen: bool = False, seed: int = 0) -> FakeGpu:
    """Make Triton believe in eight H200s whose memory is the host's.

    Args:
        kind: `"record"` keeps every launch in `gpu.launches`; `"real"` runs Triton's C launcher on a stub driver.
        real_codegen: keep Triton's own compiler for sm_90 (slow).
        seed: of the made-up benchmark times.
    """
    gpu = FakeGpu()
    draw = random.Random(seed)
    gpu.bench_ms = lambda: draw.uniform(0.1, 1.0)
    if "TRITON_CACHE_DIR" not in os.environ:
        # The launchers share Triton's cache keys with a real GPU's: never write them where a real job would look.
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="fake_triton_cache_")
    _torch_cuda(gpu)
    module = None
    if kind == "real":
        module = launcher.use_real_code(Path(tempfile.mkdtemp(prefix="fake_cuda_")))
    else:
        launcher.record(gpu)
    _driver(gpu, module)
    if not real_codegen:
        codegen.replace(gpu)
    return gpu


def _torch_cuda(gpu: FakeGpu) -> None:
    import torch

    cuda: Any = torch.cuda
    properties = types.SimpleNamespace(
        multi_processor_count=132, total_memory=1 << 37, name="NVIDIA H200", major=9, minor=0
    )

    @contextlib.contextmanager
    def device(index: Any = None) -> Iterator[None]:
        index = getattr(index, "index", index)
        before = gpu.current_device()
        gpu.set_device(before if index is None or index < 0 else index)
        try:
            yield
        finally:
            gpu.set_device(before)

    cuda.get_device_name = lambda *_: "NVIDIA H200"
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: properties
    cuda.device_count = lambda: gpu.count
    cuda.current_device = gpu.current_device
    cuda.set_device = gpu.set_device
    cuda.synchronize = lambda *_: None
    cuda.device = device


def _driver(gpu: FakeGpu, module: Any) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver as active

    class Utils:
        def __init__(self) -> None:
            if module is not None:
                self.launch = module.launch
                self.build_signature_metadata = module.build_signature_metadata
            elif hasattr(gpu, "launch_entry"):
                self.launch = gpu.launch_entry

        def load_binary(self, name: str, *_: Any) -> tuple[Any, ...]:
            gpu.loaded += 1
            return object(), launcher.Function.of(4096 + gpu.loaded, name), 64, 0, 1024

        def get_device_properties(self, _: int) -> dict[str, int]:
            return PROPERTIES

        def unload_module(self, _: Any) -> None: ...

    class Driver(nvidia.CudaDriver):
        def __init__(self) -> None:
            self.utils = Utils()
            self.launcher_cls = nvidia.CudaLauncher
            self.get_device_capability = lambda *_: (9, 0)
            self.get_current_stream = lambda device: 7000 + device
            self.get_current_device = gpu.current_device
            self.set_current_device = gpu.set_device

        @staticmethod
        def is_active() -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

        def get_benchmarker(self) -> Any:
            return gpu.bench

    active.set_active(Driver())
