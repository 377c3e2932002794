"""Thousands of packed rows after the freeze, in one thread and in two: nothing tuned, compiled or read."""

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: compiled Triton kernels"),
]
LONGEST = 14000


@pytest.fixture(scope="module", params=["fla", "flash_qla"])
def frozen(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from fla_safe.gdn import backends
    from fla_safe.gdn.layout import ProjectionLayout
    from fla_safe.gdn.steady.rehearsal import Rows
    from fla_safe.gdn.steady.warmup import take_over, warm_up
    from fla_safe.gdn.variant import MixerVariant
    from fla_safe.settings import Settings

    layout, bf16 = ProjectionLayout("interleaved", 8, 16, 128, 128), torch.bfloat16
    able, reason = backends.supports(request.param, "cuda", layout=layout, dtype=bf16)
    if not able:
        pytest.skip(reason)
    settings = Settings(
        gdn_impl="fla_safe", guard="strict", kernel=request.param, cache_root=tmp_path_factory.mktemp("ranks")
    )
    runtime = take_over(settings)
    try:
        backend = backends.resolve(request.param, "cuda", layout=layout, dtype=bf16)
        mixer = MixerVariant(layout, backend, bf16, 4, False, (bf16, bf16, bf16, bf16), 1e-6)
        warm_up(runtime, [mixer], Rows(LONGEST, 1, True), torch.device("cuda", 0), settings, print)
        yield runtime, mixer
    finally:
        runtime.deactivate()


def _steps(runtime: Any, mixer: Any, count: int, seed: int) -> torch.Tensor:
    from fla_safe.gdn.segments import PackedSegments

    draw = random.Random(seed)
    leaves = mixer.draw(LONGEST, 1, "cuda", seed=seed)
    proj = leaves.pop("proj").detach()
    total = torch.zeros((), device="cuda")
    for _ in range(count):
        rows = draw.randint(1, LONGEST)
        bounds = sorted({0, rows, *(draw.randint(0, rows) for _ in range(draw.randint(0, 199)))})
        segments = PackedSegments.prepare(torch.tensor(bounds, dtype=torch.int32, device="cuda"), rows)
        x = proj[:rows].detach().requires_grad_()
        with runtime.section:
            out = mixer({"proj": x, **leaves}, segments)
        grads = torch.autograd.grad(out.sum(), [x, leaves["A_log"]])
        total += grads[1].float().abs().sum()
    return total


def test_2000_packed_steps_of_random_lengths(frozen: Any) -> None:
    runtime, mixer = frozen
    assert torch.isfinite(_steps(runtime, mixer, 2000, seed=1))
    print(runtime.counters())
    assert not any(runtime.counters().values())


def test_two_threads_of_500_steps_give_the_results_of_one(frozen: Any) -> None:
    """On one GPU, each thread on a stream of its own."""
    runtime, mixer = frozen
    alone = [_steps(runtime, mixer, 500, seed) for seed in (2, 3)]
    results: dict[int, torch.Tensor] = {}
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                results[seed] = _steps(runtime, mixer, 500, seed)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (2, 3)]
    torch.cuda.synchronize()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert torch.equal(results[2], alone[0])
    assert torch.equal(results[3], alone[1])
    assert not any(runtime.counters().values())
