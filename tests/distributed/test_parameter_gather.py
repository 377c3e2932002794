"""Weights that Megatron gathers during a forward pass (`overlap_param_gather`) are waited for before they are read."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="uses the CPU stand-in for TransformerEngine")


def read_while_gathering() -> None:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from test_core_spec import HIDDEN, build

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    solo = [dist.new_group([other]) for other in range(size)][rank]
    layer = build(solo, solo, False)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    # Buckets of one parameter each: no module's hook waits for another module's weights by accident.
    overlap = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_param_gather=True, overlap_grad_reduce=True, bucket_size=1
    )
    wrapped = DistributedDataParallel(layer.config, overlap, layer)
    for group in wrapped.bucket_groups:
        for bucket in group.buckets:
            # As after an optimizer step: a rank's own shard is new, the others' are not here yet.
            bucket.param_data.chunk(size)[rank].fill_(1.0)
    mix = layer.run_mixer

    def look(proj: torch.Tensor, **given: object) -> torch.Tensor:
        stale = [name for name, value in given.items() if isinstance(value, torch.Tensor) and not (value == 1).all()]
        print("stale", *stale, flush=True)
        return mix(proj, **given)

    layer.run_mixer = look
    wrapped(torch.ones(8, 1, HIDDEN, dtype=torch.float64), None)


def test_no_weight_is_read_before_it_has_been_gathered() -> None:
    assert on_ranks(__file__, "read_while_gathering", 2, FLA_SAFE_CPU="1") == ["stale"] * 2
