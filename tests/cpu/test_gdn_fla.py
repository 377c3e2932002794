"""Every supported FLA under Triton's interpreter, each in a process of its own: see `fla_under_interpreter.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fla_versions import VERSIONS, fla_directory

INNER = Path(__file__).with_name("fla_under_interpreter.py")


@pytest.mark.parametrize("version", VERSIONS)
def test_fla_kernels_agree_with_the_oracle(version: str) -> None:
    directory = fla_directory(version)
    if directory is None:
        pytest.skip(f"fla-core {version} is not in FLA_SAFE_TEST_FLA_DIR and pip could not fetch it")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TRITON_INTERPRET": "1",
        "FLA_SAFE_TEST_FLA_VERSION": version,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", str(INNER)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
