"""States in words what touched files while a job trained, with the numbers that say so."""

from typing import Any

from fla_safe.trace.causes import NORMAL

__all__ = ["SUSTAINED", "touches", "verdict"]

SUSTAINED = 0.5
"""Operations a rank and step (a second, where no steps are known) from which on a cause is worth its own sentence."""

_COUNTED = ("opens", "stats", "listings", "searches", "changes", "programs")


def touches(operations: dict[str, float]) -> float:
    """All operations of one cause."""
    return sum(operations.get(name, 0) for name in _COUNTED)


def verdict(report: dict[str, Any]) -> list[str]:
    """Sentences, the most important first."""
    steady = report["steady"]
    if not steady["intervals"]:
        return [
            "The run was too short to tell what lasts: nothing was written down in the second half of its steps (there "
            "is a line a second, or one for each announced step). See the counts of the whole run."
        ]
    unit = "rank and step" if steady["steps"] else "second"
    rates = steady["per_rank_and_step"] if steady["steps"] else steady["per_second"]
    lasting = {c: o for c, o in rates.items() if c in steady["sustained"] and touches(o) >= SUSTAINED}
    said = [
        _sustained(cause, operations, unit, report)
        for cause, operations in sorted(lasting.items(), key=lambda item: -touches(item[1]))
        if cause not in NORMAL
    ]
    if not said:
        said.append("In the steady half nothing but data loading touched files repeatedly.")
    occasional = {c: touches(o) for c, o in steady["counts"].items() if c not in NORMAL and c not in lasting}
    if occasional:
        said.append(
            "Now and then: " + ", ".join(f"{c} ({n:.0f} operations in all)" for c, n in occasional.items()) + "."
        )
    normal = [f"{cause} {_numbers(rates[cause])}" for cause in rates if cause in NORMAL and touches(rates[cause])]
    if normal:
        said.append(f"Normal data loading, a {unit}: {'; '.join(normal)}.")
    tunes, compiles, loads = (sum(steady[k].values()) for k in ("tunes", "compiles", "loads"))
    if tunes or compiles or loads:
        names = sorted({**steady["tunes"], **steady["compiles"], **steady["loads"]})
        said.append(
            f"In the steady half Triton still tuned {tunes} keys, compiled {compiles} kernels and loaded {loads} from "
            f"disk: {', '.join(names[:6])}{' ...' if len(names) > 6 else ''}."
        )
    elif report["launches"]:
        said.append("In the steady half Triton tuned, compiled and loaded nothing.")
    for kernel, gap in report["gaps"].items():
        if gap["steady"]:
            growth = (
                f", {gap['growth']:+.0%} from the first to the last third of it" if gap["growth"] is not None else ""
            )
            said.append(
                f"Host gap before {kernel}: median {gap['steady']['median']:.0f} us, 90th percentile "
                f"{gap['steady']['p90']:.0f} us in the steady half{growth}."
            )
    return said


def _sustained(cause: str, operations: dict[str, float], unit: str, report: dict[str, Any]) -> str:
    places = [s for s in report["sites"] if s["cause"] == cause]
    text = f"{'Also' if cause == 'other' else 'Cause'}: {cause}: {_numbers(operations)} a {unit}."
    if cause == "FLA backend probing":
        modules = sorted({s["path"] for s in places if s["operation"] == "searches"})
        text = (
            f"Cause: {cause}. FLA asks at every dispatched call whether an optional backend is there, and Python keeps "
            f"no answer of an import that fails: {_numbers(operations)} a {unit}."
        )
        if modules:
            shown = ", ".join(modules[:3]) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")
            text += f" Imported again and again: {shown}."
    if places:
        text += f" From {places[0]['stack'] or 'an unknown place'}."
    return text


def _numbers(operations: dict[str, float]) -> str:
    parts = [f"{operations[name]:.3g} {name}" for name in _COUNTED if operations.get(name)]
    if operations.get("bytes"):
        parts.append(f"{operations['bytes'] / 1024:.0f} KiB of files opened")
    return ", ".join(parts)
