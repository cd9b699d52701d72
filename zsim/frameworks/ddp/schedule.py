"""torch DistributedDataParallel under autocast, as torch 2.13 runs it.

Transcribed from `torch/nn/parallel/distributed.py` and `torch/csrc/distributed/c10d/reducer.cpp`: gradients
are copied into flat buckets, a bucket is all-reduced on a separate stream as soon as its last gradient is
ready, and copied back into the gradients at the end of backward. Every rank holds the whole model: fp32
parameters, fp32 gradients, and the optimizer's states.

# [Note: autocast's casts]
Mixed precision is torch.autocast. A linear layer casts its fp32 weight and bias to the low type before the
product. Autocast caches the casts until it ends, at the end of forward. The product saves its casts for its
backward, so without checkpointing they stay until then. Under checkpointing they are not saved: the casts of
all blocks accumulate until the end of forward, and recomputation casts again. Frozen weights are not cached
(`cached_cast` of torch 2.13 aten/src/ATen/autocast_mode.cpp asks for `requires_grad`): what no backward needs
is free after the product. The gradient of a weight is computed in the low type and cast to fp32. Norms and
embeddings use their fp32 weights directly.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.ddp.settings import DdpConfig
from zsim.frameworks.torch.moments import replicated_moments
from zsim.frameworks.torch.pipeline import TorchRuntime
from zsim.operations.operation import Role
from zsim.plan.builder import COMPUTE, move_kernels
from zsim.plan.framework_hooks import FrameworkHooks
from zsim.plan.hooks import Hooks
from zsim.plan.moments import BetweenSteps, JobMoment
from zsim.plan.ops import Collective, Memory
from zsim.plan.shared.optimizer import (
    clip_gradients,
    group_by_type,
    lazy_states,
    optimizer_tensors,
    paged_states,
    parameter_bytes,
    update,
)
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import ModuleCall
from zsim.specs.model.spec import Parameter
from zsim.specs.strategy.parallelism import PIPELINE, ParallelismConfig

ALL_REDUCE = "all_reduce"


def ddp_buckets(
    gradients: Sequence[tuple[int, str]], first_cap_bytes: int, cap_bytes: int
) -> list[list[int]]:
    """The positions in `gradients` (elements, type) of each bucket's parameters, which have one type.

    Gradients are in the order in which they become ready, by which torch forms buckets from the second
    iteration on. A bucket is closed once it holds its cap or more. Source:
    `compute_bucket_assignment_by_size` in torch/csrc/distributed/c10d/reducer.cpp.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    caps: dict[str, int] = {}
    for position, (numel, dtype) in enumerate(gradients):
        open_buckets.setdefault(dtype, []).append(position)
        sizes[dtype] = sizes.get(dtype, 0) + numel * DTYPE_BYTES[dtype]
        if sizes[dtype] >= caps.get(dtype, first_cap_bytes):
            buckets.append(open_buckets.pop(dtype))
            sizes[dtype], caps[dtype] = 0, cap_bytes
    buckets += open_buckets.values()
    return buckets


@dataclass
class _Bucket:
    """One flat buffer of gradients of one type, and the number of them missing in this backward."""

    number: int
    dtype: str
    num_bytes: int
    num_parameters: int
    num_missing: int = 0
    reduce_event: int = 0  # the all-reduce's event


class DdpSchedule(Hooks):
    """The hooks of torch's reducer. The last backward reduces, under a pipeline too (torch's stage.py calls
    the reducer's `prepare_for_backward` for it, and wraps the other backwards in `no_sync`)."""

    asynchronous = frozenset({"all_reduce"})  # reducer.cpp, `all_reduce_bucket`

    def __init__(self, stage: Stage, strategy: DdpConfig) -> None:
        super().__init__(stage)
        self.group = stage.group()
        self.is_single_rank = self.group.size == 1
        self.workload = workload = stage.workload
        self.strategy = strategy
        self.has_views = strategy.gradient_as_bucket_view and not self.is_single_rank  # 1 rank has no buckets
        self.training = training = stage.training
        self.low_dtype = {"fp8": "bf16"}.get(training.precision, training.precision)
        self.low_bytes = DTYPE_BYTES[self.low_dtype]
        self.stored_bytes = DTYPE_BYTES[training.stored_dtype]
        self._checkpointed = {segment.name for segment in workload.segments if segment.is_checkpointed}
        embeddings = [module for module in workload.model.before if module.role is Role.EMBEDDING]
        embedded = [parameter for module in embeddings for parameter in module.parameters]
        self._casts_embedding = any(map(self._is_cast, embedded))
        self._trains_low_embedding = any(
            weight.trainable and not self._is_cast(weight) for weight in embedded
        )
        order = [call for segment in reversed(workload.segments) for call in reversed(segment.calls)]
        ready_parameters = [parameter for call in order for parameter in reversed(call.trainable_parameters)]
        gradients = [(parameter.numel, self._type_of(parameter)) for parameter in ready_parameters]
        self.gradient_bytes = self._bytes(ready_parameters)
        tensors = optimizer_tensors(
            workload, [(parameter, parameter.shape) for parameter in ready_parameters]
        )
        self.updated = [
            replace(tensor, dtype=dtype) for tensor, (_, dtype) in zip(tensors, gradients, strict=True)
        ]
        self._buckets: list[_Bucket] = []
        caps = strategy.first_bucket_cap_bytes, strategy.bucket_cap_bytes
        bucket_at: dict[int, _Bucket] = {}
        for number, positions in enumerate(ddp_buckets(gradients, *caps)):
            parameters = [ready_parameters[position] for position in positions]
            dtype = self._type_of(parameters[0])
            self._buckets.append(_Bucket(number, dtype, self._bytes(parameters), len(positions)))
            bucket_at |= dict.fromkeys(positions, self._buckets[-1])
        self._bucket_of = [bucket_at[position] for position in range(len(ready_parameters))]
        self._num_ready = 0
        self._is_syncing = True
        self._has_gradients = False
        self._cached_cast_bytes = 0
        self._held: dict[str, int] = {}  # bytes by the lender, "" for the embedding

    def resident(self) -> list[Memory]:
        """The whole model and its optimizer states on every rank. The buckets stay between steps, and one
        rank has none.
        """
        buckets = 0 if self.is_single_rank else self.gradient_bytes
        return [
            Memory("parameters", parameter_bytes(self.workload, self.training.stored_dtype)),
            lazy_states(self.training, self.updated),
            *paged_states(self.training, self.updated),
            # With `gradient_as_bucket_view` the gradients are views of the buckets.
            Memory("gradients" if self.has_views else "buffers", buckets),
        ]

    def action_state(self, micro_batch: int) -> Hashable | None:
        """Whether there are gradients to add to, and what of them and of the casts waits."""
        return micro_batch > 0, sum(self._held.values()), self._cached_cast_bytes

    def _type_of(self, parameter: Parameter) -> str:
        return parameter.stored_dtype or self.training.stored_dtype

    def _bytes(self, parameters: Iterable[Parameter]) -> int:
        return sum(parameter.numel * DTYPE_BYTES[self._type_of(parameter)] for parameter in parameters)

    # -- autocast: see [Note: autocast's casts] ---------------------------------------------------------

    def pre_module(self, call: ModuleCall) -> None:
        if self.builder.phase == "backward":
            return
        size = self._cast_bytes(call)
        if not size:
            return
        self.builder.allocate("buffers", size, micro_batch=self.builder.micro_batch)
        fp32 = size // self.low_bytes * self.stored_bytes
        casts = sum(self._is_cast(parameter) for parameter in call.parameters)
        self.builder.kernels(
            f"cast {call.name}", move_kernels(fp32, size, launches=max(1, casts)), module=call.name
        )
        if self.builder.phase == "forward" and not self._keeps_casts(call):
            self._cached_cast_bytes += self._cast_bytes(call, is_cached=True)

    def end_forward(self) -> None:
        self.builder.free("buffers", self._cached_cast_bytes, micro_batch=self.builder.micro_batch)
        self._cached_cast_bytes = 0

    def post_module(self, call: ModuleCall) -> None:
        size, phase = self._cast_bytes(call), self.builder.phase
        if phase == "forward":
            size = 0 if self._keeps_casts(call) else size - self._cast_bytes(call, is_cached=True)
        elif phase == "recompute" and call.module.has_backward:
            size = 0
        self.builder.free("buffers", size, micro_batch=self.builder.micro_batch)

    def _keeps_casts(self, call: ModuleCall) -> bool:
        """Whether a product of forward saves its casts for its backward, which some passes do not have."""
        has_backward = call.module.has_backward and not self.training.forward_only
        return has_backward and call.segment not in self._checkpointed

    def _cast_bytes(self, call: ModuleCall, *, is_cached: bool = False) -> int:
        """Bytes of a product's casts, or of those that autocast caches."""
        if self.low_dtype == self.training.stored_dtype or call.module.role is not Role.PRODUCT:
            return 0
        parameters = call.trainable_parameters if is_cached else call.parameters
        numel = sum(parameter.numel for parameter in parameters if self._is_cast(parameter))
        return (numel + self._borrowed_numel(call, is_cached=is_cached)) * self.low_bytes

    def _borrowed_numel(self, call: ModuleCall, *, is_cached: bool) -> int:
        """Elements of a tied weight that are cast."""
        if not call.module.borrows_frozen:
            return call.borrowed_numel
        return 0 if is_cached or not self._casts_embedding else call.borrowed_numel

    def _is_cast(self, parameter: Parameter) -> bool:
        """Whether autocast casts it: it is kept in the stored type, not frozen in the low one."""
        return parameter.stored_dtype in ("", self.training.stored_dtype)

    # -- gradients --------------------------------------------------------------------------------------

    def begin_backward(self, micro_batch: int, *, is_last: bool, schedule_manages_sharding: bool) -> None:
        reduces_each = not self.strategy.no_sync and not schedule_manages_sharding
        self._is_syncing = (is_last or reduces_each) and not self.is_single_rank
        self._has_gradients = micro_batch > 0
        self._num_ready = 0
        for bucket in self._buckets:
            bucket.num_missing = bucket.num_parameters

    def gradient_ready(self, call: ModuleCall) -> None:
        """AccumulateGrad of each parameter, and the reducer's hook after it."""
        if call.borrowed_gradient_numel:
            self._tied_gradient(call)
        if not call.trainable_numel:
            return
        self._gradient_from_autograd(call)
        if self.strategy.optimizer_in_backward:
            self._update_at_once(call)
            return
        pending: list[Parameter] = []
        for parameter in reversed(call.trainable_parameters):
            pending.append(parameter)
            bucket = self._bucket_of[self._num_ready]
            self._num_ready += 1
            if not self._is_syncing:
                continue
            bucket.num_missing -= 1
            if bucket.num_missing == 0:
                self._copy_to_bucket(call, pending)
                pending = []
                self._all_reduce(bucket)
        if self._is_syncing and pending:
            self._copy_to_bucket(call, pending)

    def _update_at_once(self, call: ModuleCall) -> None:
        """Update each parameter by an optimizer of its own, and free its gradient (torchtune 0.7.0
        training/memory.py `register_optim_in_bwd_hooks`).
        """
        for parameter in reversed(call.trainable_parameters):
            update(self.builder, self.training, [self.updated[self._num_ready]])
            self.builder.free("gradients", self._bytes([parameter]))
            self._num_ready += 1

    def _tied_gradient(self, call: ModuleCall) -> None:
        """Hold the head's contribution to a tied weight's gradient until the embedding's contribution is
        ready, or a layer's to that of a block that it shares. Autograd sums up those of several layers.
        """
        lender = call.module.lender
        is_cast = bool(lender) or not self._trains_low_embedding
        size = call.borrowed_numel * (self.stored_bytes if is_cast else self.low_bytes)
        self.builder.allocate("activations", size)
        self._cast_gradient(call, call.borrowed_numel if is_cast else 0)
        if lender and lender in self._held:
            self._add_held(call, size)
        else:
            self._held[lender] = self._held.get(lender, 0) + size

    def _add_held(self, call: ModuleCall, size: int) -> None:
        """Add up two gradients of a lender's parameters, one of which is freed."""
        kernels = move_kernels(2 * size, size)
        self.builder.kernels(f"add shared gradient {call.name}", kernels, module=call.name)
        self.builder.free("activations", size)

    def _gradient_from_autograd(self, call: ModuleCall) -> None:
        """Issue the gradient in the stored type. It is added to the gradient of earlier micro-batches if
        there is one.
        """
        builder, size = self.builder, self._bytes(call.trainable_parameters)
        is_kept = not self._has_gradients and not self.has_views
        builder.allocate("gradients" if is_kept else "buffers", size)
        if call.module.role is Role.PRODUCT:
            cast_parameters = filter(self._is_cast, call.trainable_parameters)
            self._cast_gradient(call, sum(parameter.numel for parameter in cast_parameters))
        elif size == self._held.get(""):
            builder.free("activations", self._held.pop(""))
        if call.name in self._held:
            self._add_held(call, self._held.pop(call.name))
        if self._has_gradients:
            builder.kernels(
                f"accumulate gradients {call.name}",
                move_kernels(2 * size, size, launches=len(call.trainable_parameters)),
                module=call.name,
            )
            builder.free("buffers", size)

    def _cast_gradient(self, call: ModuleCall, numel: int) -> None:
        if self.low_dtype == self.training.stored_dtype or not numel:
            return
        cast_bytes = numel * self.low_bytes
        self.builder.allocate("buffers", cast_bytes)
        self.builder.kernels(
            f"cast gradient {call.name}",
            move_kernels(
                cast_bytes, numel * self.stored_bytes, launches=max(1, len(call.trainable_parameters))
            ),
            module=call.name,
        )
        self.builder.free("buffers", cast_bytes)

    # -- buckets ----------------------------------------------------------------------------------------

    def _copy_to_bucket(self, call: ModuleCall, parameters: Sequence[Parameter]) -> None:
        """Scale by 1 / world size into the bucket, parameter by parameter."""
        size = self._bytes(parameters)
        self.builder.kernels(
            f"copy to bucket {call.name}",
            move_kernels(size, size, launches=len(parameters)),
            module=call.name,
        )
        owns_memory = not self._has_gradients or self.strategy.no_sync
        if self.has_views and owns_memory:
            self.builder.free("buffers", size)  # the gradient is a view of the bucket from now on

    def _all_reduce(self, bucket: _Bucket) -> None:
        builder = self.builder
        builder.wait_stream(ALL_REDUCE, COMPUTE)
        work = Collective("all_reduce", bucket.num_bytes, bucket.dtype, self.group.name)
        bucket.reduce_event = builder.add(
            f"all_reduce bucket {bucket.number}", ALL_REDUCE, work, overhead="ddp_bucket"
        )

    def end_backward(self) -> None:
        """finalize_backward: wait for each bucket and copy it back."""
        if not self._is_syncing:
            return
        for bucket in self._buckets:
            self.builder.stream_wait(COMPUTE, bucket.reduce_event)
            if not self.has_views:
                size = bucket.num_bytes
                self.builder.kernels(
                    f"copy from bucket {bucket.number}",
                    move_kernels(size, size, launches=bucket.num_parameters),
                )

    # -- optimizer ----------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        """Clip and update the parameters of all stages of the rank. The norm is summed over the pipeline."""
        if self.strategy.optimizer_in_backward:
            return
        tensors = [tensor for chunk in self.stage_hooks for tensor in chunk.updated]
        for dtype, same_type in group_by_type(tensors, self.training.stored_dtype).items():
            numels = [tensor.numel for tensor in same_type]
            clip_gradients(self.builder, self.training, numels, ((PIPELINE, 4),), dtype=dtype)
        update(self.builder, self.training, tensors)
        if not self.has_views:
            self.builder.free("gradients", sum(chunk.gradient_bytes for chunk in self.stage_hooks))


class DdpHooks(FrameworkHooks[DdpConfig]):
    """DDP's buckets do not depend on the number of ranks."""

    is_independent_of_ranks = True
    pages_optimizer_states = True

    def make(self, stage: Stage, config: DdpConfig) -> Hooks:
        return DdpSchedule(stage, config)

    def pipeline(self, config: DdpConfig, parallelism: ParallelismConfig) -> TorchRuntime:
        return TorchRuntime(parallelism)

    def moments(self, state: BetweenSteps) -> Iterable[JobMoment]:
        return replicated_moments(state)


HOOKS = DdpHooks()
