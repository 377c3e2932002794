"""A stand-in GPU: Triton's real autotuner, JIT, compiler cache and launcher run; only the device below them is fake.

    import fake_triton
    gpu = fake_triton.install()            # before the library under test is imported
    gpu.compiled, gpu.benchmarks           # what the fake device was asked to do
    gpu.launches                           # with launcher="record": every launch with its grid and arguments

Tests put `tests/` on `sys.path` (in subprocesses through PYTHONPATH). Works with Triton 3.6 to 3.9.
"""

from fake_triton.device import FakeGpu, Launch
from fake_triton.install import install

__all__ = ["FakeGpu", "Launch", "install"]
