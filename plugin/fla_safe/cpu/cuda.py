"""Makes code that assumes CUDA run on the CPU: device arguments, `torch.cuda`'s calls and two gloo gaps."""

import contextlib
import os
import threading
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["install", "to_cpu_device"]

_installed: list[Any] = []


def to_cpu_device(device: Any) -> Any:
    """The device argument, with any spelling of a CUDA device ('cuda', 'cuda:0', 0) replaced by the CPU."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device.startswith("cuda") else device
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    return device


def _to_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if "device" in kwargs:
        kwargs = {**kwargs, "device": to_cpu_device(kwargs["device"])}
    return tuple(to_cpu_device(a) if isinstance(a, str | torch.device | int) else a for a in args), kwargs


class _CudaToCpu(TorchFunctionMode):
    """Rewrites the device argument of every torch function called from Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs) if kwargs else {}
        if kwargs:
            if "device" in kwargs:
                kwargs["device"] = to_cpu_device(kwargs["device"])
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        if func is torch.Tensor.to:
            rest, kwargs = _to_arguments(args[1:], kwargs)
            args = (args[0], *rest)
        return func(*args, **kwargs)


class _Stream:
    """A stream that runs everything at once, in order."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> "_Event":
        return event if event is not None else _Event()

    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class _Event:
    """An event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def query(self) -> bool:
        return True


class _Device(contextlib.nullcontext):  # type: ignore[type-arg]
    """`torch.cuda.device(...)` as a context that changes nothing."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()


def install() -> None:
    """Replace the calls, once. `torch.cuda.is_available` keeps its answer, False."""
    if _installed:
        return
    mode = _CudaToCpu()
    mode.__enter__()  # for good: the mode lives as long as the process
    _installed.append(mode)
    _patch_backward(mode)
    _patch_threads(mode)
    _patch_tensors()
    _patch_cuda()
    _patch_distributed()


def _patch_backward(mode: TorchFunctionMode) -> None:
    # PyTorch takes a mode off while it handles a call. `backward` is such a call, and it runs backward functions and
    # recomputation that are written in Python and make tensors.
    autograd: Any = torch.autograd
    run_backward = autograd.graph._engine_run_backward

    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_backward(*args, **kwargs)

    autograd.graph._engine_run_backward = autograd._engine_run_backward = _engine_run_backward


def _patch_threads(mode: TorchFunctionMode) -> None:
    # A mode belongs to one thread. Transformers loads checkpoints in others.
    thread: Any = threading.Thread
    run = thread.run

    def run_under_mode(self: threading.Thread) -> None:
        with mode:
            run(self)

    thread.run = run_under_mode


def _patch_tensors() -> None:
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor_type, module_to = tensor.type, module.to

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron's distributed optimizer accepts only parameters whose type string is one of torch.cuda's.
        result = tensor_type(self, *args, **kwargs)
        if not args and not kwargs and result.startswith("torch.") and not result.startswith("torch.cuda."):
            return "torch.cuda." + result.removeprefix("torch.")
        return result

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        args, kwargs = _to_arguments(args, kwargs)
        return module_to(self, *args, **kwargs)

    tensor.type = type_
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.pin_memory = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, *args: None
    module.cuda = lambda self, *args, **kwargs: self
    module.to = to


def _patch_cuda() -> None:
    cuda: Any = torch.cuda
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def constant(value: Any) -> Any:
        # A new function each time: Dynamo, which Megatron imports, refuses one function under two of torch's names.
        return lambda *args, **kwargs: value

    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "_lazy_init", "init", "set_stream"):
        setattr(cuda, name, constant(None))
    for name in ("reset_peak_memory_stats", "reset_max_memory_allocated", "set_per_process_memory_fraction"):
        setattr(cuda, name, constant(None))
    for name in ("memory_reserved", "memory_allocated", "max_memory_reserved", "max_memory_allocated"):
        setattr(cuda, name, constant(0))
    cuda.memory_stats = lambda *args, **kwargs: {}
    cuda.mem_get_info = constant((host_bytes, host_bytes))
    cuda.current_device = constant(0)
    cuda.device_count = constant(1)
    cuda.get_device_capability = constant((9, 0))
    cuda.get_device_name = constant("CPU (fla_safe stand-in)")
    cuda.get_device_properties = constant(
        SimpleNamespace(
            name="CPU (fla_safe stand-in)", major=9, minor=0, total_memory=host_bytes, multi_processor_count=1
        )
    )
    cuda.is_current_stream_capturing = constant(False)
    cuda._lazy_call = lambda callback, **kwargs: callback()
    cuda.device = _Device
    cuda.Stream, cuda.Event = _Stream, _Event
    stream = _Stream()
    cuda.current_stream, cuda.default_stream = constant(stream), constant(stream)
    cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()

    # One generator serves as both the CPU's and the device's, so that saving and restoring either restores dropout.
    cuda.default_generators = (torch.default_generator,)
    for holder in (cuda, cuda.random):
        holder.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
        holder.manual_seed_all = lambda seed: torch.default_generator.manual_seed(seed)
        holder.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        holder.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
        holder.get_rng_state_all = lambda: [torch.get_rng_state()]
        holder.set_rng_state_all = lambda states: torch.set_rng_state(states[0])
    for name in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Byte", "Bool"):
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))


def _patch_distributed() -> None:
    import torch.distributed as dist

    if not dist.is_available():
        return
    all_to_all_single = dist.all_to_all_single

    def sizes(split: Any) -> Any:
        return split.tolist() if isinstance(split, torch.Tensor) else split

    def all_to_all_single_(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # gloo, unlike NCCL's wrapper in Megatron's dispatcher, takes lists only.
        return all_to_all_single(output, input, sizes(output_split_sizes), sizes(input_split_sizes), *args, **kwargs)

    dist.all_to_all_single = all_to_all_single_  # type: ignore[assignment]
