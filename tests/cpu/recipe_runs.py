"""Runs a recipe with stand-ins for `megatron` and `nvidia-smi`: what command it builds, or which line refuses it."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["REPOSITORY", "Bench", "program"]

REPOSITORY = Path(__file__).resolve().parents[2]

# Environment variables that recipes are meant to set for the processes of a run.
FAKE_MEGATRON = """
{
    for name in NNODES NPROC_PER_NODE NODE_RANK MASTER_ADDR MASTER_PORT MODELSCOPE_CACHE PYTORCH_CUDA_ALLOC_CONF; do
        printf '%s=%s\\n' "$name" "${!name-}"
    done
    printf 'argument:%s\\n' "$@"
} >"$RECORD"
"""


def program(path: Path, text: str) -> None:
    """Write an executable script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@dataclass(frozen=True, slots=True)
class Bench:
    """A folder with data, a PATH of stand-ins, and eight GPUs that a fake driver reports."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> "Bench":
        """Lay out the folder."""
        program(folder / "bin" / "megatron", FAKE_MEGATRON)
        program(folder / "bin" / "nvidia-smi", 'for i in 0 1 2 3 4 5 6 7; do echo "GPU $i: fake"; done')
        (folder / "train.jsonl").write_text(json.dumps({"messages": []}) + "\n")
        return cls(folder)

    def model(self) -> str:
        """A checkpoint folder."""
        folder = self.folder / "a model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
        return str(folder)

    def environment(self, **changes: str | None) -> dict[str, str]:
        """Variables of a good run on the first of several nodes, with changes; None removes one."""
        variables: dict[str, str | None] = {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "HOME": "/nonexistent",
            "RECORD": str(self.folder / "record"),
            "DATA": str(self.folder / "train.jsonl"),
            "OUTPUT": str(self.folder / "out"),
            "MASTER_ADDR": "first-node",
            **changes,
        }
        return {name: value for name, value in variables.items() if value is not None}

    def bash(self, *arguments: str, **changes: str | None) -> subprocess.CompletedProcess[str]:
        """Run a shell script from the repository's root."""
        (self.folder / "record").unlink(missing_ok=True)
        return subprocess.run(
            ["bash", *arguments],
            cwd=REPOSITORY,
            env=self.environment(**changes),
            capture_output=True,
            text=True,
            timeout=60,
        )

    def record(self) -> tuple[dict[str, str], list[str]]:
        """Variables and arguments that `megatron` got; raises FileNotFoundError where it was not started."""
        lines = (self.folder / "record").read_text().splitlines()
        arguments = [line.removeprefix("argument:") for line in lines if line.startswith("argument:")]
        variables = dict(line.split("=", 1) for line in lines if not line.startswith("argument:"))
        return variables, arguments

    def command(self, recipe: Path, *flags: str, **changes: str | None) -> list[str]:
        """Arguments of `megatron` in a run of that recipe that must succeed."""
        done = self.bash(str(recipe), *flags, **changes)
        assert done.returncode == 0, done.stderr
        return self.record()[1]
