"""A TileLang that is installed but does not import takes FLA down, also with FLA_TILELANG=0.

TileLang raises OSError or AttributeError where a library or a dependency's version is not the expected one. FLA
catches ImportError only, or looks for the package's files only and then imports it: at `import fla.ops` in 0.5.0, 0.5.1
and 0.6.0; in 0.5.2 in the first backward pass on Hopper, which this script does not reach.
No GPU is needed: the call is expected to fail at its kernel, if it gets there.

    python fla_half_installed_tilelang.py      exit status 0: shown, 1: gone, 2: cannot tell
"""

import os
import sys
import tempfile
from pathlib import Path

MESSAGE = "libnvrtc.so: cannot open shared object file (planted by this script)"

if __name__ == "__main__":
    os.environ["FLA_TILELANG"] = "0"
    package = Path(tempfile.mkdtemp(prefix="half_installed_")) / "tilelang"
    package.mkdir()
    (package / "__init__.py").write_text(f"raise OSError({MESSAGE!r})\n")
    sys.path.insert(0, str(package.parent))
    where = "import fla.ops"
    try:
        import fla
        import fla.ops
        import torch
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h

        where = "a call of chunk_gated_delta_rule_fwd_h"
        k, g = torch.zeros(1, 64, 1, 64), torch.zeros(1, 64, 1)
        chunk_gated_delta_rule_fwd_h(k=k, w=k, u=k, g=g)
    except Exception as error:
        ended = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    else:
        ended = "no error"
    print(f"fla {fla.__version__}: {where} ended with {ended}")
    print("=> present" if MESSAGE in ended else "=> gone")
    sys.exit(0 if MESSAGE in ended else 1)
