"""FLA 0.5.0 and 0.5.1 execute `import tilelang` on every call of a dispatched operation.

`dispatch` asks `is_available()` of every backend, on each call, and the TileLang backend answers by importing. Python
does not remember a failed import, so where TileLang is absent or does not import, each call searches all of `sys.path`
(and re-reads the package's files, if there are any). `FLA_TILELANG=0` does not help: it is asked afterwards.
Reported as https://github.com/fla-org/flash-linear-attention/issues/1072, mended by pull requests 993 and 996.
No GPU is needed: the call is expected to fail at its kernel; what counts is what happens before.

    python fla_backend_probe.py      exit status 0: shown, 1: gone, 2: cannot tell
"""

import sys


class Finder:
    """First on sys.meta_path: counts how often Python has to look for `tilelang`."""

    asked = 0

    def find_spec(self, name, path=None, target=None):
        Finder.asked += name == "tilelang"
        return None


if __name__ == "__main__":
    sys.meta_path.insert(0, Finder())
    import fla
    import torch
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h

    print(f"fla {fla.__version__}")
    k, g = torch.zeros(1, 64, 1, 64), torch.zeros(1, 64, 1)
    asked = []
    for _ in range(4):
        Finder.asked = 0
        try:
            chunk_gated_delta_rule_fwd_h(k=k, w=k, u=k, g=g)
        except Exception as error:  # no GPU
            ended = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            ended = "it ran"
        asked.append(Finder.asked)
    print(f"searches for `tilelang` in calls 1 to 4 of chunk_gated_delta_rule_fwd_h: {asked} (each call: {ended})")
    if "tilelang" in sys.modules:
        print("=> cannot tell: TileLang imports here, and only a failing import is repeated")
        sys.exit(2)
    print("=> present" if asked[-1] else "=> gone")
    sys.exit(0 if asked[-1] else 1)
