"""The dflash recipe: what anchors see, the budget, two pairs in one process, refusals, and both FLAs on a fake GPU."""

import gc
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from fake_triton.isolated import isolated

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

from dflash import attention, compiled, directories, mask, memory, train, workers
from dflash import sizes as dflash_sizes
from dflash.anchors import Budget, BudgetError, Pack, Packer
from dflash.drafter import Drafter, drafter_loss
from dflash.pair import Pair, pair_devices
from dflash.target import StockNeedsGpuError, Target, choose_kernel, stock_kernel

from fla_safe.gdn.backends import resolve

CPU = torch.device("cpu")
SMALL = dflash_sizes.PRESETS["cpu"]
FLEX = torch.nn.attention.flex_attention


def documents(*lengths: int) -> list[torch.Tensor]:
    """Tokens that differ all over the pack."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return [torch.arange(a, b) for a, b in pairwise(starts.tolist())]


def packed(budget: Budget, *lengths: int) -> Pack:
    return Packer(iter([]), budget).pack(documents(*lengths))


def dense(budget: Budget, pack: Pack) -> torch.Tensor:
    """`[A * B, C + A * B]`, by walking through queries and keys."""
    bounds = pack.offsets.tolist()
    document = [sum(row >= end for end in bounds[1:]) for row in range(bounds[-1])]
    allowed = torch.zeros(budget.draft, budget.tokens, dtype=torch.bool)
    rows = [
        next(r for r in range(bounds[-1]) if pack.tokens[r] == pack.anchors.token[a]) for a in range(pack.used)
    ]  # tokens are unique
    for query in range(budget.draft):
        anchor = query // budget.block
        for key in range(budget.tokens):
            if key >= budget.context:
                allowed[query, key] = (key - budget.context) // budget.block == anchor
            elif key < bounds[-1] and anchor < pack.used:
                allowed[query, key] = document[key] == document[rows[anchor]] and key < rows[anchor]
    return allowed


# ---- anchors and budget


@pytest.mark.parametrize(
    ("budget", "lengths"),
    [
        (Budget(200, 8, 4), (40, 3, 90)),
        (Budget(200, 8, 4), (168,)),
        (Budget(64, 8, 4), (1, 2, 1, 3)),
        (Budget(600, 40, 5), (250, 100, 50)),
    ],
    ids=["three documents", "one that fills the context", "places without an anchor", "several flex blocks"],
)
def test_an_anchor_sees_its_document_before_it_and_its_own_block(budget: Budget, lengths: tuple[int, ...]) -> None:
    pack = packed(budget, *lengths)
    made = mask.AnchorMask(budget, CPU, compiled=False)
    made.update(pack.anchors)
    expected = dense(budget, pack)
    assert torch.equal(made.rows().repeat_interleave(budget.block, 0), expected)
    q = torch.arange(budget.draft)[:, None]
    k = torch.arange(budget.tokens)[None]
    block_mask = made.block_mask()
    assert torch.equal(block_mask.mask_mod(q * 0, q * 0, q, k), expected)
    coarse = torch.nn.functional.pad(expected, (0, -budget.tokens % 128, 0, -budget.draft % 128))
    coarse = coarse.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).any(3).any(1)
    assert torch.equal(block_mask.to_dense()[0, 0].bool(), coarse)
    assert expected.any(1).all(), "a query that sees nothing would be NaN"


def test_both_attentions_equal_a_dense_softmax() -> None:
    budget = Budget(200, 8, 4)
    made = mask.AnchorMask(budget, CPU, compiled=False)
    made.update(packed(budget, 40, 3, 90).anchors)
    q = torch.randn(1, 2, budget.draft, 16)
    k, v = torch.randn(2, 1, 2, budget.tokens, 16)
    scores = (q @ k.mT / 4).masked_fill(~made.rows().repeat_interleave(budget.block, 0), float("-inf"))
    expected = scores.softmax(-1) @ v
    by_anchor = attention.attend("sdpa_by_anchor", q, k, v, made.rows(), budget.block)
    torch.testing.assert_close(by_anchor, expected)
    torch.testing.assert_close(attention.attend("flex", q, k, v, made.block_mask(), budget.block), expected)


def test_a_change_outside_of_what_an_anchor_sees_changes_nothing() -> None:
    """The whole drafter, not the mask alone: other documents, later rows and other blocks leave the logits alone."""
    budget = SMALL.step_budget
    pack = packed(budget, 30, 40)
    drafter = Drafter(SMALL.drafter, budget, torch.randn(SMALL.vocabulary, SMALL.hidden), "sdpa_by_anchor")
    made = mask.AnchorMask(budget, CPU, compiled=False)
    pack = replace(pack, anchors=replace(pack.anchors, token=pack.anchors.token % SMALL.vocabulary))
    made.update(pack.anchors)
    position = torch.arange(budget.context)
    features = torch.randn(budget.context, SMALL.target.features)
    before = drafter(features, position, pack.anchors, made.rows())
    anchor = pack.used // 2
    first, last = int(pack.anchors.first[anchor]), int(pack.anchors.last[anchor])
    seen = torch.zeros(budget.context, dtype=torch.bool)
    seen[first:last] = True
    token = pack.anchors.token.clone()
    token[torch.arange(budget.anchors) != anchor] += 1
    others = replace(pack.anchors, token=token % SMALL.vocabulary)
    after = drafter(torch.where(seen[:, None], features, features + 1), position, others, made.rows())
    torch.testing.assert_close(after[anchor], before[anchor])
    assert not torch.allclose(after[anchor - 1], before[anchor - 1])
    inside = drafter(torch.where(seen[:, None], features + 1, features), position, pack.anchors, made.rows())
    assert not torch.allclose(inside[anchor], before[anchor])


def test_labels_are_the_tokens_that_follow_in_the_same_document() -> None:
    pack = packed(Budget(200, 20, 4), 10, 2, 12)
    starts, ends = pack.offsets.tolist()[:-1], pack.offsets.tolist()[1:]
    weights = pack.anchors.weights
    assert (weights[: pack.used, 0] == 1).all()
    for a in range(pack.used):
        token = int(pack.anchors.token[a])  # equals its row
        start, end = next((s, e) for s, e in zip(starts, ends, strict=True) if s <= token < e)
        assert (int(pack.anchors.first[a]), int(pack.anchors.last[a])) == (start, token)
        assert int(pack.anchors.position[a]) == token - start
        for k in range(3):
            assert (weights[a, k] > 0) == (token + 1 + k < end)
            assert weights[a, k] == 0 or pack.anchors.labels[a, k] == token + 1 + k
    assert (weights[pack.used :] == 0).all()


def test_no_step_exceeds_the_budget_and_no_document_is_lost() -> None:
    budget = Budget(192, 16, 4)
    drawn: list[torch.Tensor] = []

    def source() -> Iterator[torch.Tensor]:
        for document in SMALL.documents(seed=3):
            drawn.append(document)
            yield document

    packs = list(islice(Packer(source(), budget), 20))
    for pack in packs:
        assert len(pack.tokens) + pack.used * budget.block <= budget.tokens
        assert len(pack.anchors.token) == budget.anchors
    assert torch.equal(torch.cat([p.tokens for p in packs]), torch.cat(drawn[:-1]))  # the last one waits
    assert max(len(p.tokens) for p in packs) > 0.9 * budget.context


def test_documents_longer_than_the_context_are_cut_and_impossible_budgets_refused() -> None:
    budget = Budget(40, 4, 4)
    assert len(next(Packer(iter(documents(100, 5)), budget)).tokens) == budget.context
    with pytest.raises(BudgetError, match="at most 24"):
        packed(budget, 20, 5)
    for tokens, anchors, block in ((16, 4, 4), (100, 0, 4), (100, 4, 1)):
        with pytest.raises(BudgetError, match="lower --anchors"):
            Budget(tokens, anchors, block)


def test_devices_of_pairs() -> None:
    def numbers(pairs: int, gpus: int) -> list[tuple[int | None, int | None]]:
        return [(a.index, b.index) for a, b in pair_devices(pairs, gpus)]

    assert numbers(2, 4) == [(0, 1), (2, 3)]
    assert numbers(2, 2) == [(0, 1), (1, 0)]
    assert numbers(2, 1) == [(0, 0), (0, 0)]
    assert pair_devices(1, 0) == [(CPU, CPU)]


# ---- the compiled drafter


def loss_of(sizes: dflash_sizes.Sizes, function: Any, **options: Any) -> compiled.Compiled:
    """A compiled function after both passes of one drafter."""
    made = compiled.Compiled(function, compiler="aot_eager", **options)
    pair = Pair(0, (CPU, CPU), sizes, resolve("torch", CPU), "sdpa_by_anchor", made)
    pair.rehearse_drafter()
    return made


FEW = replace(SMALL, anchors=2, budget=128 + 8)


def test_a_graph_break_is_a_named_error() -> None:
    def breaks(*args: Any) -> torch.Tensor:
        loss = drafter_loss(*args)
        torch._dynamo.graph_break()
        return loss * 2

    with pytest.raises(compiled.GraphBreakError, match="one graph for the whole drafter"):
        loss_of(FEW, breaks)


@pytest.mark.parametrize("how", ["disabled", "without the fused operator"])
def test_a_drafter_that_is_not_compiled_as_meant_is_a_named_error(how: str) -> None:
    if how == "disabled":
        made = compiled.Compiled(drafter_loss, compiler="aot_eager")
        made._function = torch.compiler.disable(drafter_loss)
        pair = Pair(0, (CPU, CPU), FEW, resolve("torch", CPU), "sdpa_by_anchor", made)
        pair.rehearse_drafter()
        with pytest.raises(compiled.NotCompiledError, match="forward pass ran without a compiled graph"):
            made.require()
    else:
        with pytest.raises(compiled.NotCompiledError, match="forward pass ran without flex_attention"):
            loss_of(FEW, drafter_loss, fused="flex_attention").require()


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, block: int) -> torch.Tensor:
    """What an eager fallback does."""
    scores = (q @ k.mT).masked_fill(~rows.repeat_interleave(block, 0), float("-inf"))
    return scores.softmax(-1) @ v


def test_a_graph_that_holds_the_scores_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    few = replace(FEW, anchors=16, budget=512 + 64)
    monkeypatch.setattr(attention, "sdpa_by_anchor", plain_attention)
    with pytest.raises(compiled.ScoresHeldError, match=r"2, 64, 576\]"):
        loss_of(few, drafter_loss, limit=few.scores)


def test_flex_attention_trains_two_pairs_on_two_graphs_without_a_score_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs of the GPU's path, made on the CPU: PyTorch refuses to differentiate flex_attention here."""
    monkeypatch.setattr(FLEX, "_validate_device", lambda *_: None)
    create = CompileCounter()
    whole = torch.compile(FLEX.create_block_mask, dynamic=False, fullgraph=True, backend=create)
    monkeypatch.setattr(mask, "_compiled_create_block_mask", whole)
    sizes = replace(SMALL, anchors=16, budget=256 + 128, block=8)
    made = compiled.Compiled(drafter_loss, compiler="aot_eager", fused="flex_attention", limit=sizes.scores)
    pairs = [Pair(i, (CPU, CPU), sizes, resolve("torch", CPU), "flex", made) for i in range(2)]
    features = torch.randn(256, sizes.target.features)
    for pair in pairs:
        pair.mask = mask.AnchorMask(sizes.step_budget, CPU, compiled=True)
        for _ in range(2):
            pack = next(pair.packs)
            pair.optimizer.zero_grad()
            pair.draft(features, pack).backward()
        grads = {name: p.grad for name, p in pair.drafter.named_parameters()}
        pair.optimizer.zero_grad()
        reference = Pair(pair.number, (CPU, CPU), sizes, resolve("torch", CPU), "sdpa_by_anchor", made)
        reference.compiled = drafter_loss  # type: ignore[assignment]
        reference.draft(features, pack).backward()
        for name, parameter in reference.drafter.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)
    made.require()
    assert [seen.backward for seen in made.seen] == [False, True], "other anchors or the second pair made new graphs"
    assert create.frame_count == 1
    assert made.largest.largest < sizes.scores / 2


def test_peak_memory_grows_with_anchors_and_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = replace(dflash_sizes.MEMORY["cpu"], anchors=4, block=32, budget=512 + 128)
    monkeypatch.setattr(memory, "_EIGHTHS", (4, 2, 1))
    rows = memory.measure(sizes, CPU, "aot_eager")
    assert [row.anchors for row in rows] == [1, 2, 4]
    assert all(row.peak <= row.bound for row in rows)
    assert "one score matrix" in str(rows[0])
    heavy = replace(rows[-1], peak=rows[-1].bound + 1)
    with pytest.raises(memory.MemoryBoundError, match="on the line"):
        memory.check([*rows[:-1], heavy])
    with pytest.raises(memory.MemoryBoundError, match="less than one matrix"):
        memory.check([replace(row, peak=row.scores, bound=row.scores) for row in rows])


# ---- training


def test_two_pairs_train_in_two_threads_and_nothing_is_compiled_after_the_freeze(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with train.make_job("fla_safe", [(CPU, CPU)] * 2, SMALL, compiler="aot_eager") as job:
        graphs = len(job.compiled.seen)
        assert {seen.backward for seen in job.compiled.seen} == {False, True}
        train.train(job, 40, every=2)
        assert len(job.compiled.seen) == graphs, "a graph was made after the rehearsal"
        assert job.directories.ours is not None
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(job.directories.ours))
        with pytest.raises(directories.DirectoriesMixedError, match="stay where they are"):
            job.directories.require_still(job.runtime)
        counters = job.counters()
    assert counters == dict.fromkeys(counters, 0)
    for number in (0, 1):
        losses = list(job.losses[number].values())
        assert sum(losses[-5:]) / 5 < 0.75 * losses[0]
    assert job.losses[0] != job.losses[1]
    assert "pair 1  step 40/40" in capsys.readouterr().out


def test_a_shape_that_was_not_rehearsed_is_refused_while_training() -> None:
    with compiled.no_more_graphs(), pytest.raises(RuntimeError, match="fail_on_recompile"):
        loss_of(replace(FEW, anchors=3, budget=128 + 12), lambda *args: drafter_loss(*args))


def test_the_first_failing_thread_stops_all_with_one_named_error() -> None:
    steps = [0, 0, 0]
    failed = threading.Event()

    def trains(number: int) -> Any:
        def body(stop: workers.Stop) -> None:
            while True:
                stop.check()
                steps[number] += 1
                if steps[number] > 10:
                    failed.wait(20)

        return body

    def fails(stop: workers.Stop) -> None:
        stop.check()
        failed.set()
        raise TypeError("'NoneType' object is not a mapping")

    with pytest.raises(workers.PairFailedError, match="pair 1 failed with TypeError: 'NoneType'") as error:
        workers.run_together([trains(0), fails, trains(2)], patience=20)
    assert isinstance(error.value.__cause__, TypeError)
    assert not [t for t in threading.enumerate() if t.name.startswith("pair-")]


def test_a_thread_that_hangs_after_anothers_failure_is_not_waited_for() -> None:
    release = threading.Event()

    def fails(stop: workers.Stop) -> None:
        raise ValueError("first")

    with pytest.raises(workers.PairFailedError, match=r"pair 0 failed with ValueError: first; 1 threads hang"):
        workers.run_together([fails, lambda stop: release.wait(30) and None], patience=0.2)
    release.set()


def test_a_failing_pair_ends_the_command_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stock_step = Pair.step

    def step(pair: Pair) -> torch.Tensor:
        if pair.number == 1:
            raise TypeError("'NoneType' object is not a mapping")
        return stock_step(pair)

    monkeypatch.setattr(Pair, "step", step)
    assert (
        train.main(
            ["--cpu", "--compile", "aot_eager", "--steps", "1000", "--apart", "0", "--anchors", "2", "--budget", "136"]
        )
        == 1
    )
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("dflash: fla_safe failed: PairFailedError: pair 1 failed with TypeError")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        *((flag, "is not a whole number of at least 1") for flag in ("--pairs=0", "--steps=-1", "--block=x")),
        ("--apart=-1", "is not a number of seconds"),
        ("--report=no/such/folder/report.json", "there is no folder no/such/folder"),
    ],
    ids=lambda value: value.partition("=")[0],
)
def test_options_that_cannot_work_are_refused_before_anything_starts(
    wrong: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train.main(["--cpu", wrong])
    assert text in capsys.readouterr().err
    assert train.main(["--cpu", "--budget", "8"]) == 1
    assert "BudgetError" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", ["--draft_heads=3", "--draft_head_dim=15", "--shortest=65", "--lr=nan"], ids=lambda flag: flag[2:]
)
def test_sizes_that_make_no_model_end_the_command_with_one_line(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--cpu", wrong]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "SizesError" in line


def test_stock_is_refused_without_a_gpu() -> None:
    with pytest.raises(StockNeedsGpuError, match="fake"):
        choose_kernel("stock", CPU, SMALL.target.gdn, torch.float32)


# ---- both FLAs on a fake GPU


def fake_targets(kernel: Any, count: int) -> list[Target]:
    """Hybrids that run on host tensors, their kernels left with two configs to choose from."""
    from triton.runtime.autotuner import Autotuner

    for tuner in [found for found in gc.get_objects() if isinstance(found, Autotuner)]:
        tuner.configs = tuner.configs[:2]
    torch.set_num_threads(1)
    sizes = replace(dflash_sizes.PRESETS["cuda"], hidden=32, layers=2, vocabulary=64, key_heads=1, value_heads=2)
    return [Target(sizes.target, kernel, CPU, torch.bfloat16, seed=i) for i in range(count)]


def packs_through(target: Target, device: int, steps: int, gpu: Any) -> Any:
    from fla_safe.gdn.segments import PackedSegments

    def body(stop: workers.Stop) -> None:
        gpu.set_device(device)
        for pack in Packer(SMALL.documents(seed=device), Budget(300, 8, 4), seed=device):
            stop.check()
            target(pack.tokens, PackedSegments.prepare(pack.offsets, len(pack.tokens)))
            body.steps += 1  # type: ignore[attr-defined]
            if body.steps == steps:  # type: ignore[attr-defined]
                return

    body.steps = 0  # type: ignore[attr-defined]
    return body


@isolated
def test_frozen_targets_of_two_pairs_and_two_devices_stay_at_zero(gpu: Any) -> None:
    from fake_triton.fla import prepare
    from fla_safe.gdn.chunk import fla as fla_chunk
    from fla_safe.gdn.segments import PackedSegments
    from fla_safe.gdn.steady.rehearsal import AWKWARD_ROWS, GUARDED
    from fla_safe.runtime import RuntimeSettings, activate

    runtime = activate(RuntimeSettings(guarded=GUARDED, audit="process"))
    prepare()
    fla_chunk.unsupported_reason = lambda *_: None
    targets = fake_targets(resolve("fla", CPU, fused=True), 2)
    with runtime.warmup():
        for rows in (268, *AWKWARD_ROWS):
            offsets = torch.tensor(sorted({0, 1, rows // 3, rows}), dtype=torch.int32)
            targets[0](torch.zeros(rows, dtype=torch.int64), PackedSegments.prepare(offsets, rows))
    runtime.freeze("strict", devices=range(2))
    runtime.audit.reset()
    gpu.launches.clear()
    workers.run_together([packs_through(target, i, 25, gpu) for i, target in enumerate(targets)])
    counters = runtime.counters()
    assert counters == dict.fromkeys(counters, 0), runtime.report()["file_examples"]
    assert {launch.device for launch in gpu.launches} == {0, 1}
    assert len(gpu.launches) > 2 * 25 * 2 * 6


@isolated
def test_stock_fla_fails_in_the_same_two_threads(gpu: Any) -> None:
    """The second thread is still measuring when the first one is done and clears the arguments that they share."""
    from triton.runtime import driver

    from fake_triton.fla import prepare

    prepare()

    def bench(call: Any, **_: Any) -> list[float]:
        call()
        time.sleep(0.03 if gpu.current_device() else 0.003)
        return [1.0] * 3

    driver.active.get_benchmarker = lambda: bench
    targets = fake_targets(stock_kernel(), 2)
    with pytest.raises(workers.PairFailedError, match="'NoneType' object is not a mapping"):
        workers.run_together([packs_through(target, i, 25, gpu) for i, target in enumerate(targets)])
