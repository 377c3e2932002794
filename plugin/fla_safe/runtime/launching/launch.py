"""Direct launch: after the freeze `kernel[grid](...)` goes through generated code straight to the compiled kernel.

The seam is `KernelInterface.__getitem__`. It returns the kernel's own `fla_safe_launch` with the grid bound: before the
freeze that is a method which runs the kernel as Triton does and notes the class of the call, after it the generated
entry. A call that the entry does not know (another class, an installed launch hook, a profiler) takes Triton's path.
"""

import logging
import threading
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fla_safe.runtime.guard import Guard
from fla_safe.runtime.kernels import PINNED, Kernel
from fla_safe.runtime.launching import plans as planning
from fla_safe.runtime.launching.entry import UNSET, generate
from fla_safe.runtime.launching.plans import Plan
from fla_safe.runtime.launching.shapes import CallShape, describe_call
from fla_safe.runtime.seams import Seams

__all__ = ["ATTRIBUTE", "Launching", "Site"]

ATTRIBUTE = "fla_safe_launch"
_MOST_PLANS = 4096  # of one kernel; classes beyond take Triton's path, so that memory stays bounded
_MOST_LATE_PLANS = 64  # after the freeze: each makes a new entry, which takes the longer the more classes there are

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Site:
    """One kernel that has been called, and what is known of its calls."""

    kernel: Kernel
    seen: dict[CallShape, set[int]] = field(default_factory=dict)
    plans: dict[CallShape, Plan] = field(default_factory=dict)
    late: int = 0
    positional: int = 0
    indirect: str | None = None
    full_meta: bool = False


class Launching:
    """Owns the seam, notes classes of calls, and makes entries.

    Args:
        guard: knows whether the freeze has happened.
        describe: facts of a kernel, None for what is none of ours.
        ahead: runs the freeze's compilations at once.
    """

    def __init__(
        self, guard: Guard, describe: Callable[[Any], Kernel | None], ahead: Callable[[list[Callable[[], Any]]], None]
    ) -> None:
        self.guard = guard
        self.describe = describe
        self.ahead = ahead
        self.misses = 0
        self.sites: dict[int, Site] = {}
        self._lock = threading.RLock()

    def install(self, seams: Seams) -> None:
        """Exchange `KernelInterface.__getitem__`, and shorten what grid functions call."""
        from triton.runtime.jit import ConstexprFunction, KernelInterface

        owner = self

        def launch(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> Any:
            return owner.call(kernel, grid, args, kwargs)

        def __getitem__(kernel: Any, grid: Any) -> Any:
            return partial(kernel.fla_safe_launch, grid)

        seams.replace(KernelInterface, ATTRIBUTE, launch)
        seams.replace(KernelInterface, "__getitem__", __getitem__)
        seams.on_restore(self.thaw)

        def on_host(function: Any, *args: Any, **kwargs: Any) -> Any:
            # `triton.cdiv` in a grid function: most of a launch's host time would be unwrapping its plain integers.
            if not kwargs:
                for argument in args:
                    if type(argument) is not int:
                        break
                else:
                    return function.fn(*args)
            return stock_call(function, *args, **kwargs)

        stock_call = seams.replace(ConstexprFunction, "__call__", on_host)

    def call(self, outer: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a kernel the way Triton does, with dead constants pinned, and note the class of the call."""
        site = self._site(outer)
        if site is None:
            return outer.run(*args, grid=grid, warmup=False, **kwargs)
        kernel = site.kernel
        named = dict(zip(kernel.parameters, args, strict=False)) | kwargs
        # Described before it runs: a kernel may be called with tensors that it frees or a hook that moves them.
        described = describe_call(kernel, named, _current_device()) if site.indirect is None else None
        args, kwargs, grid = _pin(kernel, args, kwargs, grid)
        compiled = outer.run(*args, grid=grid, warmup=False, **kwargs)
        if described is not None and compiled is not None:
            self._note(site, *described, len(args), compiled)
        return compiled

    def freeze(self, devices: Collection[int], progress: Callable[[str], None]) -> None:
        """Compile every class that was seen, on every device, and put the entries in place."""
        import torch

        with self._lock:  # other threads may launch, and so add to it, meanwhile
            found = [(site, {shape: {*masks} for shape, masks in site.seen.items()}) for site in self.sites.values()]
        found = [(site, seen) for site, seen in found if site.indirect is None and seen]
        for device in sorted({*devices} or {shape.device for _, seen in found for shape in seen}):
            with torch.cuda.device(device) if device >= 0 else nullcontext():
                self.ahead(
                    [
                        partial(planning.build, site.kernel, shape.on(device), masks)
                        for site, seen in found
                        for shape, masks in seen.items()
                    ]
                )
        for site, seen in found:
            progress(site.kernel.name)
            plans: dict[CallShape, Plan] = {}
            for device in sorted({*devices} or {shape.device for shape in seen}):
                with torch.cuda.device(device) if device >= 0 else nullcontext():
                    for shape, masks in seen.items():
                        moved = shape.on(device)
                        if moved not in plans:
                            plans[moved] = planning.build(site.kernel, moved, masks)
            with self._lock:
                site.plans, site.late = plans, 0
                if site.indirect is None:
                    self._put_entry(site)

    def thaw(self) -> None:
        """Take the entries away; calls are noted again."""
        with self._lock:
            for site in self.sites.values():
                vars(site.kernel.outer).pop(ATTRIBUTE, None)

    def summary(self) -> dict[str, Any]:
        """For reports: planned classes by kernel, and kernels that take Triton's path with the reason."""
        sites = list(self.sites.values())
        return {
            "planned": {s.kernel.name: len(s.plans) for s in sites if s.plans},
            "indirect": {s.kernel.name: s.indirect for s in sites if s.indirect},
            "pinned": {s.kernel.name: sorted(s.kernel.dead) for s in sites if s.kernel.dead},
            "misses": self.misses,
        }

    def _site(self, outer: Any) -> Site | None:
        site = self.sites.get(id(outer))
        if site is not None:
            return site
        kernel = self.describe(outer)
        if kernel is None:
            return None
        with self._lock:
            return self.sites.setdefault(id(outer), Site(kernel))

    def _note(self, site: Site, shape: CallShape, mask: int, positional: int, compiled: Any) -> None:
        # A class that another thread called during the freeze was seen, and has no plan.
        masks = site.plans.get(shape) if self.guard.frozen else site.seen.get(shape)
        if masks is not None and mask in masks and positional <= site.positional:
            return
        if len(site.seen) >= _MOST_PLANS or (self.guard.frozen and site.late >= _MOST_LATE_PLANS):
            return
        with self._lock:
            site.positional = max(site.positional, positional)
            if shape not in site.seen and site.indirect is None:
                site.indirect = _not_reproducible(site.kernel, shape, mask, compiled)
            site.seen.setdefault(shape, set()).add(mask)
            if site.indirect is not None:
                vars(site.kernel.outer).pop(ATTRIBUTE, None)
            elif self.guard.frozen:
                # The binary is in memory now: give this class a plan of what exists, compile nothing.
                site.late += 1
                site.plans.setdefault(shape, {})[mask] = planning.variant_of(site.kernel, compiled)
                self._put_entry(site)

    def _put_entry(self, site: Site) -> None:
        outer = site.kernel.outer

        def miss(grid: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
            self.misses += 1
            return self.call(outer, grid, *_as_called(site.kernel, args, given))

        def widen() -> None:
            with self._lock:
                if not site.full_meta:
                    site.full_meta = True
                    self._put_entry(site)

        entry = generate(site.kernel, site.plans, site.positional, miss=miss, full_meta=site.full_meta, widen=widen)
        if entry is None:
            site.indirect = "its calls mix kinds of arguments in one place"
            vars(outer).pop(ATTRIBUTE, None)
        else:
            setattr(outer, ATTRIBUTE, entry)


def _as_called(kernel: Kernel, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as the caller gave them: what was left out is left out, what stands in `args` is not repeated."""
    kwargs = {name: value for name, value in given.items() if value is not UNSET}
    count = next((i for i, value in enumerate(args) if value is UNSET), len(args))
    for name in kernel.parameters[:count]:
        kwargs.pop(name, None)
    return args[:count], kwargs


def _pin(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any) -> tuple[Any, Any, Any]:
    """Give dead constexprs their one value; grid functions still see the caller's."""
    if not kernel.dead:
        return args, kwargs, grid
    named = dict(zip(kernel.parameters, args, strict=False)) | kwargs
    given = {name: named[name] for name in kernel.dead if name in named}
    if not given:
        return args, kwargs, grid
    args = tuple(PINNED if kernel.parameters[i] in given else a for i, a in enumerate(args))
    kwargs = {name: PINNED if name in given else value for name, value in kwargs.items()}
    if callable(grid):
        asked = grid

        def grid(meta: dict[str, Any]) -> Any:
            return asked({**meta, **given})

    return args, kwargs, grid


def _not_reproducible(kernel: Kernel, shape: CallShape, mask: int, compiled: Any) -> str | None:
    """Why the class does not determine the binary (a heuristic looks into tensors, a hook wants real ones), or None."""
    if kernel.jit.pre_run_hooks or (kernel.tuner is not None and any(c.pre_hook for c in kernel.tuner.configs)):
        return "it has hooks that run before each call"
    try:
        twin = planning.compile_only(kernel.outer, shape.arguments(kernel, mask))
    except Exception as error:
        return f"its heuristics need real arguments ({type(error).__name__}: {error})"
    return None if twin is compiled else "its heuristics depend on more than the class of the call"


def _current_device() -> int:
    from triton.runtime import driver

    return int(driver.active.get_current_device())
