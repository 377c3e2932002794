"""FLA waits for the GPU to turn a pack's offsets into chunk indices, once for each tensor object that holds them.

`prepare_chunk_indices` needs numbers that only the GPU has (`repeat_interleave` reads its own output's length), so
the host waits until the GPU has caught up. The result is cached by the offsets' identity: a caller who makes an equal
tensor for each layer, as mcore-bridge does, waits in each layer. (`cu_seqlens_cpu=` avoids it from 0.5 on.)
No GPU is needed: what is counted are the operations that read a tensor on the host, whatever its device.

    python fla_offset_syncs.py      exit status 0: shown, 1: gone, 2: cannot tell
"""

import sys

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Reads(TorchDispatchMode):
    """Collects operations whose result's shape or value the host must fetch from the tensor's device."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name, kwargs = operation.name(), kwargs or {}
        unsized = name == "aten::repeat_interleave.Tensor" and kwargs.get("output_size") is None
        if unsized or name == "aten::_local_scalar_dense":
            self.seen.append(name)
        return operation(*args, **kwargs)


class Lists(TorchFunctionMode):
    """The same for `tolist`, which a CPU tensor answers without an operation."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.tolist:
            self.seen.append("Tensor.tolist")
        return function(*args, **(kwargs or {}))


def reads(offsets):
    with Reads() as mode, Lists(mode.seen):
        prepare_chunk_indices(offsets, 64)
    return mode.seen


if __name__ == "__main__":
    import fla
    from fla.ops.utils import prepare_chunk_indices

    print(f"fla {fla.__version__}")
    offsets = torch.tensor([0, 100, 164, 1000], dtype=torch.int32)
    print(f"first call:        {reads(offsets)}")
    print(f"same object again: {reads(offsets)}")
    seen = reads(offsets.reshape(-1))
    print(f"an equal tensor:   {seen}")
    print("=> present" if seen else "=> gone")
    sys.exit(0 if seen else 1)
