"""DeepSpeed ZeRO stages 1 and 2: whole parameters, sharded optimizer states, sharded gradients in stage 2.

Transcribed from DeepSpeed 0.19.8 `runtime/zero/stage_1_and_2.py`. With its default settings a bucket is
all-reduced (`use_multi_rank_bucket_allreduce`), not reduce-scattered, so these stages send 3 times the
parameters per step, where the ZeRO paper says 2.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from zsim.cost.kernels.update import accumulate_kernels, cast_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.errors import InputError
from zsim.plan.builder import COMPUTE, moves
from zsim.plan.frameworks.deepspeed.engine import DeepSpeedEngine
from zsim.plan.frameworks.deepspeed.muon import orthogonalise_partition, shapes_of, whole_momentum
from zsim.plan.frameworks.deepspeed.norm_and_overflow import check_overflow, norm_and_sync
from zsim.plan.frameworks.deepspeed.optimizer_groups import OptimizerGroup, optimizer_groups
from zsim.plan.frameworks.deepspeed.stage12.offload import Zero12Home
from zsim.plan.frameworks.deepspeed.stage12.owners import FlatGroup, FlatGroups
from zsim.plan.frameworks.deepspeed.stage12.reduce import BucketReducer
from zsim.plan.ops import Category, Memory
from zsim.plan.parts.optimizer import frozen_bytes, partition_states
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import ModuleCall
from zsim.specs.model.spec import Parameter
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig

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
        self._is_boundary, self._is_told = True, False
        self._micro_batch = 0
        self._elements = 0  # in the bucket
        self._tensors: list[str] = []
        self._loose_bytes = 0
        named = list(workload.model.named_parameters())
        self._numels = {name: one.numel for name, one in named if one.trainable}
        self._shapes = {name: one.shape for name, one in named}
        self._frozen_bytes = frozen_bytes(workload, config.param_dtype)
        self._matrices = shapes_of(workload.model, config) if config.optimizer.by_head else self._shapes
        self._groups = [self._in_order(one) for one in optimizer_groups(stage, self.group, named)]
        self._flats = [self._flattened(one) for one in self._groups]
        self.shard_numel = sum(flat.shard_numel for flat in self._flats)
        self._release = config.release
        self._reducer = BucketReducer(
            stage.builder, config, FlatGroups(self._flats), self.group, self.reduce_stream
        )
        self.home: Zero12Home | None = None
        if self.zero.offload_optimizer is not None:
            self.home = Zero12Home(stage, config, self.shard_numel, self._numels)
        self._kept: set[str] = set()  # parameters whose gradients wait for the boundary

    def _in_order(self, one: OptimizerGroup) -> OptimizerGroup:
        """Muon sorts its matrices by shape, the largest first (`MuonWithAuxAdam.__init__`)."""
        if not one.is_of_matrices:
            return one
        names = sorted(one.numels, key=self._shapes.__getitem__, reverse=True)
        return replace(one, numels={name: one.numels[name] for name in names})

    def _flattened(self, one: OptimizerGroup) -> FlatGroup:
        """Padded to `nccl_start_alignment_factor` elements per rank, and cut into equal parts."""
        ranks = one.group.size
        shard = -(-one.numel // (_ALIGNMENT * ranks)) * _ALIGNMENT
        is_dealt_out = self.zero.round_robin_gradients
        return FlatGroup(one.numels, ranks, shard, is_dealt_out=is_dealt_out, group=one.group.name)

    # -- sizes ------------------------------------------------------------------------------------------

    def resident(self) -> list[Memory]:
        """Whole parameters, and the masters (of fp32 weights too) and optimizer states of the rank's
        partition.
        """
        config = self.config
        if self.home is not None:
            leftovers = self._casts() if self._release.clones_shards_on_gpu else ()
            return self.home.resident(self._flat_parameters(), leftovers)
        masters = tuple(flat.shard_numel * DTYPE_BYTES[config.master_weights_dtype] for flat in self._flats)
        moments = tuple(
            size
            for one, flat in zip(self._groups, self._flats, strict=True)
            for size in self._moments(one, flat)
        )
        is_lazy = self._release.makes_states_in_first_step
        return [
            self._flat_parameters(),
            Memory("optimizer_states", sum(masters), leftovers=self._casts()),
            Memory(
                "optimizer_states",
                sum(moments),
                lazy_tensors=moments if is_lazy else (),
                leftovers=() if is_lazy else masters,
            ),
            Memory("gradients", 0, leftovers=masters if is_lazy else ()),
            *(Memory("buffers", whole_momentum(flat, config)) for flat in self._muons),
        ]

    def _moments(self, one: OptimizerGroup, flat: FlatGroup) -> tuple[int, ...]:
        """Bytes of each state of a group's partition. Muon's matrices have momenta of whole matrices."""
        if one.is_of_matrices:
            return (whole_momentum(flat, self.config),)
        return partition_states(self.training, flat.shard_numel, self.config.optimizer_states_dtype)

    @property
    def _muons(self) -> list[FlatGroup]:
        """The partition of Muon's matrices, if it has one."""
        pairs = zip(self._groups, self._flats, strict=True)
        return [flat for one, flat in pairs if one.is_of_matrices]

    def _casts(self) -> tuple[int, ...]:
        """Bytes of the copy of the rank's partition from which masters are cast. () without a cast."""
        is_cast = self.config.param_dtype != self.config.master_weights_dtype
        return tuple(flat.shard_numel * self.param_bytes for flat in self._flats) if is_cast else ()

    def _flat_parameters(self) -> Memory:
        parts = self._numels.values() if self._release.flattens_on_gpu else ()
        leftovers = tuple(numel * self.param_bytes for numel in parts)
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
    def _own_gradient_bytes(self) -> int:
        return self.shard_numel * DTYPE_BYTES[self.config.grad_accum_dtype]

    @cached_property
    def _foreign_gradient_bytes(self) -> int:
        """Gradient bytes outside of the partition on the fullest rank: gradients that overlap with it are
        kept whole (`copy_grads_in_partition`), unless the accumulation type differs."""
        if self.config.grad_accum_dtype != self.config.param_dtype:
            return 0
        whole = sum(flat.most_owned_whole() for flat in self._flats)
        return max(0, whole * self.param_bytes - self._own_gradient_bytes)

    def _free_own_gradients(self) -> None:
        self.builder.free("gradients", self._own_gradient_bytes)
        self.builder.free("buffers", self._foreign_gradient_bytes)

    # -- hooks ------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        if self.home is not None and self.config.delayed_parameter_update:
            self.home.update_beside()

    def begin_backward(self, micro_batch: int, *, is_last: bool, is_told: bool) -> None:
        """setup_buckets: allocate the bucket's buffers, in stage 1 from the first backward to the
        boundary."""
        self._micro_batch, self._is_told = micro_batch, is_told
        self._is_boundary = is_last and not is_told
        if not is_told and (self.partitions_gradients or micro_batch == 0):
            self._make_buckets()
        if self.home is not None:
            self.home.begin_backward()

    def _make_buckets(self) -> None:
        size = self._num_buffers * self.zero.reduce_bucket_size * self.param_bytes
        self.builder.allocate("buffers", size)

    def gradient_ready(self, call: ModuleCall) -> None:
        super().gradient_ready(call)
        for parameter in reversed(call.trainable_parameters):
            size = parameter.numel * self.param_bytes
            if self._reduces_in_backward and (self.partitions_gradients or self._micro_batch == 0):
                self.builder.allocate(self._gradient_category, size)
                self._add_gradient(call.parameter_name(parameter), size)
            else:
                self._keep_gradient(call, parameter, size)

    def _keep_gradient(self, call: ModuleCall, parameter: Parameter, size: int) -> None:
        """Stage 1 accumulates the gradients of micro-batches in `.grad`."""
        name = call.parameter_name(parameter)
        if self._micro_batch == 0:
            self.builder.allocate("gradients", size)
        else:
            self.builder.allocate("buffers", size)
            self.builder.kernels(
                f"accumulate {call.name}",
                accumulate_kernels(parameter.numel, self.config.param_dtype, self.config.param_dtype),
                module=call.name,
            )
            self.builder.free("buffers", size)
        if self._reduces_in_backward:
            self._add_gradient(name, size)
        elif self._is_boundary or self._is_told:
            self._kept.add(name)

    def _add_gradient(self, name: str, size: int) -> None:
        """Copy a gradient into the bucket, which is reduced first if it would overflow."""
        builder, zero, numel = self.builder, self.zero, self._numels[name]
        module = name.rpartition(".")[0]
        if self._elements + numel > zero.reduce_bucket_size:
            self._reduce()
        builder.host(f"gradient of {module}", overhead="deepspeed_gradient_hook", module=module)
        if zero.contiguous_gradients and numel <= zero.reduce_bucket_size:
            builder.kernels(f"bucket {module}", moves(size, size), module=module)
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
        if self.home is not None:
            return self.home.keep_gradients(
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
            for one in self._groups:
                for name in one.numels:
                    if name in self._kept:
                        self._add_gradient(name, one.numels[name] * self.param_bytes)
            self._kept = set()
        if not self._reduces_in_backward and not self._is_boundary:
            return
        self._reduce()
        if self.zero.overlap_comm:
            builder.host_wait(builder.record(self.reduce_stream))
            builder.host_wait(builder.record(COMPUTE))
            builder.host("end of backward")
        if self.home is None:
            self._own_gradients()
        if self._is_boundary:
            for flat in self._muons:
                orthogonalise_partition(builder, self.config, flat, self._matrices)
        builder.free("buffers", self._num_buffers * self.zero.reduce_bucket_size * self.param_bytes)

    def reduce_gradients(self) -> None:
        """The pipeline engine's `_exec_reduce_tied_grads` and `_exec_reduce_grads`, which allocates the
        bucket itself."""
        where = f"{self.config.name}: zero_optimization"
        if self.partitions_gradients:
            raise InputError(
                f"{where}.stage: found 2 under a pipeline, expected 0 or 1; DeepSpeed refuses it"
            )
        if self.zero.overlap_comm:
            raise InputError(
                f"{where}.overlap_comm: expected false under a pipeline, where DeepSpeed's stage 1 walks the "
                "gradients only without it (reduce_gradients)"
            )
        self.sum_tied_gradient(self.config.param_dtype)
        self._is_boundary = True
        self._make_buckets()
        self.end_backward()

    def _own_gradients(self) -> None:
        """averaged_gradients: copy or add the rank's partition to its gradients, in the accumulation type."""
        config = self.config
        size = self._own_gradient_bytes
        if self._micro_batch == 0 or not self.partitions_gradients:
            self.builder.allocate("gradients", size)
            self.builder.allocate("buffers", self._foreign_gradient_bytes)
            self.builder.kernels("own gradients", moves(self.shard_numel * self.param_bytes, size))
        else:
            kernels = accumulate_kernels(self.shard_numel, config.grad_accum_dtype, config.param_dtype)
            self.builder.kernels("accumulate own gradients", kernels)

    # -- step -------------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        builder, config = self.builder, self.config
        if self.home is not None:
            self.home.step(self.group.name)
            self._gather_parameters()
            return
        shards = [flat.shard_numel for flat in self._flats]
        check_overflow(self.stage, config, shards, self.group.name)
        norm_and_sync(
            self.stage, config, shards, self.group.name,
            num_groups=len(shards),
            afterwards=[one.group.name for one in self._groups if one.is_of_experts],
        )  # fmt: skip
        needs_cast = config.grad_accum_dtype != config.master_weights_dtype
        cast = self.shard_numel * DTYPE_BYTES[config.master_weights_dtype] if needs_cast else 0
        builder.allocate("buffers", cast)
        if cast:
            kernels = cast_kernels(self.shard_numel, config.grad_accum_dtype, config.master_weights_dtype)
            builder.kernels("cast gradients", kernels)
            self._free_own_gradients()
        for one, shard in zip(self._groups, shards, strict=True):
            self.step_partition(shard, is_of_matrices=one.is_of_matrices)
        if cast:
            builder.free("buffers", cast)
        else:
            self._free_own_gradients()
        self._gather_parameters()

    def _gather_parameters(self) -> None:
        """all_gather_dp_groups, group by group."""
        for flat in self._flats:
            if flat.world_size > 1:
                self._gather_group(flat)

    def _gather_group(self, flat: FlatGroup) -> None:
        """Gather in one call. Before 0.12.4 it is one call per `allgather_bucket_size` elements, into a list
        of all ranks' parts, to which NCCL's process group copies from a temporary tensor.
        """
        builder, zero, ranks = self.builder, self.zero, flat.world_size
        is_in_buckets = self._release.gathers_step_in_buckets
        pieces = max(1, flat.shard_numel * ranks // zero.allgather_bucket_size) if is_in_buckets else 1
        per_piece = flat.shard_numel // pieces // _ALIGNMENT * _ALIGNMENT
        sizes = [per_piece] * (pieces - 1) + [flat.shard_numel - per_piece * (pieces - 1)]
        for shard in sizes:
            size = shard * ranks * self.param_bytes
            copied = size if is_in_buckets else 0
            if copied:
                turns = 2 * ranks  # narrow, detach
                builder.host("slice parameters", overhead="deepspeed_part", events=turns)
                builder.allocate("buffers", copied)
            builder.collective(
                "all_gather", size, self.config.param_dtype, flat.group, stream=COMPUTE,
                name="all_gather parameters",
            )  # fmt: skip
            if copied:
                kernels = moves(copied, copied, launches=ranks)
                builder.kernels("copy parameters out", kernels)
                builder.free("buffers", copied)
