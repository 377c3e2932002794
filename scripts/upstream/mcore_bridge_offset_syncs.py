"""mcore-bridge's GDN layer asks the GPU about a pack's offsets in every layer, and hands FLA a new tensor each time.

`_resolve_cu_seqlens` compares values that only the GPU has, so the host waits until the GPU has caught up, in each
layer and each recomputation. Its result is a new tensor object, so FLA's cache of chunk indices, which goes by
identity, misses in each layer. With context parallelism `_unpack_sequence` waits twice more for every sequence in the
pack. One answer for each micro-batch would do.
No GPU is needed: on any device PyTorch announces reading a tensor's value on the host.

    python mcore_bridge_offset_syncs.py      exit status 0: shown, 1: gone, 2: cannot tell
"""

import importlib.metadata
import importlib.util
import os
import sys
import types

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Reads(TorchDispatchMode):
    """Counts how often the host reads a tensor's value."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += operation is torch.ops.aten._local_scalar_dense.default
        return operation(*args, **(kwargs or {}))


def layer_module():
    if importlib.util.find_spec("transformer_engine") is not None:
        return importlib.import_module("mcore_bridge.model.modules.gated_delta_net")
    importlib.import_module("megatron.core.ssm.gated_delta_net")
    # mcore-bridge as a whole needs TransformerEngine; this one file mentions it for FP8 only.
    sys.modules["transformer_engine"] = types.ModuleType("transformer_engine")
    where = importlib.util.find_spec("mcore_bridge").submodule_search_locations[0]
    config = types.ModuleType("mcore_bridge.config")
    config.ModelConfig = object
    sys.modules.update({"mcore_bridge": types.ModuleType("mcore_bridge"), "mcore_bridge.config": config})
    spec = importlib.util.spec_from_file_location("gdn", os.path.join(where, "model/modules/gated_delta_net.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    print(f"mcore-bridge {importlib.metadata.version('mcore-bridge')}")
    module = layer_module()
    offsets, total = torch.tensor([0, 100, 164, 1000], dtype=torch.int32), 1000
    try:
        with Reads() as layer:
            resolved = module.GatedDeltaNet._resolve_cu_seqlens(None, offsets, total)
    except (AttributeError, TypeError) as error:
        print(f"=> cannot tell: this version does it elsewhere ({error})")
        sys.exit(2)
    print(f"one layer's call: {layer.count} reads; the result is the tensor that was given: {resolved is offsets}")
    with Reads() as context_parallel:
        module._unpack_sequence(torch.zeros(total, 1, 1), offsets, dim=0)
    print(f"with context parallelism, a pack of 3 sequences: {context_parallel.count} reads more, twice a layer")
    shown = layer.count > 0 or resolved is not offsets or context_parallel.count > 0
    print("=> present" if shown else "=> gone")
    sys.exit(0 if shown else 1)
