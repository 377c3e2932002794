"""The parts together: an isolated rank directory, an agreed table on two ranks, and named refusals."""

import copy
import json
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fake_triton.isolated import child, isolated


def _add(width: int) -> Any:
    import torch

    from fake_triton.kernels import add

    x = torch.zeros(512)
    return add[(1,)](x, x, x, 512, width)


@isolated
def test_isolated_kernels_live_in_this_ranks_directory_until_deactivation(gpu: Any, tmp_path: str) -> None:
    from fla_safe.runtime import RuntimeSettings, activate

    untouched = Path(os.environ["TRITON_CACHE_DIR"])
    runtime = activate(RuntimeSettings(guard="strict", isolate=True, cache_root=Path(tmp_path), audit="process"))
    with runtime.warmup():
        _add(32)
    runtime.freeze()
    _add(32)
    assert runtime.counters()["file_ops"] == 0
    store = runtime.report()["store"]
    assert Path(store["directory"]).is_relative_to(tmp_path)
    assert sum(f.stat().st_size for f in Path(store["directory"]).rglob("*") if f.is_file()) > 40_000
    assert not any(f.is_file() for f in untouched.rglob("*"))
    runtime.deactivate()
    assert not Path(store["directory"]).exists()
    _add(32)
    assert any(f.is_file() for f in untouched.rglob("*"))


@isolated
def test_a_second_runtime_of_a_process_starts_from_nothing(gpu: Any) -> None:
    import torch

    from fake_triton.kernels import plain
    from fla_safe.runtime import RuntimeSettings, activate

    x, shifted = torch.zeros(512), torch.zeros(513)[1:]

    def binary(tensor: Any, n: int) -> Any:
        return plain[(1,)](tensor, tensor, n, BLOCK=64)

    for late in (17, 1):
        runtime = activate(RuntimeSettings(guard="strict", agree=False))
        with runtime.warmup():
            binary(x, 512)
        runtime.freeze()
        assert not any(binary(shifted, late).src.attrs.values())
        assert runtime.counters()["served_general"] + runtime.counters()["unplanned_launches"] > 0
        runtime.deactivate()
    # A general binary in the place of another one would be slower than what Triton makes for the call.
    assert any(binary(x, 512).src.attrs.values())
    assert any(binary(x, 16).src.attrs.values())


@isolated
def test_a_table_for_other_hardware_is_refused_and_nothing_stays_behind(gpu: Any) -> None:
    from triton.runtime.autotuner import Autotuner

    from fla_safe.runtime import RuntimeSettings, activate, active
    from fla_safe.runtime.tuning.decisions import DecisionTable, Stamp, StampMismatchError

    before = dict(vars(Autotuner))
    with pytest.raises(StampMismatchError, match="sm_90"):
        activate(RuntimeSettings(table=DecisionTable(Stamp("sm_90", "3.0.0", "none"))))
    assert dict(vars(Autotuner)) == before
    assert active() is None


@isolated
def test_file_operations_count_inside_a_section_only(gpu: Any, tmp_path: str) -> None:
    from fla_safe.runtime import RuntimeSettings, activate

    runtime = activate(RuntimeSettings(audit="sections"))
    runtime.freeze()
    name = os.path.join(tmp_path, "file")
    with open(name, "w"):
        pass
    assert runtime.counters()["file_ops"] == 0
    with runtime.section:
        with runtime.section, open(name):
            pass
        other = threading.Thread(target=lambda: open(name).close())
        other.start()
        other.join()
        with pytest.raises(ImportError):
            import a_module_that_is_not_there  # noqa: F401
    assert runtime.counters()["file_ops"] >= 2
    assert [text for text in runtime.report()["file_examples"] if text.startswith("open") and name in text] == [
        f"open {name}"
    ]
    before = runtime.counters()["file_ops"]
    with open(name):
        pass
    runtime.deactivate()
    with runtime.section, open(name):
        pass
    assert runtime.counters()["file_ops"] == before


@isolated
def test_a_file_opened_while_another_one_is_counted_does_not_deadlock(gpu: Any) -> None:
    """A signal handler or a finalizer runs wherever its thread is."""
    import faulthandler
    import sys

    from fla_safe.runtime.audit import Audit

    class Nosy:
        def __str__(self) -> str:
            with open(os.devnull) as file:
                return file.name

    faulthandler.dump_traceback_later(20, exit=True)
    audit = Audit("process")
    audit.start()
    sys.audit("os.remove", Nosy())
    audit.stop()
    assert audit.file_ops == 2


@isolated
def test_syncs_count_inside_a_section_only(gpu: Any) -> None:
    """torch reports a sync as this warning; here it is given by hand, on a GPU by `set_sync_debug_mode`."""
    import warnings

    import torch

    from fla_safe.runtime.audit import Audit

    modes: list[int] = []
    torch._C._cuda_set_sync_debug_mode = modes.append
    shown: list[str] = []
    warnings.showwarning = lambda message, *_: shown.append(str(message))
    filters = list(warnings.filters)
    audit = Audit("off", watch_syncs=True)
    audit.start()
    text = "called a synchronizing CUDA operation (Triggered internally)"
    warnings.warn(text, UserWarning, stacklevel=1)
    with audit.section:
        for _ in range(3):
            warnings.warn(text, UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert audit.syncs == 3
    assert shown == [text, "something else"]
    assert modes == [1, 0]
    audit.stop()
    assert warnings.filters == filters


def rank(gpu: Any, number: int, port: int, out: str) -> None:
    import torch.distributed as dist

    from fla_safe.runtime import RuntimeSettings, activate

    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=number, world_size=2)
    # The ranks measure the opposite: the first config wins on rank 0, the last one on rank 1.
    times = iter(range(100) if number == 0 else range(100, 0, -1))
    gpu.bench_ms = lambda: float(next(times)) + 1
    runtime = activate(RuntimeSettings(guard="strict", audit="process"))
    with runtime.warmup():
        _add(32)
        if number == 1:
            _add(4096)  # a key that only this rank has
    runtime.freeze()
    binary = _add(32)
    constants = {binary.src.fn.arg_names[k[0]]: v for k, v in binary.src.constants.items()}
    counters = runtime.counters()
    report = runtime.report()
    Path(out, str(number)).write_text(
        json.dumps([report["table_hash"], constants["BLOCK"], counters, report["agreement"]])
    )
    dist.destroy_process_group()


def _two_ranks(function: Any, out: Path) -> list[Any]:
    """What `function(gpu, number, port, out)` wrote in each of two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    failures: list[BaseException] = []

    def one(number: int) -> None:
        try:
            child(function, {"number": number, "port": port, "out": str(out)})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]
    return [json.loads((out / str(i)).read_text()) for i in range(2)]


def test_ranks_that_measured_differently_run_the_same_config(tmp_path: Path) -> None:
    first, second = _two_ranks(rank, tmp_path)
    assert first[0] == second[0]
    assert first[1] == second[1] == 64
    assert first[2]["late_compiles"] == second[2]["late_compiles"] == second[2]["late_tunes"] == 0
    assert second[3]["overruled"] == 1


def rank_that_cannot_compile(gpu: Any, number: int, port: int, out: str) -> None:
    import torch.distributed as dist

    from fla_safe.runtime import RuntimeSettings, activate
    from fla_safe.runtime.launching import plans

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=number, world_size=2)
    runtime = activate(RuntimeSettings(guard="strict"))
    with runtime.warmup():
        _add(32)
    if number == 1:
        plans.build = full
    try:
        runtime.freeze()
    except Exception as error:
        Path(out, str(number)).write_text(json.dumps([type(error).__name__, str(error), runtime.phase]))
    else:
        Path(out, str(number)).write_text(json.dumps(["frozen", "", runtime.phase]))
    dist.barrier()
    dist.destroy_process_group()


def test_a_rank_that_fails_between_agreement_and_freeze_is_an_error_on_all(tmp_path: Path) -> None:
    first, second = _two_ranks(rank_that_cannot_compile, tmp_path)
    assert second[0] == "OSError"
    assert first[0] == "AgreementError"
    assert "rank 1" in first[1]
    assert "No space left" in first[1]
    assert "frozen" not in (first[2], second[2])


def test_a_module_that_holds_a_section_can_be_copied() -> None:
    """ms-swift and PEFT copy modules; a section has thread-local state, which cannot be."""
    from fla_safe.runtime.audit import Audit

    module = SimpleNamespace(section=Audit("off").section)
    assert copy.deepcopy(module).section is module.section
