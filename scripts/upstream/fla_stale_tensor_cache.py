"""FLA returns the chunk indices of an earlier pack when the offsets were written into the same tensor.

`tensor_cache` compares arguments by identity, so a buffer that is filled anew for each batch (as CUDA graphs and
preallocated inputs do) gets the indices that belong to its former contents: wrong results, or access out of bounds.
`FLA_DISABLE_TENSOR_CACHE=1` avoids it. No GPU is needed.

    python fla_stale_tensor_cache.py      exit status 0: shown, 1: gone, 2: cannot tell
"""

import sys

import torch

if __name__ == "__main__":
    import fla
    from fla.ops.utils import prepare_chunk_indices

    print(f"fla {fla.__version__}")
    offsets = torch.tensor([0, 64, 128])
    prepare_chunk_indices(offsets, 64)
    offsets.copy_(torch.tensor([0, 64, 256]))
    again = prepare_chunk_indices(offsets, 64).tolist()
    right = prepare_chunk_indices(offsets.clone(), 64).tolist()
    print(f"offsets {offsets.tolist()}, chunks of 64")
    print(f"  same tensor, new contents: {again}\n  new tensor:                {right}")
    print("=> present" if again != right else "=> gone")
    sys.exit(0 if again != right else 1)
