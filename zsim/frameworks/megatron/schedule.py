"""Megatron's data parallelism: gradients in one buffer, which is all-reduced, or reduce-scattered for the
distributed optimizer, which is sharded over the ranks and all-gathers the parameters.

Transcribed from Megatron-Core 0.12 `core/distributed/distributed_data_parallel.py` and
`param_and_grad_buffer.py` and, before release 2.6, Megatron-LM 8aa4619f
`megatron/model/distributed.py` (local DDP).

# [Note: where a gradient goes]
With `fuses_accumulation` the product that computes a weight's gradient adds it to the buffer directly; all
other gradients come from autograd in the parameters' type, and a hook adds them. Left out: the zeros that the
fused head returns for a tied weight on one stage (`zero_out_wgrad` in models/common/language_module and
tensor_parallel/layers.py), vocabulary times width elements of the parameters' type, which autograd holds
until the embedding's gradient and adds to it. The bucket of the model's
last parameters is ready first. Only the last micro-batch reduces.

# [Note: two overlaps]
With `overlap_grad_reduce` a bucket is reduced as soon as its last gradient is ready, and backward ends when
all buckets are reduced. With `overlap_param_gather` the first module that needs a bucket of parameters waits
for it, and then starts the gather of the next bucket: at most one gather is ahead. Without the two options
gradients are reduced after backward and parameters gathered after the update, without overlap. NCCL runs the
calls of one group in order. In a pipeline only the first stage has several buckets (the chunk 0 of rank 0:
`disable_bucketing` in training.py); where the schedule says when a stage reduces, its backward does not.

# [Note: two buffers]
Routed experts that are spread over ranks have a buffer and buckets of their own, reduced over the ranks that
hold the same ones and averaged as all gradients are (`expert_parallel_buffers`, core 0.16.1
core/distributed/distributed_data_parallel.py). Their norm is summed with the others' where each rank owns a
part of all gradients, else over the ranks of one set of experts.

# [Note: sums behind the reductions]
`finalize_model_grads` of Megatron-Core 0.16.1 (core/distributed/finalize_model_grads.py): after all buckets
are reduced, the gradients of what sequence parallelism computes on a part of the tokens (norms, biases) are
joined for one all-reduce over the tensor group; then the whole gradient of an embedding that the first and
the last stage share is all-reduced between them.

# [Note: the comparison of norms]
`--test-mode` of Megatron-Core compares norms in every layer. `SelfAttention.run_realtime_tests` (Megatron-LM
d98e8a64, megatron/core/transformer/attention.py), in each forward of a layer whose queries and keys have
norms, also where it is recomputed: their weights and biases, put together, are gathered over the data
parallel group and then over the tensor parallel one, and each of every rank's is compared with the rank's
own: equality, whether all are, and the host waits for the answer.
"""

from __future__ import annotations

from collections.abc import Hashable

from zsim.cost.kernels.update import (
    accumulate_kernels,
    cat_launches,
    fill_kernels,
    norm_kernels,
)
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.megatron.buffer import (
    Bucket,
    Fp8Weights,
    GroupBuffer,
    make_layout,
    owned_numels,
    quantize_masters,
)
from zsim.frameworks.megatron.host_time import enter_block, enter_chunk, enter_experts
from zsim.frameworks.megatron.hybrid_optimizer import hybrid_states, update_on_two_devices
from zsim.frameworks.megatron.optimizer_step import state_sizes, update_parameters
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.operations.operation import Role
from zsim.plan.builder import COMPUTE, PlanBuilder, move_kernels, read_scalar
from zsim.plan.hooks import BlockTimedHooks
from zsim.plan.ops import CollectiveKind, Group, Memory
from zsim.plan.shared.optimizer import frozen_bytes, partition_states
from zsim.plan.shared.shared_gradients import TiedGradient, sum_partial_gradients, sum_tied_gradient
from zsim.plan.stage import EXPERT_STAGES, WORLD, Stage
from zsim.plan.workload.workload import ModuleCall, Segment, Workload
from zsim.specs.model.spec import Parameter
from zsim.specs.strategy.parallelism import TENSOR

_PAIR = 2  # the norms of queries and of keys have parameters alike

NCCL = "data parallel"


class MegatronSchedule(BlockTimedHooks):
    """DistributedDataParallel's hooks. See the module's notes."""

    runs_reference_first = True  # ms-swift 4.6 megatron/trainers/dpo_trainer.py `forward_step`

    def __init__(self, stage: Stage, strategy: MegatronConfig) -> None:
        super().__init__(stage)
        workload = stage.workload
        self.workload, self.strategy, self.training = workload, strategy, stage.training
        self.replicas = strategy.optimizer_instances
        self.ranks = stage.ranks // self.replicas
        self.shard = self.full_group = stage.group("data", self.ranks)
        self.replicate: Group | None = None
        if self.replicas > 1:
            self.full_group = stage.group()  # get_grad_stats_parallel_group
            if not strategy.has_whole_tensor_owners:
                self.replicate = stage.group("replicate", self.replicas, stride=self.ranks)
        self.param_bytes = DTYPE_BYTES[strategy.param_dtype]
        self.grad_bytes = DTYPE_BYTES[strategy.grad_dtype]
        self._named = {
            name: parameter for name, parameter in workload.model.named_parameters() if parameter.trainable
        }
        self._numels = {
            name: parameter.numel for name, parameter in self._named.items() if not parameter.rank_kind
        }
        self._frozen_bytes = frozen_bytes(workload, strategy.param_dtype)
        self.fp8_weights = Fp8Weights(workload.model, self.training, is_primary=strategy.fp8_param_gather)
        is_bucketed = stage.number == 0  # only chunk 0 of pipeline rank 0: see [Note: two overlaps]
        self.buffers = self.make_buffers(strategy.bucket_size if is_bucketed else None)
        self.buckets = [bucket for buffer in self.buffers for bucket in buffer.layout.buckets]
        self._buffer_of = {
            bucket.number: buffer for buffer in self.buffers for bucket in buffer.layout.buckets
        }
        self._owned_numels = owned_numels(list(self._numels.values()), self.ranks)
        self._bucket_of = {name: bucket for bucket in self.buckets for name in bucket.names}
        self._missing: dict[int, int] = {}
        self._reduced: list[int] = []
        self._is_reduced: set[int] = set()  # buckets
        self._joined: tuple[Bucket, int] | None = None  # reduced during backward, not copied back yet
        self._gathers: dict[int, int] = {}  # by bucket, the event of its parameters
        self._ready: set[int] = set()  # buckets whose parameters compute has waited for
        self._micro_batch, self._is_last, self._schedule_reduces = 0, True, False
        self._tied = TiedGradient(self.builder, strategy.param_dtype)
        self._last_users = _last_users(workload)
        self._waiting: dict[str, tuple[ModuleCall, Parameter]] = {}  # by the module of the weight

    def make_buffers(self, bucket_size: int | None) -> list[GroupBuffer]:
        """The buffers. See [Note: two buffers]."""
        is_sharded = self.strategy.distributed_optimizer and not self.strategy.is_nanotron
        dense = make_layout(self._numels, bucket_size, self.ranks, is_sharded=is_sharded)
        buffers = [GroupBuffer(dense, self.ranks, self.shard, self.full_group, self.replicate)]
        experts = {name: parameter.numel for name, parameter in self._named.items() if parameter.rank_kind}
        first = len(dense.buckets)
        return [*buffers, self._expert_buffer(experts, bucket_size, first)] if experts else buffers

    def _expert_buffer(self, numels: dict[str, int], bucket_size: int | None, first: int) -> GroupBuffer:
        """The routed experts' own buffer, reduced over the ranks that hold the same ones."""
        stage, strategy = self.stage, self.strategy
        assert stage.experts is not None
        ranks = stage.experts.size // self.replicas
        shard = full_group = stage.expert_group(size=ranks)
        replicate = None
        if self.replicas > 1:
            full_group = stage.expert_group("expert_whole")
            replicate = stage.expert_group("expert_replicate", self.replicas, ranks)
        layout = make_layout(
            numels, bucket_size, ranks, is_sharded=strategy.distributed_optimizer, first=first
        )
        return GroupBuffer(layout, ranks, shard, full_group, replicate, holds_experts=True)

    def action_state(self, micro_batch: int) -> Hashable | None:
        """The gathered and the reduced buckets, and the gradients that wait. Without a contiguous buffer the
        first micro-batch allocates the gradients.
        """
        if not self.strategy.is_contiguous or self._joined is not None:
            return None
        gathered = frozenset(self._ready), frozenset(self._gathers)
        return gathered, len(self._reduced), frozenset(self._is_reduced), self._tied.held_numel

    # -- sizes ------------------------------------------------------------------------------------------

    @property
    def _numel(self) -> int:
        """Elements of all buffers."""
        return sum(buffer.layout.numel for buffer in self.buffers)

    @property
    def _gathers_ahead(self) -> bool:
        return self.strategy.overlap_param_gather and any(buffer.ranks > 1 for buffer in self.buffers)

    @property
    def own_numels(self) -> list[int]:
        """Elements of each tensor that the first rank updates, or one total of the tensors' largest owner."""
        if self.strategy.has_whole_tensor_owners:
            return [max(self._owned_numels)]
        if self.strategy.distributed_optimizer:
            return [numel for buffer in self.buffers for numel in buffer.layout.pieces(buffer.ranks)[0]]
        return [end - start for buffer in self.buffers for start, end in buffer.registration_order()]

    def resident(self) -> list[Memory]:
        """Parameters, gradients, fp32 masters of 16-bit ones, moments that the first update allocates."""
        numels, strategy = self.own_numels, self.strategy
        trained_numel = self.workload.model.trainable_numel
        parameters = self._numel if strategy.distributed_optimizer else trained_numel
        master = 0 if strategy.param_dtype == "fp32" else 4 * sum(numels)
        lazy = tuple(size for numel in numels for size in partition_states(self.training, numel, "fp32"))
        states = strategy.precision_aware
        if states is not None:
            lazy = state_sizes(states, numels)
            master = 0 if states.has_masters else master
        quantized = self.fp8_weights
        optimizer = [
            Memory("optimizer_states", master),
            Memory("optimizer_states", sum(lazy), lazy_tensors=lazy),
        ]
        if strategy.offload is not None:
            optimizer = hybrid_states(strategy, numels)
        return [
            Memory("parameters", parameters * self.param_bytes + self._frozen_bytes - quantized.saved_bytes),
            Memory("gradients", self._numel * self.grad_bytes if strategy.is_contiguous else 0),
            *optimizer,
            *([Memory("buffers", quantized.copy_bytes)] if quantized.copy_bytes else []),
        ]

    # -- parameters -------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """zero_grad_buffer."""
        if self.strategy.is_contiguous:
            self.builder.kernels("zero gradients", fill_kernels(self._numel * self.grad_bytes))

    def pre_module(self, call: ModuleCall) -> None:
        """The forward pre-hook: finish_param_sync."""
        enter_experts(self.builder, self.strategy, self.stage.parallelism, call)
        if not self._gathers_ahead or self.builder.phase != "forward":
            return
        for parameter in call.trainable_parameters:
            number = self._bucket_of[call.parameter_name(parameter)].number
            if number in self._ready:
                continue
            self._gather(number)
            if number in self._gathers:
                self.builder.stream_wait(COMPUTE, self._gathers[number])
                self.receive(self.buckets[number])
            self._ready.add(number)
            if number > self._buffer_of[number].layout.buckets[0].number:
                self._gather(number - 1)

    def _gather(self, number: int) -> None:
        """start_param_sync, once per bucket and step."""
        if number in self._gathers or self._buffer_of[number].ranks == 1:
            return
        self.builder.wait_stream(NCCL, COMPUTE)
        self._gathers[number] = self.gather(self.buckets[number], NCCL)

    def receive(self, bucket: Bucket) -> None:
        """The use of a gathered bucket by computation."""

    def _broadcast(self) -> None:
        """InternEvo's broadcast_params: a broadcast from each owner. Then the host waits for the device."""
        for number, numel in enumerate(self._owned_numels):
            self.builder.collective(
                "broadcast", numel * self.param_bytes, self.strategy.param_dtype, self.shard.name,
                stream=COMPUTE, name=f"broadcast of owner {number}",
            )  # fmt: skip
        self.builder.host_wait(self.builder.record(COMPUTE))

    def gather(self, bucket: Bucket, stream: str) -> int:
        """Issue the all-gather of a bucket's parameters and return its event."""
        size = bucket.numel * self.param_bytes - self.fp8_weights.ungathered_bytes(bucket.names)
        size = -(-size // self.ranks) * self.ranks
        name = f"all_gather parameters {bucket.number}"
        dtype = self.fp8_weights.gathered_dtype(self.strategy.param_dtype)
        group = self._buffer_of[bucket.number].shard.name
        return self.builder.collective("all_gather", size, dtype, group, stream=stream, name=name)

    # -- layers -----------------------------------------------------------------------------------------

    def post_module(self, call: ModuleCall) -> None:
        run_realtime_tests(self.builder, self.strategy, call, self.full_group)

    def begin_forward(self, micro_batch: int) -> None:
        enter_chunk(self.builder, self.strategy, self.stage.parallelism)

    def pre_forward(self, segment: Segment) -> None:
        enter_block(self.builder, self.strategy, self.stage.parallelism, segment, 1)

    def pre_backward(self, segment: Segment) -> None:
        passes = 2 if segment.is_checkpointed else 1
        enter_block(self.builder, self.strategy, self.stage.parallelism, segment, passes)

    # -- gradients --------------------------------------------------------------------------------------

    def begin_backward(self, micro_batch: int, *, is_last: bool, schedule_manages_sharding: bool) -> None:
        self._micro_batch, self._is_last, self._schedule_reduces = (
            micro_batch,
            is_last,
            schedule_manages_sharding,
        )
        enter_chunk(self.builder, self.strategy, self.stage.parallelism)
        self._missing = {bucket.number: len(bucket.names) for bucket in self.buckets}

    def gradient_ready(self, call: ModuleCall) -> None:
        """Add the gradients to the buffer, reduce complete buckets. See [Note: where a gradient goes]."""
        if numel := self._borrowed_gradient_numel(call):
            self._tied.add(call, numel)
        for parameter in reversed(call.trainable_parameters):
            if call.name in self._last_users and parameter.name == "weight":
                self._waiting[call.name] = call, parameter
                if not self._is_fused(call, parameter):
                    self._tied.hold(call.name, parameter.numel)
            else:
                self._finish_gradient(call, parameter)
        lender = call.module.lender
        if lender in self._waiting and self._last_users[lender] == call.name:
            self._tied.release(lender)
            self._finish_gradient(*self._waiting.pop(lender))

    def _borrowed_gradient_numel(self, call: ModuleCall) -> int:
        """Elements of the gradient that a module makes for another's weight, and does not add to the buffer
        itself as a fused product does.
        """
        module = call.module
        if module.role is Role.EMBEDDING:
            return 0 if module.has_weight or module.borrows_frozen else module.op_spec.weight_numel
        return 0 if self.strategy.fuses_accumulation else call.borrowed_gradient_numel

    def _finish_gradient(self, call: ModuleCall, parameter: Parameter) -> None:
        self._add_gradient(call, parameter)
        bucket = self._bucket_of[call.parameter_name(parameter)]
        self._missing[bucket.number] -= 1
        is_due = self._is_last and not self._schedule_reduces and not self._missing[bucket.number]
        if self.strategy.overlap_grad_reduce and is_due:
            self._reduce(bucket, NCCL)

    def _is_fused(self, call: ModuleCall, parameter: Parameter) -> bool:
        is_weight = call.module.role in (Role.PRODUCT, Role.EXPERT_PRODUCT) and parameter.name == "weight"
        return self.strategy.fuses_accumulation and is_weight

    def _add_gradient(self, call: ModuleCall, parameter: Parameter) -> None:
        builder, strategy = self.builder, self.strategy
        if self._is_fused(call, parameter):
            return
        size = parameter.numel * self.param_bytes
        self._tied.finish(call, parameter.numel)
        if not strategy.is_contiguous and self._micro_batch == 0:
            builder.allocate("gradients", size)
            return
        builder.allocate("buffers", size)
        sum_dtype = strategy.grad_dtype if strategy.is_contiguous else strategy.param_dtype
        kernels = accumulate_kernels(parameter.numel, sum_dtype, strategy.param_dtype)
        hook = "megatron_gradient_hook" if strategy.is_contiguous else None
        builder.kernels(f"add gradient {call.name}", kernels, overhead=hook, module=call.name)
        builder.free("buffers", size)

    def reduce_gradients(self) -> None:
        """start_grad_sync of a stage, where the schedule says."""
        for bucket in self.buckets:
            self._reduce(bucket, NCCL)

    def unshard(self) -> None:
        """start_param_sync of a stage, where the schedule says."""
        for bucket in reversed(self.buckets) if self._gathers_ahead else ():
            self._gather(bucket.number)

    def finish_gradients(self) -> None:
        """Run `finalize_model_grads` at the end of all schedules. See [Note: sums behind the reductions]."""
        for chunk in self.stage_hooks:
            chunk.finish_reductions()
        sum_partial_gradients(self.builder, self.stage_hooks, self.strategy.grad_dtype)
        for chunk in self.stage_hooks:
            sum_tied_gradient(chunk.stage, self.strategy.grad_dtype)

    def finish_reductions(self) -> None:
        """finish_grad_sync."""
        stream = NCCL if self.strategy.overlap_grad_reduce else COMPUTE
        for bucket in self.buckets:
            if bucket.number not in self._is_reduced:
                self._reduce(bucket, stream)
        self._copy_back()
        for event in self._reduced:
            self.builder.stream_wait(COMPUTE, event)
        self._reduced = []

    def _reduce(self, bucket: Bucket, stream: str) -> None:
        """start_grad_sync of one bucket."""
        self._is_reduced.add(bucket.number)
        buffer = self._buffer_of[bucket.number]
        if buffer.ranks * self.replicas == 1 and not buffer.holds_experts:
            return
        if not self.strategy.is_contiguous:
            self._reduce_joined(bucket, stream)
            return
        builder, strategy, size = self.builder, self.strategy, bucket.numel * self.grad_bytes
        builder.host("reduce bucket", overhead="ddp_bucket")
        if strategy.checks_nan:
            builder.kernels("bucket norm", norm_kernels(bucket.numel, strategy.grad_dtype, 1))
            read_scalar(builder, "bucket norm", "fp32", [])
        if not strategy.average_in_collective:
            builder.kernels("average bucket", move_kernels(size, size))
        if buffer.ranks * self.replicas == 1:
            return
        builder.wait_stream(stream, COMPUTE)
        if not self._scatters:
            self._reduced.append(self._all_reduce(bucket, stream))
            return
        if buffer.ranks > 1:
            self._sum("reduce_scatter", size, buffer.shard, stream, f"reduce_scatter bucket {bucket.number}")
        if buffer.replicate is not None:
            shard, name = size // buffer.ranks, f"all_reduce shard of bucket {bucket.number}"
            self._sum("all_reduce", shard, buffer.replicate, stream, name)

    def _sum(self, kind: CollectiveKind, size: int, group: Group, stream: str, name: str) -> None:
        dtype = self.strategy.grad_dtype
        event = self.builder.collective(kind, size, dtype, group.name, stream=stream, name=name)
        self._reduced.append(event)

    @property
    def _scatters(self) -> bool:
        strategy = self.strategy
        return strategy.distributed_optimizer and not (
            strategy.has_whole_tensor_owners or strategy.is_nanotron
        )

    def _all_reduce(self, bucket: Bucket, stream: str) -> int:
        size, dtype = bucket.numel * self.grad_bytes, self.strategy.grad_dtype
        name, group = f"all_reduce bucket {bucket.number}", self._buffer_of[bucket.number].full_group.name
        return self.builder.collective("all_reduce", size, dtype, group, stream=stream, name=name)

    def _reduce_joined(self, bucket: Bucket, stream: str) -> None:
        """allreduce_params of local DDP: concatenate, all-reduce while the host waits, average, copy back. On
        a separate stream InternEvo's `_reduce_grads_by_rank`: copy a bucket back after the next is issued.
        """
        builder, size = self.builder, bucket.numel * self.grad_bytes
        builder.allocate("buffers", size)
        launches = cat_launches(len(bucket.names))
        builder.kernels("join gradients", move_kernels(size, size, launches=launches))
        builder.wait_stream(stream, COMPUTE)
        event = self._all_reduce(bucket, stream)
        self._copy_back()
        self._joined = bucket, event
        if stream == COMPUTE:
            builder.host_wait(event)
            if not self.strategy.average_in_collective:
                builder.kernels("average gradients", move_kernels(size, size))
            self._copy_back()

    def _copy_back(self) -> None:
        if self._joined is None:
            return
        bucket, event = self._joined
        size = bucket.numel * self.grad_bytes
        self.builder.stream_wait(COMPUTE, event)
        self.builder.kernels("copy gradients back", move_kernels(size, size, launches=len(bucket.names)))
        self.builder.free("buffers", size)
        self._joined = None

    # -- step -------------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        strategy = self.strategy
        numels = [numel for chunk in self.stage_hooks for numel in chunk.own_numels]
        issue = update_parameters if strategy.offload is None else update_on_two_devices
        issue(self.builder, strategy, self.training, numels, self.norm_groups)
        if strategy.fp8_param_gather:
            weights = [chunk.fp8_weights for chunk in self.stage_hooks]
            quantize_masters(self.builder, self.training, weights, self.ranks, self.shard.name)
        for chunk in self.stage_hooks:
            chunk.finish_update()

    def finish_update(self) -> None:
        """Gather the updated parameters, where nothing gathers them later."""
        strategy = self.strategy
        if strategy.distributed_optimizer and not self._gathers_ahead:
            if strategy.has_whole_tensor_owners and self.ranks > 1:
                self._broadcast()
            elif not strategy.has_whole_tensor_owners:
                for bucket in self.buckets:
                    if self._buffer_of[bucket.number].ranks > 1:
                        self.gather(bucket, COMPUTE)
        if not strategy.is_contiguous:
            self.builder.free("gradients", self.workload.model.trainable_numel * self.grad_bytes)

    @property
    def norm_groups(self) -> list[str]:
        """The groups over which norm and overflow are reduced: all ranks where each owns a part of the
        gradients, else the ranks of one model, and of one set of its experts (d98e8a64 optimizer/__init__.py
        `_get_param_groups`: stages without experts have an optimizer for them, too).
        """
        if self.strategy.shards_states:
            return [WORLD] if WORLD in self.builder.groups else [self.full_group.name]
        has_expert_stages = EXPERT_STAGES in self.builder.groups and self.stage.trains_experts
        return [*self.stage.norm_groups(), *([EXPERT_STAGES] if has_expert_stages else [])]


def run_realtime_tests(
    builder: PlanBuilder, strategy: MegatronConfig, call: ModuleCall, data_group: Group
) -> None:
    """Issue the comparison after the norm of the keys, if the layer has one. `data_group` is the
    data-parallel ranks.
    """
    is_forward = builder.phase in ("forward", "reference", "recompute")
    if not (strategy.test_mode and is_forward and call.name.endswith("k_layernorm")):
        return
    dtype = strategy.param_dtype
    sizes = _PAIR * [parameter.numel * DTYPE_BYTES[dtype] for parameter in call.module.parameters]
    total = sum(sizes)
    builder.kernels("stack norms", move_kernels(total, total))
    for group in (data_group, builder.groups.get(TENSOR)):
        ranks = 1 if group is None else group.size
        if group is not None and ranks > 1:
            builder.collective(
                "all_gather", ranks * total, dtype, group.name, stream=COMPUTE, name="all_gather norms"
            )
        builder.kernels("copy gathered norms", move_kernels(ranks * total, ranks * total, launches=ranks))
        for _ in range(ranks):
            for size in sizes:
                builder.kernels(
                    "compare norms", move_kernels(2 * size, size, launches=3), overhead="module_call"
                )
                read_scalar(builder, "whether norms are equal", dtype, [])


def _last_users(workload: Workload) -> dict[str, str]:
    """The first user of each weight whose own module is behind it, by that module. Its backward is last."""
    users: dict[str, str] = {}
    names: set[str] = set()
    for call in (call for segment in workload.segments for call in segment.calls):
        if call.module.lender and call.module.lender not in names:
            users.setdefault(call.module.lender, call.name)
        names.add(call.name)
    return users
