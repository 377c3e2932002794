"""Host (processor) microseconds per Triton launch on the GDN path: FLA as it is against frozen plans, in one run.

    python scripts/bench_launch.py --json

Takes every kernel that one packed GDN layer (forward and backward) launches, with the arguments of the layer's own
call, and times `kernel[grid](...)` as FLA writes it, first with the installed Triton and FLA untouched, then with
`fla_safe.runtime` frozen, in alternating rounds (the runtime is deactivated in between); the best round of each counts.
With no GPU the driver is a stand-in and Triton's own C launcher runs against a stub libcuda, so the time of
cuLaunchKernelEx is missing from both sides. With a GPU both sides launch for real, a small problem each.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

Call = tuple[Any, Any, tuple[Any, ...], dict[str, Any]]


def capture(step: Callable[[], None]) -> dict[str, Call]:
    """Last call of each kernel during `step`, by the kernel's name."""
    from triton.runtime.jit import JITFunction, KernelInterface

    calls: dict[str, Call] = {}
    stock = KernelInterface.__getitem__

    def __getitem__(kernel: Any, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> Any:
            jit = kernel
            while not isinstance(jit, JITFunction):
                jit = jit.fn
            calls[jit.fn.__name__] = (kernel, grid, args, kwargs)
            return stock(kernel, grid)(*args, **kwargs)

        return launch

    KernelInterface.__getitem__ = __getitem__
    try:
        step()
    finally:
        KernelInterface.__getitem__ = stock
    return calls


def microseconds(call: Call, launches: int, synchronize: Callable[[], None]) -> float:
    """Mean processor time of the launching thread for one launch: other load on the machine does not count."""
    kernel, grid, args, kwargs = call
    synchronize()
    began = time.thread_time()
    for _ in range(launches):
        kernel[grid](*args, **kwargs)
    taken = time.thread_time() - began
    synchronize()
    return taken / launches * 1e6


def main() -> int:
    """Measure and print; exit status 1 when the ratio is below `--bar`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--launches", type=int, default=1000, help="launches of each kernel in a round")
    parser.add_argument("--bar", type=float, default=0.0, help="smallest ratio that counts as success")
    options = parser.parse_args()
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="bench_launch_")
    result = measure(options.rounds, options.launches)
    if options.json:
        print(json.dumps(result))
    else:
        print(f"{'kernel':56s} {'stock us':>9s} {'ours us':>9s} {'ratio':>6s}")
        for name, row in result["kernels"].items():
            print(f"{name:56s} {row['stock_us']:9.2f} {row['ours_us']:9.2f} {row['ratio']:6.1f}")
        title = f"mean of {len(result['kernels'])}"
        print(f"{title:56s} {result['stock_us']:9.2f} {result['ours_us']:9.2f} {result['ratio']:6.1f}")
    return 0 if result["ratio"] >= options.bar else 1


def measure(rounds: int, launches: int) -> dict[str, Any]:
    """Alternate stock and frozen rounds over one layer's kernels."""
    import torch

    torch.set_num_threads(1)
    real = torch.cuda.is_available()
    if not real:
        import fake_triton

        fake_triton.install("real")
    import triton

    import fake_triton.fla as layer_calls
    from fla_safe.runtime import RuntimeSettings, activate

    if not real:
        layer_calls.prepare()
    elif torch.cuda.get_device_capability() == (9, 0):
        layer_calls.lift_hopper_refusal()
    device = "cuda" if real else "cpu"
    layer = layer_calls.Layer(heads=4, value_heads=4, device=device)
    offsets = layer_calls.packed_offsets(512, 4).to(device)

    def step() -> None:
        layer.step(512, offsets)

    def synchronize() -> None:
        if real:
            torch.cuda.synchronize()

    step()
    calls = capture(step)
    best: dict[str, dict[str, float]] = {name: {"stock_us": 1e9, "ours_us": 1e9} for name in calls}

    def run_round(side: str) -> None:
        for name, call in calls.items():
            microseconds(call, 50, synchronize)
            best[name][side] = min(best[name][side], microseconds(call, launches, synchronize))

    counters: dict[str, int] = {}
    for _ in range(rounds):
        run_round("stock_us")
        runtime = activate(RuntimeSettings(guard="strict"))
        with runtime.warmup():
            step()
        runtime.freeze()
        step()
        run_round("ours_us")
        counters = runtime.counters()
        runtime.deactivate()
    for row in best.values():
        row["ratio"] = row["stock_us"] / row["ours_us"]
    stock, ours = (sum(row[side] for row in best.values()) / len(best) for side in ("stock_us", "ours_us"))
    return {
        "ratio": round(stock / ours, 2),
        "stock_us": round(stock, 3),
        "ours_us": round(ours, 3),
        "kernels": {name: {k: round(v, 3) for k, v in row.items()} for name, row in sorted(best.items())},
        "counters": counters,
        "versions": {"fla": _fla_version(), "triton": triton.__version__, "torch": torch.__version__},
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if real else "stand-in driver, real C launcher, stub libcuda",
        "host": platform.processor() or platform.machine(),
    }


def _fla_version() -> str:
    import fla

    return str(getattr(fla, "__version__", "unknown"))


if __name__ == "__main__":
    raise SystemExit(main())
