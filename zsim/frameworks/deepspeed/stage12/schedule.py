"""DeepSpeed ZeRO stages 1 and 2: whole parameters, sharded optimizer states, sharded gradients in stage 2.

Transcribed from DeepSpeed 0.19.8 `runtime/zero/stage_1_and_2.py`. With its default settings a bucket is
all-reduced (`use_multi_rank_bucket_allreduce`), not reduce-scattered, so these stages send 3 times the
parameters per step, where the ZeRO paper says 2.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import cached_property

from zsim.cost.kernels.update import accumulate_kernels, cast_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.errors import InputError
from zsim.frameworks.deepspeed.engine import DeepSpeedEngine
from zsim.frameworks.deepspeed.muon import momentum_bytes, muon_shapes, orthogonalise_partition
from zsim.frameworks.deepspeed.norm_and_overflow import check_overflow, compute_norm_and_clip
from zsim.frameworks.deepspeed.optimizer_groups import OptimizerGroup, optimizer_groups
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage12.offload import Zero12OffloadedStates
from zsim.frameworks.deepspeed.stage12.partition_owners import FlatGroup, FlatGroups
from zsim.frameworks.deepspeed.stage12.reduce import BucketReducer
from zsim.plan.builder import COMPUTE, move_kernels
from zsim.plan.ops import Category, Memory
from zsim.plan.shared.optimizer import frozen_bytes, partition_states
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import ModuleCall
from zsim.specs.model.spec import Parameter

_ALIGNMENT = 2  # elements per rank, nccl_start_alignment_factor


class Zero12Schedule(DeepSpeedEngine):
    """DeepSpeedZeroOptimizer's gradient hooks (`reduce_independent_p_g_buckets_and_remove_grads`). `offload`
    is the host memory of offloaded gradients, masters and moments.
    """

    def __init__(self, stage: Stage, config: DeepSpeedConfig) -> None:
        super().__init__(stage, config)
        self.group = stage.group()
        workload = stage.workload
        self.partitions_gradients = config.stage == 2
        self.reduce_stream = "reduce" if self.zero.overlap_comm else COMPUTE
        self._is_boundary, self._schedule_reduces = True, False
        self._micro_batch = 0
        self._elements = 0  # in the bucket
        self._tensors: list[str] = []
        self._loose_bytes = 0
        named = list(workload.model.named_parameters())
        self._numels = {name: parameter.numel for name, parameter in named if parameter.trainable}
        self._shapes = {name: parameter.shape for name, parameter in named}
        self._frozen_bytes = frozen_bytes(workload, config.param_dtype)
        self._matrices = muon_shapes(workload.model, config) if config.optimizer.by_head else self._shapes
        self._groups = [self._sort_matrices(group) for group in optimizer_groups(stage, self.group, named)]
        self._flats = [self._flatten(group) for group in self._groups]
        self.shard_numel = sum(flat.shard_numel for flat in self._flats)
        self._release = config.release
        self._reducer = BucketReducer(
            stage.builder, config, FlatGroups(self._flats), self.group, self.reduce_stream
        )
        self.offload = self._make_offload() if self.zero.offload_optimizer is not None else None
        self._pending_gradients: set[str] = set()  # parameters whose gradients wait for the boundary

    def _make_offload(self) -> Zero12OffloadedStates:
        return Zero12OffloadedStates(self.stage, self.config, self.shard_numel, self._numels)

    def _sort_matrices(self, group: OptimizerGroup) -> OptimizerGroup:
        """Muon sorts its matrices by shape, the largest first (`MuonWithAuxAdam.__init__`)."""
        if not group.has_matrices:
            return group
        names = sorted(group.numels, key=self._shapes.__getitem__, reverse=True)
        return replace(group, numels={name: group.numels[name] for name in names})

    def _flatten(self, group: OptimizerGroup) -> FlatGroup:
        """Padded to `nccl_start_alignment_factor` elements per rank, and cut into equal parts."""
        ranks = group.group.size
        shard = -(-group.numel // (_ALIGNMENT * ranks)) * _ALIGNMENT
        is_dealt_out = self.zero.round_robin_gradients
        return FlatGroup(group.numels, ranks, shard, is_round_robin=is_dealt_out, group=group.group.name)

    def action_state(self, micro_batch: int) -> Hashable | None:
        """Whether there are gradients to add to, and those that wait. None with offloaded states."""
        if self.offload is not None:
            return None
        waiting = self._elements, tuple(self._tensors), self._loose_bytes, frozenset(self._pending_gradients)
        return micro_batch > 0, waiting

    # -- sizes ------------------------------------------------------------------------------------------

    def resident(self) -> list[Memory]:
        """Whole parameters, and the masters (of fp32 weights too) and optimizer states of the rank's
        partition.
        """
        config = self.config
        if self.offload is not None:
            leftovers = self._master_cast_bytes() if self._release.clones_shards_on_gpu else ()
            return self.offload.resident(self._flat_parameters(), leftovers)
        masters = tuple(flat.shard_numel * DTYPE_BYTES[config.master_weights_dtype] for flat in self._flats)
        moments = tuple(
            size
            for group, flat in zip(self._groups, self._flats, strict=True)
            for size in self._moments(group, flat)
            if size
        )
        is_lazy = self._release.makes_states_in_first_step
        return [
            self._flat_parameters(),
            Memory("optimizer_states", sum(masters), leftovers=self._master_cast_bytes()),
            Memory(
                "optimizer_states",
                sum(moments),
                lazy_tensors=moments if is_lazy else (),
                leftovers=() if is_lazy else masters,
            ),
            Memory("gradients", 0, leftovers=masters if is_lazy else ()),
            *(Memory("buffers", momentum_bytes(flat, config)) for flat in self._matrix_partitions),
        ]

    def _moments(self, group: OptimizerGroup, flat: FlatGroup) -> tuple[int, ...]:
        """Bytes of each state of a group's partition. Muon's matrices have momenta of whole matrices."""
        if group.has_matrices:
            return (momentum_bytes(flat, self.config),)
        return partition_states(self.training, flat.shard_numel, self.config.optimizer_states_dtype)

    @property
    def _matrix_partitions(self) -> list[FlatGroup]:
        """The partition of Muon's matrices, if it has one."""
        pairs = zip(self._groups, self._flats, strict=True)
        return [flat for group, flat in pairs if group.has_matrices]

    def _master_cast_bytes(self) -> tuple[int, ...]:
        """Bytes of the copy of the rank's partition from which masters are cast. () without a cast."""
        is_cast = self.config.param_dtype != self.config.master_weights_dtype
        return tuple(flat.shard_numel * self.param_bytes for flat in self._flats) if is_cast else ()

    def _flat_parameters(self) -> Memory:
        flattened_numels = self._numels.values() if self._release.flattens_on_gpu else ()
        leftovers = tuple(numel * self.param_bytes for numel in flattened_numels)
        padded = sum(flat.shard_numel * flat.world_size for flat in self._flats)
        size = padded * self.param_bytes + self._frozen_bytes
        return Memory("parameters", size, leftovers=leftovers)

    @property
    def _num_buffers(self) -> int:
        return (2 if self.zero.overlap_comm else 1) if self.zero.contiguous_gradients else 0

    @property
    def _gradient_category(self) -> Category:
        """The category of whole gradients: kept by the rank in stage 1, freed after reduction in stage 2."""
        return "buffers" if self.partitions_gradients else "gradients"

    @property
    def _reduces_in_backward(self) -> bool:
        """Whether gradients are reduced in this backward: in stage 2 always, in stage 1 at the boundary with
        overlap_comm."""
        return self.partitions_gradients or (self._is_boundary and self.zero.overlap_comm)

    @property
    def _partition_gradient_bytes(self) -> int:
        return self.shard_numel * DTYPE_BYTES[self.config.grad_accum_dtype]

    @cached_property
    def _overlap_gradient_bytes(self) -> int:
        """Gradient bytes outside of the partition on the fullest rank: gradients that overlap with it are
        kept whole (`copy_grads_in_partition`), unless the accumulation type differs."""
        if self.config.grad_accum_dtype != self.config.param_dtype:
            return 0
        overlap_numel = sum(flat.largest_overlap_numel() for flat in self._flats)
        return max(0, overlap_numel * self.param_bytes - self._partition_gradient_bytes)

    def _free_partition_gradients(self) -> None:
        self.builder.free("gradients", self._partition_gradient_bytes)
        self.builder.free("buffers", self._overlap_gradient_bytes)

    # -- hooks ------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        if self.offload is not None and self.config.delayed_parameter_update:
            self.offload.start_delayed_update()

    def begin_backward(self, micro_batch: int, *, is_last: bool, schedule_manages_sharding: bool) -> None:
        """setup_buckets: allocate the bucket's buffers, in stage 1 from the first backward to the
        boundary."""
        self._micro_batch, self._schedule_reduces = micro_batch, schedule_manages_sharding
        self._is_boundary = is_last and not schedule_manages_sharding
        if not schedule_manages_sharding and (self.partitions_gradients or micro_batch == 0):
            self._make_buckets()
        if self.offload is not None:
            self.offload.begin_backward()

    def _make_buckets(self) -> None:
        size = self._num_buffers * self.zero.reduce_bucket_size * self.param_bytes
        self.builder.allocate("buffers", size)

    def gradient_ready(self, call: ModuleCall) -> None:
        super().gradient_ready(call)
        for parameter in reversed(call.trainable_parameters):
            size = parameter.numel * self.param_bytes
            if self._reduces_in_backward and (self.partitions_gradients or self._micro_batch == 0):
                self.builder.allocate(self._gradient_category, size, stream=COMPUTE)
                self._add_gradient(call.parameter_name(parameter), size)
            else:
                self._keep_gradient(call, parameter, size)

    def _keep_gradient(self, call: ModuleCall, parameter: Parameter, size: int) -> None:
        """Stage 1 accumulates the gradients of micro-batches in `.grad`."""
        name = call.parameter_name(parameter)
        if self._micro_batch == 0:
            self.builder.allocate("gradients", size, stream=COMPUTE)
        else:
            self.builder.allocate("buffers", size, stream=COMPUTE)
            self.builder.kernels(
                f"accumulate {call.name}",
                accumulate_kernels(parameter.numel, self.config.param_dtype, self.config.param_dtype),
                module=call.name,
            )
            self.builder.free("buffers", size)
        if self._reduces_in_backward:
            self._add_gradient(name, size)
        elif self._is_boundary or self._schedule_reduces:
            self._pending_gradients.add(name)

    def _add_gradient(self, name: str, size: int) -> None:
        """Copy a gradient into the bucket, which is reduced first if it would overflow."""
        builder, zero, numel = self.builder, self.zero, self._numels[name]
        module = name.rpartition(".")[0]
        if self._elements + numel > zero.reduce_bucket_size:
            self._reduce()
        builder.host(f"gradient of {module}", overhead="deepspeed_gradient_hook", module=module)
        if zero.contiguous_gradients and numel <= zero.reduce_bucket_size:
            builder.kernels(f"bucket {module}", move_kernels(size, size), module=module)
            builder.free(self._gradient_category, size)
        else:
            self._loose_bytes += size
        self._elements += numel
        self._tensors.append(name)

    def _reduce(self) -> None:
        """reduce_ipg_grads."""
        if not self._elements:
            return
        builder, stream = self.builder, self.reduce_stream
        builder.host("reduce bucket", overhead="deepspeed_reduce")
        if stream != COMPUTE:
            previous = builder.record(stream)
            builder.wait_stream(stream, COMPUTE)
            builder.stream_wait(COMPUTE, previous)  # one reduction in flight: compute waits for the last
        self._reducer.reduce(self._tensors, self._elements)
        done = self._keep_slice(stream)
        self._free_loose(done)
        self._elements, self._tensors = 0, []

    def _keep_slice(self, stream: str) -> int:
        """Offload the rank's slice of a reduced bucket, if states are offloaded. Returns the last event."""
        if self.offload is not None:
            return self.offload.keep_gradients(
                self._tensors, self._elements, stream,
                micro_batch=self._micro_batch, is_boundary=self._is_boundary,
            )  # fmt: skip
        last = self.builder.record(stream)
        assert last is not None
        return last

    def _free_loose(self, done: int) -> None:
        """Free the gradients outside of the buffer, after event `done` of their reduction."""
        self.builder.free_when_done(self._gradient_category, self._loose_bytes, done)
        self._loose_bytes = 0

    def end_backward(self) -> None:
        builder = self.builder
        if not self._reduces_in_backward and self._is_boundary:
            # reduce_gradients visits the groups' parameters in the order of registration, not of backward
            for group in self._groups:
                for name in group.numels:
                    if name in self._pending_gradients:
                        self._add_gradient(name, group.numels[name] * self.param_bytes)
            self._pending_gradients = set()
        if not self._reduces_in_backward and not self._is_boundary:
            return
        self._reduce()
        if self.zero.overlap_comm:
            builder.host_wait(builder.record(self.reduce_stream))
            builder.host_wait(builder.record(COMPUTE))
            builder.host("end of backward")
        if self.offload is None:
            self._keep_partition_gradients()
        if self._is_boundary:
            for flat in self._matrix_partitions:
                orthogonalise_partition(builder, self.config, flat, self._matrices)
        builder.free("buffers", self._num_buffers * self.zero.reduce_bucket_size * self.param_bytes)

    def reduce_gradients(self) -> None:
        """The pipeline engine's `_exec_reduce_tied_grads` and `_exec_reduce_grads`, which allocates the
        bucket itself."""
        key = f"{self.config.name}: zero_optimization"
        if self.partitions_gradients:
            raise InputError(f"{key}.stage: found 2 under a pipeline, expected 0 or 1; DeepSpeed refuses it")
        if self.zero.overlap_comm:
            raise InputError(
                f"{key}.overlap_comm: expected false under a pipeline, where DeepSpeed's stage 1 walks the "
                "gradients only without it (reduce_gradients)"
            )
        self.sum_tied_gradient(self.config.param_dtype)
        self._is_boundary = True
        self._make_buckets()
        self.end_backward()

    def _keep_partition_gradients(self) -> None:
        """averaged_gradients: copy or add the rank's partition to its gradients, in the accumulation type."""
        config = self.config
        size = self._partition_gradient_bytes
        if self._micro_batch == 0 or not self.partitions_gradients:
            self.builder.allocate("gradients", size)
            self.builder.allocate("buffers", self._overlap_gradient_bytes)
            self.builder.kernels("own gradients", move_kernels(self.shard_numel * self.param_bytes, size))
        else:
            kernels = accumulate_kernels(self.shard_numel, config.grad_accum_dtype, config.param_dtype)
            self.builder.kernels("accumulate own gradients", kernels)

    # -- step -------------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        builder, config = self.builder, self.config
        if self.offload is not None:
            self.offload.step(self.group.name)
            self._gather_parameters()
            return
        shards = [flat.shard_numel for flat in self._flats]
        gradients = [numel for flat in self._flats for numel in flat.gradient_parts()]
        check_overflow(self.stage, config, gradients, self.group.name)
        compute_norm_and_clip(
            self.stage, config, shards, self.group.name,
            num_groups=len(shards),
            later_groups=[group.group.name for group in self._groups if group.has_experts],
        )  # fmt: skip
        needs_cast = config.grad_accum_dtype != config.master_weights_dtype
        cast = self.shard_numel * DTYPE_BYTES[config.master_weights_dtype] if needs_cast else 0
        builder.allocate("buffers", cast)
        if cast:
            kernels = cast_kernels(self.shard_numel, config.grad_accum_dtype, config.master_weights_dtype)
            builder.kernels("cast gradients", kernels)
            self._free_partition_gradients()
        for group, shard in zip(self._groups, shards, strict=True):
            self.step_partition(shard, has_matrices=group.has_matrices)
        if cast:
            builder.free("buffers", cast)
        else:
            self._free_partition_gradients()
        self._gather_parameters()

    def _gather_parameters(self) -> None:
        """all_gather_dp_groups, group by group."""
        for flat in self._flats:
            if flat.world_size > 1:
                self._gather_group(flat)

    @property
    def _copies_parts(self) -> bool:
        """Whether a gather's output is a list of all ranks' parts, to which NCCL's process group copies from
        a temporary tensor.
        """
        return self._release.gathers_step_in_buckets

    def _slice_parameters(self, ranks: int) -> None:
        """Cut the list of parts that a gather takes: narrow and detach of each."""
        if self._copies_parts:
            self.builder.host("slice parameters", overhead="deepspeed_part", events=2 * ranks)

    def _gather_group(self, flat: FlatGroup) -> None:
        """Gather in one call. Before 0.12.4 it is one call per `allgather_bucket_size` elements."""
        builder, ranks = self.builder, flat.world_size
        for shard in self._gather_sizes(flat):
            size = shard * ranks * self.param_bytes
            copied_bytes = size if self._copies_parts else 0
            self._slice_parameters(ranks)
            builder.allocate("buffers", copied_bytes)
            builder.collective(
                "all_gather", size, self.config.param_dtype, flat.group, stream=COMPUTE,
                name="all_gather parameters",
            )  # fmt: skip
            if copied_bytes:
                kernels = move_kernels(copied_bytes, copied_bytes, launches=ranks)
                builder.kernels("copy parameters out", kernels)
                builder.free("buffers", copied_bytes)

    def _gather_sizes(self, flat: FlatGroup) -> list[int]:
        """A rank's elements of each call that gathers the parameters."""
        if not self._release.gathers_step_in_buckets:
            return [flat.shard_numel]
        pieces = max(1, flat.shard_numel * flat.world_size // self.zero.allgather_bucket_size)
        piece_numel = flat.shard_numel // pieces // _ALIGNMENT * _ALIGNMENT
        return [piece_numel] * (pieces - 1) + [flat.shard_numel - piece_numel * (pieces - 1)]
