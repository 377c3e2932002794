"""All ranks end with one table per architecture, or all living ranks end with one named error in bounded time."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

dist = pytest.importorskip("torch.distributed")

from fla_safe.runtime.agreement.rounds import Agreement, AgreementError, Limits  # noqa: E402
from fla_safe.runtime.tuning.decisions import Decision, DecisionTable, Stamp, StampMismatchError, TuningKey  # noqa: E402

H200, B200 = Stamp("sm_90", "3.8.0", "0.6.0"), Stamp("sm_100", "3.8.0", "0.6.0")
QUICK = Limits(beat=0.05, dead_after=1.0, stall_after=4.0, reply=5.0)


def table(stamp=H200, **warps):
    made = DecisionTable(stamp)
    for name, value in warps.items():
        made.put(TuningKey(name, ()), Decision(num_warps=value))
    return made


def contents(agreed):
    return {k.kernel: agreed.table.get(k).num_warps for k in agreed.table}


def run_threads(work, ranks, limits=QUICK):
    """Each rank a thread over one in-memory store; returns what each returned or raised."""
    store = dist.HashStore()
    results = [None] * ranks

    def body(rank):
        try:
            with Agreement(store, rank, ranks, limits=limits, name="t") as agreement:
                results[rank] = work(agreement, rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(ranks)]
    [t.start() for t in threads]
    deadline = time.monotonic() + 30
    [t.join(max(0.0, deadline - time.monotonic())) for t in threads]
    assert not any(t.is_alive() for t in threads), "a rank hangs"
    return results


def test_rank_0_decides_and_key_sets_are_united():
    tables = [table(a=1, b=2), table(b=4, c=4), None, table(d=8, a=16)]
    agreed = run_threads(lambda a, r: a.agree(tables[r], H200), 4)
    assert all(contents(x) == {"a": 1, "b": 2, "c": 4, "d": 8} for x in agreed)
    assert len({x.hash for x in agreed}) == 1
    assert agreed[0].overruled == 2
    assert agreed[3].ranks == {"sm_90": (0, 1, 2, 3)}
    assert {x.table.entry(k).source for x in agreed for k in x.table} == {"agreed"}


def test_one_table_for_each_architecture():
    tables = [None, table(B200, a=1), table(a=2), table(B200, a=4, b=4)]
    stamps = [H200, B200, H200, B200]
    agreed = run_threads(lambda a, r: a.agree(tables[r], stamps[r]), 4)
    assert [contents(x) for x in agreed] == [{"a": 2}, {"a": 1, "b": 4}, {"a": 2}, {"a": 1, "b": 4}]
    assert agreed[0].hash == agreed[2].hash != agreed[1].hash == agreed[3].hash
    assert agreed[0].ranks == {"sm_90": (0, 2), "sm_100": (1, 3)}


def test_no_rank_has_kernels():
    assert [contents(x) for x in run_threads(lambda a, r: a.agree(None, H200), 3)] == [{}, {}, {}]


def errors(results, match):
    """Every rank raised the same named error."""
    assert all(isinstance(r, AgreementError) for r in results), results
    assert len({str(r) for r in results}) == 1
    assert match in str(results[0])


def test_other_versions_on_one_rank_are_one_error_on_all():
    stamps = [H200, H200, Stamp("sm_90", "3.6.0", "0.6.0")]
    results = run_threads(lambda a, r: a.agree(None, stamps[r]), 3)
    errors(results, "rank 2 and rank 0 cannot share decisions")
    assert "triton 3.6.0" in str(results[0])


@pytest.mark.parametrize("bad", [0, 2], ids=["rank 0", "another rank"])
def test_an_exception_in_warm_up_reaches_every_rank(bad):
    def work(agreement, rank):
        if rank == bad:
            agreement.progress("tuning chunk_fwd_o")
            raise MemoryError("out of memory")
        return agreement.agree(table(a=1), H200)

    results = run_threads(work, 4)
    assert isinstance(results.pop(bad), MemoryError)
    errors(results, f"rank {bad} on")
    assert "tuning chunk_fwd_o: MemoryError: out of memory" in str(results[0])


def test_a_rank_still_tuning_stops_when_another_failed():
    def work(agreement, rank):
        if rank == 1:
            raise ValueError("bad")
        for i in range(1000):
            agreement.progress(f"tuning {i}")
            time.sleep(0.01)
        return "tuned to the end"

    assert isinstance(run_threads(work, 2)[0], AgreementError)


@pytest.mark.parametrize("hung", [0, 2], ids=["rank 0", "another rank"])
def test_a_rank_that_hangs_in_warm_up_is_named(hung):
    release = threading.Event()

    def work(agreement, rank):
        if rank == hung:
            agreement.progress("compiling wy_bwd")
            release.wait(20)
            agreement.progress("too late")
        try:
            return agreement.agree(table(a=1), H200)
        finally:
            release.set()

    started = time.monotonic()
    results = run_threads(work, 4)
    assert time.monotonic() - started < 15
    errors(results, f"rank {hung} (")
    assert "no progress for 4 s, last seen compiling wy_bwd" in str(results[0])


def test_slow_but_busy_is_not_hung():
    limits = Limits(beat=0.05, dead_after=1.0, stall_after=1.0, reply=5.0)

    def work(agreement, rank):
        for i in range(25 * (rank == 1)):
            agreement.progress(f"tuning {i}")
            time.sleep(0.1)
        return agreement.agree(table(a=1), H200)

    assert [contents(x) for x in run_threads(work, 3, limits)] == [{"a": 1}] * 3


def test_a_corrupted_table_is_one_error_on_all():
    def work(agreement, rank):
        if rank == 1:
            real = agreement._peers.post
            agreement._peers.post = lambda key, value: real(key, b"garbage" if key.startswith("table") else value)
        return agreement.agree(table(a=1), H200)

    errors(run_threads(work, 3), "rank 1 posted no decision table")


def test_a_rank_that_ends_with_another_hash_is_one_error_on_all():
    def work(agreement, rank):
        if rank == 1:
            real = agreement._peers.post
            agreement._peers.post = lambda key, value: real(key, b"0" * 64 if key.startswith("hash") else value)
        return agreement.agree(table(a=1), H200)

    errors(run_threads(work, 3), "rank 1 holds table 0000")


def test_one_process_needs_no_store():
    with Agreement.of_job() as agreement:
        agreement.progress("tuning")
        agreed = agreement.agree(table(a=1), H200)
    assert contents(agreed) == {"a": 1}
    with pytest.raises(StampMismatchError):
        Agreement(None, 0, 1).agree(table(a=1), B200)


def test_a_store_that_never_answers_is_a_named_error():
    class Stuck:
        def __getattr__(self, name):
            def hang(*args):
                time.sleep(60)

            return hang if name != "clone" else self.__class__

    limits = Limits(beat=0.05, dead_after=1, stall_after=1, reply=0.3)
    started = time.monotonic()
    with pytest.raises(AgreementError, match=r"store does not answer"):
        with Agreement(Stuck(), 1, 2, limits=limits) as agreement:
            agreement.agree(None, H200)
    assert time.monotonic() - started < 5


LAUNCHER = """
import datetime, json, os, pathlib, signal, sys, time
import torch.distributed as dist
from fla_safe.runtime.agreement.rounds import Agreement, AgreementError, Limits
from fla_safe.runtime.tuning.decisions import Decision, DecisionTable, Stamp, TuningKey

WORLD, port, case, out = 8, int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
stamp = Stamp("sm_90", "3.8.0", "0.6.0")
limits = Limits(beat=0.2, dead_after=6, stall_after=30, reply=20)

def run(rank):
    store = dist.TCPStore("127.0.0.1", port, WORLD + 1, is_master=False, timeout=datetime.timedelta(seconds=40))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    result = {}
    try:
        for _ in range(2 if case == "good" else 1):
            table = DecisionTable(stamp)
            # Two pipeline stages with different kernels, and a rank (7) without any; every rank tuned differently.
            for name in () if rank == 7 else ("a", "b") if rank < 4 else ("b", "c"):
                table.put(TuningKey(name, ()), Decision(num_warps=rank + 1))
            with Agreement.of_job(limits=limits) as agreement:
                agreement.progress("tuning b")
                if case == f"killed {rank}":
                    time.sleep(1)
                    os.kill(os.getpid(), signal.SIGKILL)
                if case == f"stopped {rank}":
                    time.sleep(1)
                    os.kill(os.getpid(), signal.SIGSTOP)
                agreed = agreement.agree(table, stamp)
            result["hash"] = agreed.hash
            result["table"] = {k.kernel: agreed.table.get(k).num_warps for k in agreed.table}
    except AgreementError as error:
        result["error"] = str(error)
    (out / f"{rank}.tmp").write_text(json.dumps(result))
    (out / f"{rank}.tmp").rename(out / f"{rank}.json")
    if case == "good":
        dist.barrier()

# Forked after the import: eight imports of torch at once take a minute on a small machine.
children = []
for rank in range(WORLD):
    child = os.fork()
    if child == 0:
        try:
            run(rank)
        finally:
            os._exit(0)
    children.append(child)
# Served by this process, as torchrun's agent serves it: it outlives every rank.
store = dist.TCPStore("127.0.0.1", port, WORLD + 1, is_master=True, wait_for_workers=False)
victims = [int(case.split()[1])] if case != "good" else []
deadline = time.monotonic() + 50
while time.monotonic() < deadline:
    if len(list(out.glob("*.json"))) == WORLD - len(victims):
        time.sleep(0.5)
        break
    time.sleep(0.05)
for child in children:
    os.kill(child, signal.SIGKILL)
"""


def run_gloo(case, out):
    """Eight gloo processes; what each living rank returned or raised."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", LAUNCHER, str(port), case, str(out)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=110)
    found = {int(p.stem): json.loads(p.read_text()) for p in out.glob("*.json")}
    assert found, done.stderr[-3000:]
    return found


def test_eight_gloo_processes_agree_twice(tmp_path):
    found = run_gloo("good", tmp_path)
    assert len(found) == 8
    assert len({f.get("hash") for f in found.values()}) == 1, found
    assert all(f["table"] == {"a": 1, "b": 1, "c": 5} for f in found.values())


@pytest.mark.parametrize("case", ["killed 5", "stopped 3", "killed 0"])
def test_eight_gloo_processes_with_one_lost_rank_all_raise_the_same(case, tmp_path):
    found = run_gloo(case, tmp_path)
    victim = int(case.split()[1])
    assert sorted(found) == [r for r in range(8) if r != victim]
    assert len({f.get("error") for f in found.values()}) == 1, found
    error = next(iter(found.values()))["error"]
    assert f"rank {victim} (" in error
    assert "no sign of life for 6 s, last seen tuning b" in error


def test_the_launched_ranks_import_this_checkout():
    """The launcher above must import from this checkout, not from some other installation."""
    import fla_safe

    assert Path(fla_safe.__file__).resolve().is_relative_to(Path(__file__).resolve().parents[2])
