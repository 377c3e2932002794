"""What the start of a job costs its shared storage as ranks grow: opens, metadata operations and bytes, by mode.

    python scripts/measure_startup.py --ranks 8 16 32 64 --json startup.json --plot docs/scale.png

Starts real processes on this machine, eight for each node, and lets them start together. Each runs one packed GDN
layer over FLA's kernels, forward and backward, with Triton's real autotuner, compiler cache and launcher on a stand-in
GPU; its compiled files have the mean sizes of real ones. One directory stands for the shared storage of a cluster (the
home, with Triton's default cache, and the bundle), and one for each node's own. Modes:

    stock           Triton's cache in the shared home, empty
    stock-again     the same, second start of the job
    isolated        fla_safe.runtime: a directory for each rank on its node, empty; rank 0 saves a bundle at the end
    bundle          the same, from that bundle on the shared storage

Imports are done once, before all ranks are forked, and are counted apart. Counts come from strace where it is installed
(otherwise, or with `--method audit`, from a Python audit hook: opens, directories and bytes read, no `stat`). Only
operations are counted, no time is measured.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["MODES", "Result", "measure", "parse"]

MODES = ("stock", "stock-again", "isolated", "bundle")
PER_NODE = 8
COUNTS = ("opens", "stats", "changes", "listings", "read_bytes", "written_bytes")

_END_OF_IMPORTS = "/measure_startup/end/of/imports"
# Set by the tests: run the forward convolution alone, one kernel of eighteen.
_ONE_KERNEL = "MEASURE_STARTUP_ONE_KERNEL"
_TRACED = "%file,read,pread64,write,pwrite64,getdents64,clone,?clone3,?fork,?vfork"
_BIRTH = re.compile(r"(?:clone3?|v?fork)\(.*\)\s+= (\d+)")
_CALL = re.compile(r"(\w+)\((.*)\)\s+= (-?\d+)")
_OPENS = {"open", "openat", "openat2", "creat"}
_CHANGES = {"mkdir", "mkdirat", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "link", "linkat"}
_CHANGES |= {"symlink", "symlinkat", "chmod", "fchmodat", "truncate"}
_READS = {"read", "pread64"}
_WRITES = {"write", "pwrite64"}


@dataclass(slots=True)
class Result:
    """Counts of one mode with one number of ranks.

    Attributes:
        shared: on the shared storage, all ranks together, by `COUNTS`.
        local: on the nodes' own storage.
        audit: what the audit hooks counted on the shared storage: `opens`, `changes`, `listings`, `read_bytes`.
        imports: of the process before it forks: what each rank asks of the Python environment, wherever that is.
    """

    mode: str
    ranks: int
    nodes: int
    method: str
    shared: dict[str, int] = field(default_factory=dict)
    local: dict[str, int] = field(default_factory=dict)
    audit: dict[str, int] = field(default_factory=dict)
    imports: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {name: getattr(self, name) for name in self.__slots__}


# -- counting -------------------------------------------------------------------------------------------------------


def parse(lines: Iterable[str], places: dict[str, str]) -> dict[str, Counter[str]]:
    """Counts by place from the lines of `strace -y`, one process a file.

    Args:
        places: name of each place by its path; a call belongs to the longest path that it names.
    """
    found: dict[str, Counter[str]] = {name: Counter() for name in places.values()}
    known = sorted(places, key=len, reverse=True)
    for line in lines:
        path = next((p for p in known if p in line), None)
        call = _CALL.match(line) if path is not None else None
        if path is None or call is None:
            continue
        name, arguments, result = call[1], call[2], int(call[3])
        counts = found[places[path]]
        if name in _OPENS:
            counts["opens"] += 1
        elif name in _CHANGES:
            counts["changes"] += 1
        elif name == "getdents64":
            counts["listings"] += 1
        elif name in _READS:
            counts["read_bytes"] += max(0, result)
        elif name in _WRITES:
            counts["written_bytes"] += max(0, result)
        elif "AT_EMPTY_PATH" not in arguments:  # what asks an open file asks no directory
            counts["stats"] += 1
    return found


def watch(place: str) -> Counter[str]:
    """Count by an audit hook what this process does under `place`, from now on."""
    counts: Counter[str] = Counter()
    kinds = dict.fromkeys(("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.chmod"), "changes")
    kinds |= {"os.listdir": "listings", "os.scandir": "listings"}

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        kind = "opens" if event == "open" else kinds.get(event)
        if kind is None or not isinstance(arguments[0], str | os.PathLike):
            return
        path = os.fspath(arguments[0])
        if not isinstance(path, str) or not path.startswith(place):
            return
        counts[kind] += 1
        if kind == "opens" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY):
            with contextlib.suppress(OSError):
                counts["read_bytes"] += os.stat(path).st_size

    sys.addaudithook(hook)
    return counts


# -- a rank ---------------------------------------------------------------------------------------------------------


def ranks_main(modes: Sequence[str], ranks: int, work: Path) -> None:
    """Import what a rank imports; for each mode fork all ranks, let them start together, print what they report."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    import fake_triton

    fake_triton.install("record")
    _incompressible_binaries()
    import torch
    from triton.runtime.cache import triton_key

    from fake_triton.fla import Layer, prepare

    torch.set_num_threads(1)
    prepare()
    Layer()
    triton_key()  # reads Triton's own libraries, once in each process
    if not all(mode.startswith("stock") for mode in modes):
        import fla_safe.runtime.lifecycle  # noqa: F401
    os.access(_END_OF_IMPORTS, os.F_OK)
    for mode in modes:
        for local in _nodes(ranks, work):
            shutil.rmtree(local, ignore_errors=True)
            (local / "tmp").mkdir(parents=True)
            local.chmod(0o700)
        for report in _start(mode, ranks, work):
            print(report, flush=True)


def _nodes(ranks: int, work: Path) -> list[Path]:
    return [work / f"node{node}" for node in range(-(-ranks // PER_NODE))]


def _start(mode: str, ranks: int, work: Path) -> list[str]:
    """A line of JSON from each rank that did not fail."""
    (there, ready), (wait, go), (back, done) = os.pipe(), os.pipe(), os.pipe()
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            for end in (there, go, back):
                os.close(end)
            try:
                report = rank_main(mode, rank, work, ready, wait)
                os.write(done, (json.dumps(report) + "\n").encode())
            except BaseException:
                sys.excepthook(*sys.exc_info())
            os._exit(0)
        pids.append(pid)
    for end in (ready, wait, done):
        os.close(end)
    with os.fdopen(there, "rb") as arrived, os.fdopen(back) as reports:
        os.write(go, b"." * len(arrived.read()))  # every rank closes its end when it is ready, or dies
        lines = reports.read().splitlines()
    os.close(go)
    for pid in pids:
        os.waitpid(pid, 0)
    return lines


def _incompressible_binaries() -> None:
    """The stand-in's binaries are one letter repeated, which a bundle would store in no space."""
    from triton.backends.nvidia.compiler import CUDABackend

    add_stages = CUDABackend.add_stages

    def add(self: Any, stages: dict[str, Any], *rest: Any) -> None:
        add_stages(self, stages, *rest)
        cubin = stages["cubin"]

        def random_cubin(source: Any, metadata: dict[str, Any]) -> bytes:
            size = len(cubin(source, metadata))
            return random.Random(metadata["name"]).randbytes(size)

        stages["cubin"] = random_cubin

    CUDABackend.add_stages = add


def rank_main(mode: str, rank: int, work: Path, ready: int, wait: int) -> dict[str, Any]:
    """One rank: wait for the start, do what a first training step does to the kernels, report."""
    node, local_rank = divmod(rank, PER_NODE)
    os.environ |= {"LOCAL_RANK": str(local_rank), "RANK": str(rank), "TORCHELASTIC_RUN_ID": "measure_startup"}
    local, shared = work / f"node{node}", work / "shared"
    tempfile.tempdir = str(local / "tmp")
    counts = watch(str(shared))
    os.write(ready, b".")
    os.close(ready)
    os.read(wait, 1)
    if mode.startswith("stock"):
        _steps()
    else:
        _safe_steps(mode, local, shared / "gdn_bundle.fsb", rank)
    return {"mode": mode, "pid": os.getpid(), "counts": counts}


def _safe_steps(mode: str, local: Path, bundle: Path, rank: int) -> None:
    from fla_safe.runtime import RuntimeSettings, activate
    from fla_safe.runtime.artifacts.kept import keys_in_use, save_bundle

    used = bundle if mode == "bundle" else None
    runtime = activate(RuntimeSettings(guard="strict", isolate=True, cache_root=local, bundle=used))
    with runtime.warmup():
        _steps()
    runtime.freeze()
    _steps()
    assert runtime.store is not None
    assert used is None or not (runtime.tuning.rounds or runtime.store.refused), "the bundle was not enough"
    if rank == 0 and used is None:
        runtime.store.store.prune(keys_in_use(runtime.launching))
        save_bundle(bundle, runtime.table, runtime.store.store)
    runtime.deactivate()


def _steps() -> None:
    import torch

    from fake_triton.fla import Layer, packed_offsets

    layer = Layer()
    for total in (1000, 1003, 1):
        if os.environ.get(_ONE_KERNEL):
            layer.conv(torch.empty(1, total, layer.channels, **layer.make), layer.weight, activation="silu")
        else:
            layer.step(total, packed_offsets(total, 5))


# -- the job --------------------------------------------------------------------------------------------------------


def measure(modes: Sequence[str], ranks: int, work: Path, method: str) -> list[Result]:
    """Run modes one after the other on one shared storage, with so many ranks each.

    Args:
        work: an empty directory.
        method: `strace` or `audit`.

    Raises:
        RuntimeError: a rank failed.
    """
    shared, trace = work / "shared", work / "trace"
    (shared / "home").mkdir(parents=True)
    trace.mkdir()
    command = [sys.executable, __file__, "--as-ranks", str(ranks), str(work), *modes]
    if method == "strace":
        command = [*_strace(trace / "pid"), *command]
    done = subprocess.run(command, env=_environment(shared), cwd=work, capture_output=True, text=True, check=False)
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    results = []
    for mode in modes:
        mine = [report for report in reports if report["mode"] == mode]
        if len(mine) != ranks:
            raise RuntimeError(f"{mode} with {ranks} ranks: {len(mine)} of them finished\n{done.stderr[-4000:]}")
        audit = dict(sum((Counter(report["counts"]) for report in mine), Counter()))
        result = Result(mode, ranks, len(_nodes(ranks, work)), method, audit=audit)
        if method == "strace":
            _read_traces(trace, [report["pid"] for report in mine], _places(ranks, work), result)
            result.imports = _imports(trace)
        results.append(result)
    return results


def _places(ranks: int, work: Path) -> dict[str, str]:
    return {str(work / "shared"): "shared"} | {str(node): "local" for node in _nodes(ranks, work)}


def _strace(log: Path) -> list[str]:
    return ["strace", "-f", "-ff", "-qq", "--seccomp-bpf", "-y", "-s", "0", "-e", f"trace={_TRACED}", "-o", str(log)]


def _environment(shared: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "FLA_", "SLURM_"))}
    return kept | {
        "HOME": str(shared / "home"),
        # Where Triton's cache is by default; named, because the stand-in GPU makes a temporary one otherwise.
        "TRITON_CACHE_DIR": str(shared / "home" / ".triton" / "cache"),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONWARNINGS": "ignore",
    }


def _read_traces(trace: Path, ranks: Sequence[int], places: dict[str, str], result: Result) -> None:
    """Count what the ranks did, and all threads and processes that they started: each has a trace of its own."""
    totals: dict[str, Counter[str]] = {"shared": Counter(), "local": Counter()}
    waiting = list(ranks)
    while waiting:
        lines = (trace / f"pid.{waiting.pop()}").read_text(errors="replace").splitlines()
        waiting += [int(birth[1]) for line in lines if (birth := _BIRTH.match(line))]
        for place, seen in parse(lines, places).items():
            totals[place] += seen
    result.shared = {name: totals["shared"][name] for name in COUNTS}
    result.local = {name: totals["local"][name] for name in COUNTS}


def _imports(trace: Path) -> dict[str, int]:
    first = min(trace.iterdir(), key=lambda log: int(log.suffix[1:]))
    with open(first, errors="replace") as lines:
        return dict(parse(itertools.takewhile(lambda line: _END_OF_IMPORTS not in line, lines), {"/": "all"})["all"])


# -- output ---------------------------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """Markdown: shared storage for each node."""
    lines = ["| mode | ranks | nodes | opens | stats | changes | MiB read | MiB written |", "|---|" + "---:|" * 7]
    for r in results:
        counts = r.shared or r.audit
        shown = [f"{counts[name] / r.nodes:.0f}" if name in counts else "-" for name in ("opens", "stats", "changes")]
        sizes = [f"{counts[n] / r.nodes / 2**20:.1f}" if n in counts else "-" for n in ("read_bytes", "written_bytes")]
        lines.append(f"| {r.mode} | {r.ranks} | {r.nodes} | {' | '.join([*shown, *sizes])} |")
    return "\n".join(lines)


def plot(results: Sequence[Result], path: Path) -> None:
    """Opens and metadata operations on the shared storage, all nodes together, against ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for mode in dict.fromkeys(r.mode for r in results):
        rows = [r for r in results if r.mode == mode and r.shared]
        operations = [sum(r.shared[n] for n in ("opens", "stats", "changes", "listings")) for r in rows]
        axes.plot([r.ranks for r in rows], operations, "o-", label=mode)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="operations on shared storage", title="one start")
    axes.set_xticks(sorted({r.ranks for r in results}), [str(n) for n in sorted({r.ranks for r in results})])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=80)


def main() -> int:
    """Measure every mode with every number of ranks, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES), help="in this order; later need former"
    )
    parser.add_argument("--method", choices=["auto", "strace", "audit"], default="auto")
    parser.add_argument("--work", type=Path, help="an empty directory for all files; default a temporary one")
    parser.add_argument("--json", type=Path, help="write all counts here")
    parser.add_argument("--plot", type=Path, help="write a PNG here")
    options = parser.parse_args()
    if min(options.ranks) < 1:
        parser.error(f"--ranks {min(options.ranks)}: expected at least 1")
    for later, former in (("stock-again", "stock"), ("bundle", "isolated")):
        if later in options.modes and former not in options.modes[: options.modes.index(later)]:
            parser.error(f"--modes {later}: it needs what {former} leaves, before it")
    for name, folder in (("work", options.work), ("json", options.json and options.json.parent)):
        if folder is not None and not folder.is_dir():
            parser.error(f"--{name}: there is no folder {folder}")
    method = options.method
    if method == "auto":
        method = "strace" if shutil.which("strace") else "audit"
    results = []
    for ranks in options.ranks:
        work = Path(tempfile.mkdtemp(prefix="measure_startup_", dir=options.work))
        try:
            results += measure(options.modes, ranks, work, method)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps([r.as_dict() for r in results], indent=1) + "\n")
    if options.plot:
        plot(results, options.plot)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-ranks"]:
        ranks_main(sys.argv[4:], int(sys.argv[2]), Path(sys.argv[3]))
    else:
        raise SystemExit(main())
