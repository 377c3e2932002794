"""The GDN layer's forward pass, shared by the megatron-core and the mcore-bridge class: project, mix, project.

Both projections gather and scatter the sequence themselves under sequence parallelism. So each rank's layer-norm
gradient covers its own slice of the sequence, as Megatron's all-reduce of such gradients expects (mcore-bridge 1.6.2 to
1.6.5 gathers outside the projection, which multiplies that gradient by the tensor-parallel size).
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from fla_safe.errors import FlaSafeError, MissingDependencyError
from fla_safe.gdn.backends import Backend, resolve, supports
from fla_safe.gdn.layout import ProjectionLayout
from fla_safe.gdn.mixer import mixer
from fla_safe.megatron.context_parallel import to_heads, to_tokens
from fla_safe.megatron.packing import packing_for

try:
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
except ImportError as error:
    raise MissingDependencyError(
        f"megatron-core does not import ({error})", "megatron-core>=0.18,<0.20", "pip install 'fla-safe[train]'"
    ) from error

__all__ = ["SafeForward", "UnsupportedLayerError"]


class UnsupportedLayerError(FlaSafeError, ValueError):
    """The model's configuration asks for something that this layer does not do."""


@cache
def _resolved(name: str, device: torch.device, layout: ProjectionLayout, dtype: torch.dtype) -> Backend:
    """Layers of one shape share one backend, and so the warm-up of its kernels."""
    return resolve(name, device, layout=layout, dtype=dtype)


class SafeForward:
    """Mixin over a Megatron `GatedDeltaNet`, which owns parameters, names and checkpoints; this owns the forward pass.

    Subclasses set `layout_kind` (how the input projection's columns are ordered) and `kernel_name`.
    """

    layout_kind: ClassVar[Literal["interleaved", "sectioned"]]
    kernel_name: str = "auto"
    # By name on the class, so that a check (`megatron.watching`) can stand before one layer's; nobody pays otherwise.
    run_mixer = staticmethod(mixer)

    if TYPE_CHECKING:  # attributes of the Megatron class
        config: Any
        pg_collection: Any
        tp_size: int
        cp_size: int
        num_key_heads: int
        num_value_heads: int
        key_head_dim: int
        value_head_dim: int
        activation: str
        use_qk_l2norm: bool
        conv1d: Any
        out_norm: Any
        in_proj: Any
        out_proj: Any
        A_log: torch.Tensor
        dt_bias: torch.Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refuse_unsupported()
        self._layout = self._layout_for(self.tp_size)
        self._mixer_layout = self._layout_for(self.tp_size * self.cp_size)
        self._backend: Backend | None = None
        # Around the mixer once kernels are frozen: file operations and syncs in here count against the guard. In the
        # backward pass that is `gdn.calls.guarded`.
        self.section: AbstractContextManager[None] = nullcontext()
        # Each tensor-parallel rank's gradient of the output norm covers its own heads. With sequence parallelism
        # Megatron adds them up; without, it does not (mcore-bridge 1.6.5, megatron-core 0.19.2).
        self._reduce_norm_gradient = self.tp_size > 1 and not self.config.sequence_parallel

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        inference_params: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[S, B, hidden]` -> `[S, B, hidden]` and the output projection's bias.

        S is this rank's part of the sequence (sequence and context parallel); B is 1 when packed. Rows beyond the last
        offset of the pack come out as zeros before the output projection. `attention_mask` is ignored, as in both
        Megatron classes: padding must stand at the end of a row.

        Raises:
            OffsetsError, ContextParallelError: see `packing_for`.
            UnsupportedLayerError: an inference context was given, or more than two arguments by position.
        """
        if inference_context is not None or inference_params is not None:
            raise UnsupportedLayerError(
                "an inference context", "training or evaluation on whole sequences", "export the model and serve it"
            )
        if any(argument is not None for argument in args):
            # The two Megatron classes order them differently: one library's pack is the other's attention bias.
            raise UnsupportedLayerError(
                f"{2 + len(args)} arguments by position", "two, all others by name", "pass packed_seq_params= by name"
            )
        self._wait_for_parameters()
        proj = self._project_in(hidden_states)
        with self.section:
            mixed = self._mixed(proj, packed_seq_params)
        return self.out_proj(mixed)

    def _mixed(self, proj: torch.Tensor, packed_seq_params: Any) -> torch.Tensor:
        """The mixer on this rank's heads: `[S, B, proj_dim]` -> `[S, B, HV * V]`."""
        packing = packing_for(
            packed_seq_params,
            total=proj.shape[0] * self.cp_size,
            batch=proj.shape[1],
            device=proj.device,
            context_parallel_size=self.cp_size,
        )
        backend = self._backend
        if backend is None:
            backend = self.backend_for(proj.device, proj.dtype)
        if packing.order is None:
            return self._mix(backend, proj, packing.segments, self._mixer_parameters())
        group = self.pg_collection.cp
        columns, channels, heads = self._rank_slices(proj.device)
        proj = to_heads(proj if columns is None else proj.index_select(-1, columns), packing.order, group)
        weight, bias, A_log, dt_bias = self._mixer_parameters()
        bias = None if bias is None else bias[channels]
        mine = weight[channels], bias, A_log[heads], dt_bias[heads]
        return to_tokens(self._mix(backend, proj, packing.segments, mine), packing.order, group)

    @property
    def kernel_in_use(self) -> str | None:
        """Name of the backend that ran, None before the first forward pass."""
        return None if self._backend is None else self._backend.name

    def _wait_for_parameters(self) -> None:
        """Wait for the weights of the modules that are read and never called.

        With `overlap_param_gather` Megatron's hooks do that, each before its module runs.
        """
        for module in (self.conv1d, self.out_norm):
            for hook in module._forward_pre_hooks.values():
                if hook.__module__ == "megatron.core.distributed.distributed_data_parallel":
                    hook(module, ())

    def _project_in(self, hidden_states: torch.Tensor) -> torch.Tensor:
        proj, _ = self.in_proj(hidden_states)
        return proj

    def _mixer_parameters(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        return self.conv1d.weight.squeeze(1), self.conv1d.bias, self.A_log, self.dt_bias

    def _mix(
        self,
        backend: Backend,
        proj: torch.Tensor,
        segments: Any,
        parameters: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        norm_weight = self.out_norm.weight
        if self._reduce_norm_gradient:
            norm_weight = copy_to_tensor_model_parallel_region(norm_weight, group=self.pg_collection.tp)
        conv_weight, conv_bias, A_log, dt_bias = parameters
        return self.run_mixer(
            proj,
            layout=self._mixer_layout,
            conv_weight=conv_weight,
            conv_bias=conv_bias,
            A_log=A_log,
            dt_bias=dt_bias,
            norm_weight=norm_weight,
            norm_eps=self.out_norm.eps,
            segments=segments,
            kernel=backend,
            use_qk_l2norm=self.use_qk_l2norm,
            zero_centered_norm=self.out_norm.zero_centered_gamma,
        )

    def backend_for(self, device: torch.device, dtype: torch.dtype) -> Backend:
        """The kernel of this layer on a device, resolved once and kept.

        Raises:
            BackendError: the kernel cannot run there.
        """
        name = self.kernel_name
        if self.config.deterministic_mode:
            # As in Megatron, deterministic mode means the plain-torch kernel; ours takes packs as well.
            name = "torch"
        elif name == "auto":
            # On a GPU a missing FLA is an error; on a CPU its kernels run under Triton's interpreter, if asked for.
            able, _ = supports("fla", device, layout=self._mixer_layout, dtype=dtype)
            name = "fla" if able or device.type == "cuda" else "torch"
        self._backend = _resolved(name, device, self._mixer_layout, dtype)
        return self._backend

    def _layout_for(self, ranks: int) -> ProjectionLayout:
        return ProjectionLayout(
            self.layout_kind,
            self.num_key_heads // ranks,
            self.num_value_heads // ranks,
            self.key_head_dim,
            self.value_head_dim,
        )

    def _rank_slices(self, device: torch.device) -> tuple[torch.Tensor | None, Any, slice]:
        """Projection columns (an index that sorts them by rank), conv channels and value heads that a rank mixes."""
        raise NotImplementedError

    def _refuse_unsupported(self) -> None:
        if self.activation not in {"silu", "swish"}:
            raise UnsupportedLayerError(
                f"activation {self.activation!r}", "silu", "use the model's own configuration, or --gdn_impl default"
            )
        if self.config.normalization != "RMSNorm":
            raise UnsupportedLayerError(
                f"normalization {self.config.normalization!r}", "RMSNorm", "use --normalization RMSNorm"
            )
        if getattr(self.config, "cp_partition_mode", "zigzag") != "zigzag" and self.cp_size > 1:
            raise UnsupportedLayerError(
                f"cp_partition_mode {self.config.cp_partition_mode!r}", "zigzag", "drop --cp_partition_mode"
            )
        if getattr(self.config, "hybrid_context_parallel", False):
            raise UnsupportedLayerError(
                "hybrid_context_parallel, which gives each micro-batch its own context-parallel group",
                "one group for all",
                "switch it off, and use --context_parallel_size",
            )
        ranks = self.tp_size * self.cp_size
        if self.num_key_heads % ranks or self.num_value_heads % ranks:
            heads = f"{self.num_key_heads} key and {self.num_value_heads} value heads"
            raise UnsupportedLayerError(
                f"{heads} over TP {self.tp_size} x CP {self.cp_size}",
                "head counts that the ranks divide evenly",
                "lower tensor_model_parallel_size or context_parallel_size",
            )
