"""ZeRO-3's gradients: collected in a bucket, reduced to their shards, added up.

Transcribed from DeepSpeed 0.19.8 `runtime/zero/stage3.py`. The reduction of quantised gradients is
`zsim.frameworks.deepspeed.zeropp.quantized_reduce`.
"""

from __future__ import annotations

from typing import ClassVar

from zsim.cost.kernels.update import accumulate_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.errors import InputError
from zsim.frameworks.deepspeed.engine import DeepSpeedEngine
from zsim.frameworks.deepspeed.optimizer_groups import optimizer_groups
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage3.bucket import GradientBucket, reduce_scatter_coalesced
from zsim.frameworks.deepspeed.stage3.fetch_trace import trace_of
from zsim.frameworks.deepspeed.stage3.offload import Zero3OffloadedStates
from zsim.frameworks.deepspeed.stage3.parameter_store import ParameterStore
from zsim.frameworks.deepspeed.stage3.super_offload import SuperOffloadedStates
from zsim.frameworks.deepspeed.stage3.synchronized_gather import (
    all_reduce_bucket,
    reduce_scatter_per_parameter,
)
from zsim.frameworks.deepspeed.zeropp.quantized_reduce import QuantizedReducer
from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Group
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import ModuleCall

MAX_EVENTS = 2  # fetches, and reductions, in flight before the host blocks


class Zero3Gradients(DeepSpeedEngine):
    """DeepSpeedZeroOptimizer_Stage3's gradient hooks, over the ranks of `group`, which shard the states.

    `store` holds the shards of the parameters. `offload` is the memory of offloaded masters, moments and
    gradients.
    """

    offloaded_states: ClassVar[type[Zero3OffloadedStates]] = Zero3OffloadedStates

    def __init__(self, stage: Stage, config: DeepSpeedConfig) -> None:
        super().__init__(stage, config)
        self.group = self._make_group()
        self.world_size = self.group.size
        expert_ranks = 0 if stage.experts is None else stage.expert_group().size
        self.trace = trace = trace_of(stage.workload, self.zero, self.world_size, expert_ranks)
        leaf, units = self.zero.leaf_module, trace.parameters_per_unit
        missing = [name for name in leaf.names if name not in units]
        missing += [end for end in leaf.name_suffixes if not any(unit.endswith(end) for unit in units)]
        if missing:
            where = f"{config.name}: zero_optimization.leaf_module"
            stage.builder.notes.append(f"{where}: no module with parameters: {', '.join(missing)}; no effect")
        self.reduce_bytes = DTYPE_BYTES[config.communication_dtype]
        self.reduce_stream = "reduce_scatter" if self.zero.overlap_comm else COMPUTE
        self.sub_groups = self._make_sub_groups()
        self.store = ParameterStore(
            stage.builder, trace, self.sub_groups, config, is_single_rank=self.world_size == 1
        )
        self.offload: Zero3OffloadedStates | None = None
        if self.zero.offload_optimizer is not None:
            is_super = self.zero.offload_optimizer.super_offload and not self.zero.is_mics
            self.offload = (SuperOffloadedStates if is_super else self.offloaded_states)(
                stage, config, self.store, self.reduce_stream,
                ratio=self._offload_ratio(self.zero.offload_optimizer.ratio),
            )  # fmt: skip
        self.quantized = self._make_quantized()
        self._reduce_events: list[int] = []
        self._bucket = GradientBucket()
        self._number_of = {parameter.name: number for number, parameter in enumerate(trace.parameters)}
        self._micro_batch, self._is_boundary = 0, True

    def _make_group(self) -> Group:
        """The ranks that shard the states: all ranks."""
        return self.stage.group()

    def _offload_ratio(self, ratio: float) -> float:
        """The fraction of the sub-groups that is offloaded, where the configuration says `ratio`."""
        return ratio

    def _make_quantized(self) -> QuantizedReducer | None:
        """The reducer of qgZ, or None without qgZ and on a single node."""
        if not self.zero.zero_quantized_gradients or self.world_size <= self.config.gpus_per_node:
            return None
        return QuantizedReducer(self.stage, self.trace, self.config, self.reduce_stream, self.group)

    def _make_sub_groups(self) -> list[list[int]]:
        """The sub-groups: parameters in order, those of experts last, with a new sub-group once local
        elements reach `sub_group_size`. Muon sorts its matrices by shape, the largest first. Those of a model
        built under `deepspeed.zero.Init` have no shape yet.
        """
        named = self.stage.workload.model.named_parameters()
        sub_groups = []
        self.num_matrix_groups = 0  # sub-groups of Muon's matrices, which come first
        for group in optimizer_groups(self.stage, self.group, named):
            names = group.numels.keys()
            numbers = [
                number for number, parameter in enumerate(self.trace.parameters) if parameter.name in names
            ]
            if group.has_matrices and not self.config.zero_init:
                numbers.sort(key=lambda number: self.trace.parameters[number].shape, reverse=True)
            sub_groups += self._split_into_sub_groups(numbers)
            self.num_matrix_groups = len(sub_groups) if group.has_matrices else self.num_matrix_groups
        return sub_groups

    def _split_into_sub_groups(self, numbers: list[int]) -> list[list[int]]:
        groups: list[list[int]] = [[]]
        total = 0
        for number in numbers:
            if total >= self.zero.sub_group_size:
                groups.append([])
                total = 0
            groups[-1].append(number)
            total += self.trace.parameters[number].shard_numel
        return groups

    def begin_backward(self, micro_batch: int, *, is_last: bool, schedule_manages_sharding: bool) -> None:
        if schedule_manages_sharding:
            raise InputError(
                f"{self.config.name}: zero_optimization.stage: found 3 under a pipeline, expected 0 or 1; "
                "DeepSpeed refuses it"
            )
        self._micro_batch, self._is_boundary = micro_batch, is_last
        if self.offload is not None and micro_batch == 0:
            self.offload.begin_step()

    def gradient_ready(self, call: ModuleCall) -> None:
        super().gradient_ready(call)
        for parameter in reversed(call.trainable_parameters):
            self._add_gradient(self._number_of[call.parameter_name(parameter)], call.name)

    def _add_gradient(self, number: int, name: str) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads and __add_grad_to_ipg_bucket."""
        builder, bucket, zero = self.builder, self._bucket, self.zero
        numel = self.trace.parameters[number].numel
        size = numel * self.param_bytes
        builder.allocate("buffers", size, stream=COMPUTE)
        belongs_to = self.trace.parameters[number].belongs_to
        has_other_ranks = bucket.belongs_to != belongs_to
        if bucket.elements and (has_other_ranks or bucket.elements + numel > zero.reduce_bucket_size):
            self._reduce()
            bucket = self._bucket
        bucket.belongs_to = belongs_to
        builder.host(f"gradient of {name}", overhead="deepspeed_gradient_hook", module=name)
        if self.reduce_stream != COMPUTE:
            builder.wait_stream(self.reduce_stream, COMPUTE)
        if zero.contiguous_gradients and bucket.elements + numel <= zero.reduce_bucket_size:
            reduced_bytes = numel * self.reduce_bytes
            copy_event = builder.move(
                f"bucket {name}", size, reduced_bytes, stream=self.reduce_stream, module=name
            )
            builder.free_when_done("buffers", size, copy_event)
        else:
            bucket.loose_bytes += size
        bucket.elements += numel
        bucket.shard_elements += self.trace.parameters[number].shard_numel
        bucket.parameters.append(number)

    def _reduce(self) -> None:
        """__reduce_and_partition_ipg_grads: reduce-scatter the bucket, add the shard to the gradients."""
        builder, bucket, config, stream = self.builder, self._bucket, self.config, self.reduce_stream
        if not bucket.elements:
            return
        group = builder.groups[bucket.belongs_to or self.group.name]
        if len(self._reduce_events) > MAX_EVENTS:
            builder.host_wait(self._reduce_events.pop(0))
        builder.host("reduce bucket", overhead="deepspeed_reduce")
        if self.zero.enable_sanity_checks and self.world_size > 1:
            for count in (1, bucket.num_tensors):  # the number of ids, then the ids, compared on the host
                check = builder.collective("broadcast", 8 * count, "int64", self.group.name, stream=stream)
                builder.host_wait(check)
        keeps_buffer = (
            self.zero.contiguous_gradients
            and bucket.elements <= self.zero.reduce_bucket_size
            and not self.zero.reduce_scatter
        )
        temporary_bytes, size = 0, bucket.elements * self.reduce_bytes
        if bucket.belongs_to and group.size == 1:
            builder.move("average bucket", size, size, stream=stream)
        elif self.world_size > 1 and keeps_buffer:
            builder.move("average bucket", size, size, stream=stream)
            builder.collective("all_reduce", size, config.communication_dtype, group.name, stream=stream)
        elif self.quantized is not None:
            temporary_bytes = self.quantized.reduce(bucket.parameters)
        elif self.world_size > 1 and config.fetches_one_by_one and not self.zero.contiguous_gradients:
            temporary_bytes = all_reduce_bucket(
                builder,
                size,
                bucket.num_tensors,
                dtype=config.communication_dtype,
                group=self.group.name,
                stream=stream,
            )
        elif self.world_size > 1 and config.fetches_one_by_one:
            builder.move("average bucket", size, size, stream=stream)
            reduce_scatter_per_parameter(
                builder,
                self.trace,
                bucket.parameters,
                dtype=config.communication_dtype,
                group=self.group.name,
                stream=stream,
            )
        elif self.world_size > 1:
            temporary_bytes = reduce_scatter_coalesced(
                builder,
                elements=bucket.elements,
                shard_elements=bucket.shard_elements,
                num_tensors=bucket.num_tensors,
                dtype=config.communication_dtype,
                group=group.name,
                stream=stream,
            )
            if bucket.belongs_to:  # summed over fewer ranks than it is averaged over
                shards = bucket.shard_elements * self.reduce_bytes
                builder.move("scale gradients", shards, shards, bucket.num_tensors, stream=stream)
        done = self._keep_shards(bucket)
        builder.free_when_done("buffers", temporary_bytes + bucket.loose_bytes, done)
        self._reduce_events.append(done)
        self._bucket = GradientBucket()

    def _keep_shards(self, bucket: GradientBucket) -> int:
        """partition_grads: copy the reduced shards into the rank's gradients, or add them. Returns the last
        event.
        """
        config = self.config
        if self.offload is not None:
            return self.offload.keep_gradients(
                bucket, is_first=self._micro_batch == 0, is_boundary=self._is_boundary
            )
        if self._micro_batch == 0:
            size = bucket.shard_elements * DTYPE_BYTES[config.grad_accum_dtype]
            reduced_bytes = bucket.shard_elements * self.reduce_bytes
            return self.builder.move(
                "partition gradients", reduced_bytes, size, bucket.num_tensors, stream=self.reduce_stream
            )
        kernels = accumulate_kernels(
            bucket.shard_elements, config.grad_accum_dtype, config.communication_dtype
        )
        return self.builder.kernels("partition gradients", kernels, stream=self.reduce_stream)

    def end_backward(self) -> None:
        """independent_gradient_partition_epilogue: reduce the last bucket, then make the host wait for it."""
        self._reduce()
        self.builder.host_wait(self.builder.record(self.reduce_stream))
        self.builder.host("end of backward")
        self._reduce_events = []
