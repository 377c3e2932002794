"""Runs scripts of `scripts/upstream`, each in a fork of one process that has imported what most of them need."""

import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SCRIPTS", "Run", "run"]

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "upstream"
CRASHED = 70


@dataclass(frozen=True, slots=True)
class Run:
    """What a script said and did: exit status, output, and which modules of ours it had imported."""

    status: int
    output: str
    ours: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """`present`, `gone` or `cannot tell`.

        Raises:
            AssertionError: the script crashed, or its last line does not say what its exit status says.
        """
        lines = [line for line in self.output.splitlines() if line.startswith("=> ")]
        said = lines[-1].removeprefix("=> ").partition(":")[0] if lines else "nothing"
        expected = {0: "present", 1: "gone", 2: "cannot tell"}.get(self.status)
        assert said == expected, f"exit status {self.status}, and it said {said}:\n{self.output}"
        return said


def run(
    commands: Sequence[str], preload: Sequence[str] = (), environ: Mapping[str, str] | None = None, path: str = ""
) -> dict[str, Run]:
    """Run `"script.py argument ..."` one after the other.

    Args:
        preload: modules that are imported before the forks.
        environ: further environment variables.
        path: goes first on PYTHONPATH.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "FLA_"))} | {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": path,
        **(environ or {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        # Scripts make temporary directories of their own, which go with this one.
        done = subprocess.run(
            [sys.executable, __file__, json.dumps({"commands": list(commands), "preload": list(preload)})],
            env=environment | {"TMPDIR": folder, "HOME": folder},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    return {command: Run(status, output, tuple(ours)) for command, (status, output, ours) in results.items()}


def _main() -> None:
    request = json.loads(sys.argv[1])
    with open(os.devnull, "w") as nowhere:
        errors, sys.stderr = sys.stderr, nowhere
        for module in request["preload"]:
            importlib.import_module(module)
        sys.stderr = errors
    results = {command: _fork(command) for command in request["commands"]}
    print(json.dumps(results))


def _fork(command: str) -> tuple[int, str, list[str]]:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as seen:
        pid = os.fork()
        if pid == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
            status = _script(command)
            sys.stdout.flush()
            ours = [name for name in sys.modules if name.partition(".")[0] in ("fla_safe", "fake_triton")]
            os.write(seen.fileno(), json.dumps(ours).encode())
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for file in (output, seen):
            file.seek(0)
        return status, output.read().decode(errors="replace"), json.loads(seen.read() or b"[]")


def _script(command: str) -> int:
    name, *arguments = command.split()
    sys.argv = [str(SCRIPTS / name), *arguments]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else CRASHED
    except BaseException:
        traceback.print_exc()
    return CRASHED


if __name__ == "__main__":
    _main()
