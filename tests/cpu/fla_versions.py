"""Where the tests find several versions of fla-core: a cache directory, filled by pip when it can be."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["VERSIONS", "fla_directory"]

VERSIONS = ("0.4.2", "0.5.1", "0.5.2", "0.6.0")


def fla_directory(version: str) -> Path | None:
    """A directory for PYTHONPATH that holds this version of `fla`, or None if it is not there and cannot be fetched.

    `FLA_SAFE_TEST_FLA_DIR` names the cache, one directory a version; default `~/.cache/fla-safe/test-fla`.
    """
    cache = Path(os.environ.get("FLA_SAFE_TEST_FLA_DIR") or Path.home() / ".cache" / "fla-safe" / "test-fla")
    directory = cache / version
    if (directory / "fla").is_dir():
        return directory
    try:
        cache.mkdir(parents=True, exist_ok=True)
        fetched = Path(tempfile.mkdtemp(dir=cache))
    except OSError:
        return None
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(fetched),
        f"fla-core=={version}",
    ]
    done = subprocess.run(command, capture_output=True, timeout=300, check=False)
    if done.returncode == 0 and not directory.exists():
        # Another test process may have been faster; its directory is as good.
        shutil.move(fetched, directory)
    shutil.rmtree(fetched, ignore_errors=True)
    return directory if (directory / "fla").is_dir() else None
