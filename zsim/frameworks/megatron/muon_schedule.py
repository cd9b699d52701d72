"""Megatron's data parallelism under its own Muon: states of whole matrices, and the gathers from their
owners.

Read from Megatron-Core 0.16.1 to 0.18.2: core/optimizer/layer_wise_optimizer.py, `start_param_sync` of
core/distributed/param_and_grad_buffer.py, and `_get_megatron_emerging_optimizer` of
core/optimizer/__init__.py.

# [Note: gathers of unequal parts]
Owners of whole tensors have unequal bytes. torch's `all_gather` of a list of unequal tensors is a broadcast
from every rank, in one group, so in one kernel (`ProcessGroupNCCL::allgather`): here an all-gather of as many
bytes in all. Before it a rank joins the tensors that it owns, and after it copies those of the others into
its parameters.

# [Note: two ranks]
The program is of the rank whose matrices take most FLOPs. The memory of states is of the rank with most of
them, separately for dense tensors and experts, which may be other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

from zsim.cost.kernels.update import cast_kernels, cat_launches
from zsim.cost.optimizers import UpdatedTensor
from zsim.errors import InputError
from zsim.frameworks.megatron.buffer import Bucket, GroupBuffer, make_layout
from zsim.frameworks.megatron.muon import (
    MuonTensor,
    assign_by_size,
    flops,
    fullest_rank_tensors,
    make_whole_tensor_layout,
    muon_tensors,
    update_matrix,
)
from zsim.frameworks.megatron.optimizer_step import lion_kernels, prepare_gradients
from zsim.frameworks.megatron.schedule import NCCL, MegatronSchedule
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.plan.builder import COMPUTE, move_kernels
from zsim.plan.ops import Memory
from zsim.plan.shared.optimizer import UPDATE, update
from zsim.plan.stage import Stage

_FP32 = 4
OwnedTensors = list[list[MuonTensor]]  # by rank


class MuonSchedule(MegatronSchedule):
    """See the module's notes."""

    def __init__(self, stage: Stage, strategy: MegatronConfig) -> None:
        assert strategy.muon is not None
        self.muon = strategy.muon
        self._laid_out: list[OwnedTensors] = []  # matrices of data-parallel ranks, and experts' of theirs
        self._received: dict[int, int] = {}  # by bucket, bytes of what was gathered
        super().__init__(stage, strategy)

    # -- who has what -----------------------------------------------------------------------------------

    def make_buffers(self, bucket_size: int | None) -> list[GroupBuffer]:
        """The buffers. From 0.18 on the layer-wise optimizer has separate buffers of matrices."""
        stage = self.stage
        self._tensors_of_parameter = muon_tensors(stage, self._named, self.muon)
        self.tensors = [tensor for tensors in self._tensors_of_parameter.values() for tensor in tensors]
        if self.muon.owners != "laid out":
            return super().make_buffers(bucket_size)
        if any(tensor.is_experts and tensor.matrix is None for tensor in self.tensors):
            raise InputError(
                "training.optimizer: 'muon' of Megatron-Core from 0.18 on refuses biases of experts with the "
                "distributed optimizer; expected a model without them, or distributed_optimizer = false"
            )
        other_numels = {tensor.name: tensor.numel for tensor in self.tensors if tensor.matrix is None}
        dense = make_layout(other_numels, bucket_size, self.ranks, is_sharded=True)
        buffers = [GroupBuffer(dense, self.ranks, self.shard, self.full_group)]
        for is_experts in (False, True):
            shard = stage.expert_group() if is_experts and stage.experts is not None else self.shard
            names = [
                name for name, parameter in self._named.items() if bool(parameter.rank_kind) == is_experts
            ]
            matrices = {
                name: self._tensors_of_parameter[name]
                for name in names
                if self._tensors_of_parameter[name][0].matrix is not None
            }
            first = sum(len(buffer.layout.buckets) for buffer in buffers)
            layout, owned_tensors = make_whole_tensor_layout(matrices, bucket_size, shard.size, first)
            self._laid_out.append(owned_tensors)
            if matrices:
                buffers.append(GroupBuffer(layout, shard.size, shard, shard, holds_experts=is_experts))
        return buffers

    @property
    def _expert_ranks(self) -> int:
        return self.stage.experts.size if self.stage.experts is not None else 1

    @cached_property
    def owned(self) -> list[OwnedTensors]:
        """The tensors of all chunks that each rank updates unsharded, by kind (dense, experts'). Where the
        layer-wise optimizer has them in its buffers, they are only matrices. It needs all chunks.
        """
        if self.muon.owners == "laid out":
            return self._combine_chunks()
        tensors = [tensor for chunk in self.stage_hooks for tensor in chunk.tensors]
        dense, experts = (
            [tensor for tensor in tensors if tensor.is_experts == is_expert] for is_expert in (False, True)
        )
        if self.muon.owners == "all":
            return [[dense], [experts]]
        return [assign_by_size(dense, self.ranks), assign_by_size(experts, self._expert_ranks)]

    def _combine_chunks(self) -> list[OwnedTensors]:
        """The chunks' matrices of each rank."""
        kinds = zip(*(chunk._laid_out for chunk in self.stage_hooks), strict=True)
        return [[list(chain(*rank)) for rank in zip(*kind, strict=True)] for kind in kinds]

    def _pieces(self) -> list[int]:
        """Elements of the tensors that are no matrix, on the first rank, where the distributed optimizer
        updates them.
        """
        return self.buffers[0].layout.pieces(self.ranks)[0] if self.muon.owners == "laid out" else []

    # -- memory -----------------------------------------------------------------------------------------

    def _fullest(self) -> list[MuonTensor]:
        """The chunk's tensors of the ranks with most states. See [Note: two ranks]."""
        chunk_tensors = set(self.tensors)
        return [
            tensor
            for kind in self.owned
            for tensor in fullest_rank_tensors(kind, self._state_bytes)
            if tensor in chunk_tensors
        ]

    @property
    def own_numels(self) -> list[int]:
        """Elements of each tensor that those ranks update."""
        return [tensor.numel for tensor in self._fullest()] + self._pieces()

    def resident(self) -> list[Memory]:
        """Masters of 16-bit parameters, a momentum of matrices, and the moments of all other tensors."""
        memories = [memory for memory in super().resident() if memory.category != "optimizer_states"]
        fullest = self._fullest()
        other_numels = [tensor.numel for tensor in fullest if tensor.matrix is None] + self._pieces()
        matrices = [tensor.numel for tensor in fullest if tensor.matrix is not None]
        master = _FP32 if self.strategy.param_dtype != "fp32" else 0
        lazy_sizes = tuple(_FP32 * numel for numel in matrices)
        lazy_sizes += tuple(_FP32 * numel for numel in other_numels for _ in range(self._moments))
        return [
            *memories,
            Memory("optimizer_states", master * (sum(matrices) + sum(other_numels))),
            Memory("optimizer_states", sum(lazy_sizes), lazy_tensors=lazy_sizes),
        ]

    @property
    def _moments(self) -> int:
        return 1 if self.muon.scalar_optimizer == "lion" else 2

    def _state_bytes(self, tensor: MuonTensor) -> int:
        master = _FP32 if self.strategy.param_dtype != "fp32" else 0
        return tensor.numel * (master + _FP32 * (1 if tensor.matrix is not None else self._moments))

    # -- step -------------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        builder, strategy, work = self.builder, self.strategy, self.muon.orthogonalization
        kinds = self.owned
        slowest = [
            tensor
            for kind in kinds
            for tensor in fullest_rank_tensors(kind, lambda tensor: flops(tensor, work, builder))
        ]
        matrices = [tensor for tensor in slowest if tensor.matrix is not None]
        other_numels = [tensor.numel for tensor in slowest if tensor.matrix is None]
        other_numels += [numel for chunk in self.stage_hooks for numel in chunk._pieces()]
        numels = [tensor.numel for tensor in matrices]
        numel_lists = [numels, other_numels] if self.muon.owners == "laid out" else [numels + other_numels]
        copies = prepare_gradients(builder, strategy, self.training, numel_lists, self.norm_groups)
        if not strategy.skips_update:
            self._update(matrices, other_numels)
            if self.muon.owners == "in turn" and not self._gathers_ahead:
                self._gather_unequal(kinds)
        builder.free("gradients", copies)
        for chunk in self.stage_hooks:
            chunk.finish_update()

    def _update(self, matrices: Sequence[MuonTensor], other_numels: Sequence[int]) -> None:
        """Muon, matrix by matrix, then Adam or Lion."""
        builder, is_low = self.builder, self.strategy.param_dtype != "fp32"
        builder.host(UPDATE, "optimizer_step")
        for tensor in matrices:
            update_matrix(builder, tensor, self.muon.orthogonalization)
        numel = sum(tensor.numel for tensor in matrices)
        if is_low and numel:
            builder.kernels("copy main weights", cast_kernels(numel, "fp32", self.strategy.param_dtype))
        if not other_numels:
            return
        if self.muon.scalar_optimizer == "lion":
            casts = cast_kernels(sum(other_numels), "fp32", self.strategy.param_dtype) if is_low else ()
            kernels = (*lion_kernels(sum(other_numels), len(other_numels)), *casts)
            builder.kernels(UPDATE, kernels, overhead="optimizer_step")
            return
        training = replace(self.training, optimizer="adam")
        update(
            builder, training, UpdatedTensor.flat(other_numels), gradient_dtype="fp32", state_dtype="fp32",
            low_precision_copy=is_low,
        )  # fmt: skip

    # -- gathers of unequal parts -----------------------------------------------------------------------

    def _gather_unequal(self, kinds: Sequence[OwnedTensors]) -> None:
        """Run `allgather_params`. See [Note: gathers of unequal parts]."""
        groups = [self.shard, *(buffer.shard for buffer in self.buffers if buffer.holds_experts)]
        for owned_tensors, group in zip(kinds, groups, strict=False):
            if group.size > 1 and any(owned_tensors):
                joined_bytes = self._join(owned_tensors, "parameters")
                total = sum(tensor.numel for rank in owned_tensors for tensor in rank) * self.param_bytes
                self._all_gather(total, group.name, COMPUTE, "parameters")
                self._copy_others(owned_tensors)
                self.builder.free("buffers", joined_bytes)

    def gather(self, bucket: Bucket, stream: str) -> int:
        """Issue the gather of a bucket's tensors from their owners (from 0.17 on) and return its event."""
        if self.muon.owners != "in turn":
            return super().gather(bucket, stream)
        buffer = self._buffer_of[bucket.number]
        owned_tensors = self._owned_in_bucket(bucket)
        self._received[bucket.number] = self._join(owned_tensors, f"bucket {bucket.number}")
        self.builder.wait_stream(NCCL, COMPUTE)
        total = sum(tensor.numel for rank in owned_tensors for tensor in rank) * self.param_bytes
        return self._all_gather(total, buffer.shard.name, stream, f"parameters {bucket.number}")

    def receive(self, bucket: Bucket) -> None:
        if self.muon.owners == "in turn":
            self._copy_others(self._owned_in_bucket(bucket))
            self.builder.free("buffers", self._received.pop(bucket.number))

    def _owned_in_bucket(self, bucket: Bucket) -> OwnedTensors:
        """The tensors of a bucket by owner."""
        bucket_tensors = {tensor for name in bucket.names for tensor in self._tensors_of_parameter[name]}
        owned_tensors = self.owned[1 if self._buffer_of[bucket.number].holds_experts else 0]
        return [
            [tensor for tensor in rank_tensors if tensor in bucket_tensors] for rank_tensors in owned_tensors
        ]

    def _join(self, owned_tensors: OwnedTensors, label: str) -> int:
        """Join the tensors that the fullest rank owns. Returns the bytes of these and of those that the
        others send.
        """
        fullest = fullest_rank_tensors(owned_tensors, lambda tensor: tensor.numel)
        size = sum(tensor.numel for tensor in fullest) * self.param_bytes
        total_bytes = (
            sum(tensor.numel for rank_tensors in owned_tensors for tensor in rank_tensors) * self.param_bytes
        )
        self.builder.allocate("buffers", total_bytes)
        self.builder.kernels(f"join {label}", move_kernels(size, size, launches=cat_launches(len(fullest))))
        return total_bytes

    def _copy_others(self, owned_tensors: OwnedTensors) -> None:
        """Copies of all but the fewest: the rank that owns least receives most."""
        smallest_share = fullest_rank_tensors(owned_tensors, lambda tensor: -tensor.numel)
        count = sum(map(len, owned_tensors)) - len(smallest_share)
        size = self.param_bytes * sum(
            tensor.numel
            for rank_tensors in owned_tensors
            for tensor in rank_tensors
            if rank_tensors is not smallest_share
        )
        if count:
            self.builder.kernels("copy parameters", move_kernels(size, size, launches=count))

    def _all_gather(self, size: int, group: str, stream: str, label: str) -> int:
        size = -(-size // self.builder.groups[group].size) * self.builder.groups[group].size
        name = f"all_gather {label}"
        dtype = self.strategy.param_dtype
        return self.builder.collective("all_gather", size, dtype, group, stream=stream, name=name)
