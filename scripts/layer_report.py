"""What bench_layer.py prints and draws of its measurements."""

from pathlib import Path
from typing import Any

from gpu_measure import Measurement

__all__ = ["plot", "print_kernels", "print_results"]

OURS = ("mixer_in_", "mixer_out_", "gate_backward", "add_sums")
"""Names of the kernels around the chunk kernel."""


def print_results(results: dict[str, Measurement], chunk_busy: dict[str, float], floor: float) -> None:
    """A line of milliseconds a way, and one that compares it with stock. "around": the fused kernels. "rest": what is
    busy beyond the chunk kernel alone."""
    columns = ("wall", "in a row", "host", "busy", "around", "rest", "kernels", "syncs", "peak MiB")
    print(f"{'':26}" + "".join(f"{column:>10}" for column in columns))
    stock = results["stock"]
    for name, m in results.items():
        around = sum(ms for kernel, ms in m.by_kernel.items() if kernel.startswith(OURS))
        times = (m.wall, m.in_a_row, m.host, m.busy, around, m.busy - chunk_busy[name])
        print(f"{name:26}" + "".join(f"{ms:10.3f}" for ms in times) + f"{m.kernels:10.0f}{m.syncs:10d}{m.peak:10.0f}")
        if m is not stock:
            print(
                f"  stock / this: wall {stock.wall / m.wall:.2f}, in a row {stock.in_a_row / m.in_a_row:.2f}, "
                f"host {stock.host / m.host:.2f}, busy {stock.busy / m.busy:.2f}; peak {m.peak / stock.peak:.2f} of "
                f"stock; wall / busy {m.wall / m.busy:.2f}, in a row {m.in_a_row / m.busy:.2f}; "
                f"busy / floor {m.busy / floor:.2f}"
            )


def print_kernels(results: dict[str, Measurement]) -> None:
    """The kernels of each of our ways that take longest."""
    for name, m in results.items():
        if name.startswith("fused"):
            print(f"  kernels of '{name}' (ms): ", end="")
            top = sorted(m.by_kernel.items(), key=lambda item: -item[1])[:18]
            print(", ".join(f"{kernel[:40]} {ms:.3f}" for kernel, ms in top))


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Bars of wall time a way and case, with the floor."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chosen = [r for r in records if r["scope"] == "mixer" and r["tp"] == 2 and not r["way"].startswith("composed")]
    cases = sorted({(r["rows"], r["segments"]) for r in chosen})
    names = list(dict.fromkeys(r["way"] for r in chosen))
    figure, axes = plt.subplots(figsize=(8, 4))
    for i, name in enumerate(names):
        walls = [next(r["wall"] for r in chosen if (r["rows"], r["segments"]) == c and r["way"] == name) for c in cases]
        axes.bar([x + i * 0.8 / len(names) for x in range(len(cases))], walls, 0.8 / len(names), label=name)
    for x, c in enumerate(cases):
        low = next(r["floor"] for r in chosen if (r["rows"], r["segments"]) == c)
        axes.hlines(low, x - 0.4 / len(names), x + 0.8 - 0.4 / len(names), colors="black", linestyles="dotted")
    axes.set_xticks([x + 0.3 for x in range(len(cases))], [f"T {rows}\n{n} sequences" for rows, n in cases])
    axes.set_ylabel("ms, forward + backward")
    axes.set_title("GDN mixer, TP2 shard of Qwen3.5-35B-A3B (dotted: floor)")
    axes.margins(y=0.3)
    axes.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
