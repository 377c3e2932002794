"""Runs {FLA versions} x {states of TileLang} x {stock, fla_safe} under `fla-safe trace` and writes one report."""

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path.insert(0, str(HERE))
sys.path.insert(1, str(REPOSITORY / "tests" / "cpu"))

import matrix_report  # noqa: E402
import tilelang_states  # noqa: E402
from fla_versions import fla_directory  # noqa: E402

from fla_safe.trace import strace  # noqa: E402

__all__ = ["Cell", "main"]

VERSIONS = ("0.4.2", "0.5.1", "0.6.0")
STACKS = ("stock", "fla_safe")
# What would decide about the answer instead of the cell.
_CLEARED = ("FLA_", "TRITON_", "TORCHINDUCTOR_", "FLA_SAFE_TRACE")
_KEPT = ("FLA_SAFE_TEST_FLA_DIR",)


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination."""

    fla: str
    tilelang: tilelang_states.State
    stack: str

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.fla}-{self.tilelang}-{self.stack}"


def main(arguments: list[str] | None = None) -> int:
    """Run the matrix; status 1 if a cell of fla_safe failed or touched files other than data."""
    options = _options(arguments)
    if mixed := _full_package():
        sys.stderr.write(
            f"reproduce_io: flash-linear-attention {mixed} is installed, and its layers would be mixed into every "
            "fla-core of the matrix; run this in an environment that has fla-core alone, or PYTHON=<its python>\n"
        )
        return 2
    out: Path = options.out.resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
        wrong = "is not empty" if any(out.iterdir()) else None
    except OSError as error:
        wrong = f"cannot be made or read ({error.strerror})"
    if wrong:
        sys.stderr.write(f"reproduce_io: {out} {wrong}; name another with --out\n")
        return 2
    data = options.data.resolve() if options.data else _make_data(out)
    directories = {}
    for version in options.fla:
        directory = fla_directory(version)
        if directory is None:
            sys.stderr.write(
                f"reproduce_io: fla-core {version} could not be fetched; pip install --no-deps --target "
                f"DIR/{version} fla-core=={version}, and set FLA_SAFE_TEST_FLA_DIR=DIR\n"
            )
            return 2
        directories[version] = directory.resolve()
    stand_ins = {state: tilelang_states.write(state, out / "tilelang" / state) for state in options.tilelang}
    if options.half_installed is not None:
        stand_ins["half"] = options.half_installed.resolve()
    cells = [Cell(f, t, s) for f in options.fla for t in options.tilelang for s in options.stack]
    results = []
    for number, cell in enumerate(cells, 1):
        began = time.monotonic()
        result = _run(cell, options, out, data, directories[cell.fla], stand_ins[cell.tilelang])
        results.append(result)
        print(f"{number}/{len(cells)} {cell.name}: {result['status']} ({time.monotonic() - began:.0f} s)", flush=True)
    report = matrix_report.write(out, results, _facts(options, arguments))
    for sentence in report["verdict"]:
        print("*", sentence)
    print(out / "report.md")
    return 0 if report["ours_is_clean"] else 1


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce_io"), help="a new or empty folder")
    parser.add_argument(
        "--steps", type=_count(4), help="training steps of a cell (default: 350 with a GPU, 60 without)"
    )
    parser.add_argument(
        "--exact-steps", type=_count(0), default=12, help="steps of a second run under strace (0: none)"
    )
    parser.add_argument("--fla", nargs="+", default=list(VERSIONS), metavar="VERSION")
    parser.add_argument("--tilelang", nargs="+", choices=tilelang_states.STATES, default=list(tilelang_states.STATES))
    parser.add_argument("--stack", nargs="+", choices=STACKS, default=list(STACKS))
    parser.add_argument("--ranks", type=_count(1), default=1, help="processes of a cell")
    parser.add_argument("--tokens", type=_count(2), help="longest packed row (default: 14000 with a GPU, 2048 without)")
    parser.add_argument("--layers", type=_count(1), default=2)
    parser.add_argument("--micro-batches", type=_count(1), default=2)
    parser.add_argument(
        "--heads", type=_count(1), nargs=2, help="key and value heads (default: 8 16 with a GPU, 2 4 without)"
    )
    parser.add_argument("--data", type=Path, help="JSONL of scripts/make_multimodal_data.py (default: made)")
    parser.add_argument("--no-bytecode", action="store_true", help="TileLang without .pyc, as in a read-only image")
    parser.add_argument("--half-installed", type=Path, metavar="DIR", help="a real TileLang that does not import")
    parser.add_argument(
        "--share-cache",
        action="store_true",
        help="one Triton cache for all cells of a version: faster, fewer compilations",
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="variables of all cells, to see what they change"
    )
    options = parser.parse_args(arguments)
    if wrong := [text for text in options.set if "=" not in text]:
        parser.error(f"--set {wrong[0]}: expected NAME=VALUE")
    if options.data is not None and not options.data.is_file():
        parser.error(f"--data {options.data}: no such file")
    if options.half_installed is not None and not (options.half_installed / "tilelang").is_dir():
        parser.error(f"--half-installed {options.half_installed}: no folder tilelang in it")
    if options.heads is not None and options.heads[1] % options.heads[0]:
        parser.error(f"--heads {options.heads[0]} {options.heads[1]}: expected a multiple of the key heads")
    options.gpu = _gpu()
    options.steps = options.steps or (350 if options.gpu else 60)
    options.tokens = options.tokens or (14000 if options.gpu else 2048)
    options.heads = options.heads or ([8, 16] if options.gpu else [2, 4])
    return options


def _full_package() -> str | None:
    """Version of the package that puts its layers into fla-core's own package `fla`, if it is installed."""
    try:
        return importlib.metadata.version("flash-linear-attention")
    except importlib.metadata.PackageNotFoundError:
        return None


def _count(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return number


def _gpu() -> str | None:
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip() or None


def _make_data(out: Path) -> Path:
    script = REPOSITORY / "scripts" / "make_multimodal_data.py"
    subprocess.run(
        [sys.executable, str(script), str(out / "data"), "--samples", "200"], check=True, stdout=subprocess.DEVNULL
    )
    return out / "data" / "train.jsonl"


def _run(cell: Cell, options: argparse.Namespace, out: Path, data: Path, fla: Path, tilelang: Path | None) -> Any:
    folder = out / cell.name
    path = [tilelang, fla, REPOSITORY / "tests"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_CLEARED) or k in _KEPT}
    environment |= {
        "PYTHONPATH": os.pathsep.join(str(p) for p in path if p is not None),
        "OMP_NUM_THREADS": "1",
        "TRITON_CACHE_DIR": str(out / "triton" / (cell.fla if options.share_cache else cell.name)),
        "FLA_FLASH_QLA": "0",
    }
    if options.no_bytecode:
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    else:
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if cell.tilelang == "working":
        environment["FLA_TILELANG"] = "0"  # the stand-in has no kernels; availability is asked all the same
    if shutil.which("fla-safe") is None:
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment |= dict(text.split("=", 1) for text in options.set)
    status, error = _traced(cell, options, folder, data, environment, options.steps)
    exact = None
    if status == "trained" and options.exact_steps and strace.command(out) is not None:
        again = folder.with_name(folder.name + "-strace")
        if _traced(cell, options, again, data, environment, options.exact_steps, "--strace")[0] == "trained":
            exact = again
    return matrix_report.read_cell(cell, folder, exact, status, error)


def _traced(
    cell: Cell,
    options: argparse.Namespace,
    folder: Path,
    data: Path,
    environment: dict[str, str],
    steps: int,
    *flags: str,
) -> tuple[str, str]:
    launcher = [sys.executable]
    if options.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    command = [*launcher, str(HERE / "cell.py"), "--data", str(data), "--steps", str(steps)]
    for name in ("tokens", "layers", "micro_batches"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    command += ["--heads", *map(str, options.heads)]
    if cell.stack == "fla_safe":
        command.append("--ours")
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(folder.name + ".log")
    with log.open("w") as output:
        done = subprocess.run(
            ["fla-safe", "trace", "--out", str(folder), *flags, "--", *command],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    lines = [line for line in log.read_text(errors="replace").splitlines() if line and not line.startswith("fla-safe:")]
    return ("trained", "") if done.returncode == 0 else ("failed", lines[-1] if lines else f"status {done.returncode}")


def _facts(options: argparse.Namespace, arguments: list[str] | None) -> dict[str, Any]:
    given = " ".join(sys.argv[1:] if arguments is None else arguments)
    versions = {}
    for package in ("torch", "triton", "fla-safe", "pillow"):
        code = f"import importlib.metadata as m; print(m.version('{package}'))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        versions[package] = done.stdout.strip()
    return {
        "command": f"bash recipes/reproduce_io/reproduce.sh {given}".strip(),
        "date": time.strftime("%Y-%m-%d"),
        "device": options.gpu or "no GPU: stand-in device, real host path",
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": sys.version.split()[0],
        "versions": versions,
        "steps": options.steps,
        "ranks": options.ranks,
        "workload": f"{options.layers} layers, {options.micro_batches} micro-batches, rows of {options.tokens} tokens, "
        f"{options.heads[0]} key and {options.heads[1]} value heads",
        "set": options.set,
        "share_cache": options.share_cache,
        "bytecode": not options.no_bytecode,
        "half_installed": json.loads(json.dumps(options.half_installed, default=str)) or "stand-in",
    }


if __name__ == "__main__":
    raise SystemExit(main())
