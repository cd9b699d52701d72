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
from zsim.cost.optimizers.kernels import megatron_lion_kernels
from zsim.cost.optimizers.tensors import Updated
from zsim.errors import InputError
from zsim.plan.builder import COMPUTE, moves
from zsim.plan.frameworks.megatron.buffer import Bucket, BufferPart, lay_out
from zsim.plan.frameworks.megatron.muon import (
    MuonTensor,
    flops,
    lay_out_whole,
    most,
    muon_tensors,
    owned_by_size,
    update_matrix,
)
from zsim.plan.frameworks.megatron.optimizer_step import ready_gradients
from zsim.plan.frameworks.megatron.schedule import NCCL, MegatronSchedule
from zsim.plan.ops import Memory
from zsim.plan.parts.optimizer import UPDATE, update
from zsim.plan.stage import Stage
from zsim.specs.strategy.megatron import Megatron

_FP32 = 4
Owned = list[list[MuonTensor]]  # by rank


class MuonSchedule(MegatronSchedule):
    """See the module's notes."""

    def __init__(self, stage: Stage, strategy: Megatron) -> None:
        assert strategy.muon is not None
        self.muon = strategy.muon
        self._laid_out: list[Owned] = []  # matrices of data-parallel ranks, and experts' of theirs
        self._received: dict[int, int] = {}  # by bucket, bytes of what was gathered
        super().__init__(stage, strategy)

    # -- who has what -----------------------------------------------------------------------------------

    def lay_out_parts(self, bucket_size: int | None) -> list[BufferPart]:
        """The buffers. From 0.18 on the layer-wise optimizer has separate buffers of matrices."""
        stage = self.stage
        self._of = muon_tensors(stage, self._named, self.muon)
        self.tensors = [one for tensors in self._of.values() for one in tensors]
        if self.muon.owners != "laid out":
            return super().lay_out_parts(bucket_size)
        if any(one.is_experts and one.matrix is None for one in self.tensors):
            raise InputError(
                "training.optimizer: 'muon' of Megatron-Core from 0.18 on refuses biases of experts with the "
                "distributed optimizer; expected a model without them, or distributed_optimizer = false"
            )
        rest = {one.name: one.numel for one in self.tensors if one.matrix is None}
        dense = lay_out(rest, bucket_size, self.ranks, is_sharded=True)
        parts = [BufferPart(dense, self.ranks, self.shard, self.whole)]
        for is_experts in (False, True):
            shard = stage.expert_group() if is_experts and stage.experts is not None else self.shard
            names = [name for name, one in self._named.items() if bool(one.belongs_to) == is_experts]
            by_name = {name: self._of[name] for name in names if self._of[name][0].matrix is not None}
            first = sum(len(part.buffer.buckets) for part in parts)
            buffer, owned = lay_out_whole(by_name, bucket_size, shard.size, first)
            self._laid_out.append(owned)
            if by_name:
                parts.append(BufferPart(buffer, shard.size, shard, shard, is_experts=is_experts))
        return parts

    @property
    def _expert_ranks(self) -> int:
        return self.stage.experts.size if self.stage.experts is not None else 1

    @cached_property
    def owned(self) -> list[Owned]:
        """The tensors of all chunks that each rank updates unsharded, by kind (dense, experts'). Where the
        layer-wise optimizer has them in its buffers, they are only matrices. It needs all chunks.
        """
        if self.muon.owners == "laid out":
            return self._together()
        tensors = [one for chunk in self.chunks for one in chunk.tensors]
        dense, experts = ([one for one in tensors if one.is_experts == which] for which in (False, True))
        if self.muon.owners == "all":
            return [[dense], [experts]]
        return [owned_by_size(dense, self.ranks), owned_by_size(experts, self._expert_ranks)]

    def _together(self) -> list[Owned]:
        """The chunks' matrices of each rank."""
        kinds = zip(*(chunk._laid_out for chunk in self.chunks), strict=True)
        return [[list(chain(*rank)) for rank in zip(*kind, strict=True)] for kind in kinds]

    def _pieces(self) -> list[int]:
        """Elements of the tensors that are no matrix, on the first rank, where the distributed optimizer
        updates them.
        """
        return self.parts[0].buffer.pieces(self.ranks)[0] if self.muon.owners == "laid out" else []

    # -- memory -----------------------------------------------------------------------------------------

    def _fullest(self) -> list[MuonTensor]:
        """The chunk's tensors of the ranks with most states. See [Note: two ranks]."""
        own = set(self.tensors)
        return [one for kind in self.owned for one in most(kind, self._state_bytes) if one in own]

    @property
    def own_numels(self) -> list[int]:
        """Elements of each tensor that those ranks update."""
        return [one.numel for one in self._fullest()] + self._pieces()

    def resident(self) -> list[Memory]:
        """Masters of 16-bit parameters, a momentum of matrices, and the moments of all other tensors."""
        found = [one for one in super().resident() if one.category != "optimizer_states"]
        fullest = self._fullest()
        rest = [one.numel for one in fullest if one.matrix is None] + self._pieces()
        matrices = [one.numel for one in fullest if one.matrix is not None]
        master = _FP32 if self.strategy.param_dtype != "fp32" else 0
        lazy = tuple(_FP32 * numel for numel in matrices)
        lazy += tuple(_FP32 * numel for numel in rest for _ in range(self._moments))
        return [
            *found,
            Memory("optimizer_states", master * (sum(matrices) + sum(rest))),
            Memory("optimizer_states", sum(lazy), lazy_tensors=lazy),
        ]

    @property
    def _moments(self) -> int:
        return 1 if self.muon.others == "lion" else 2

    def _state_bytes(self, tensor: MuonTensor) -> int:
        master = _FP32 if self.strategy.param_dtype != "fp32" else 0
        return tensor.numel * (master + _FP32 * (1 if tensor.matrix is not None else self._moments))

    # -- step -------------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        builder, strategy, work = self.builder, self.strategy, self.muon.work
        kinds = self.owned
        slowest = [one for kind in kinds for one in most(kind, lambda one: flops(one, work, builder))]
        matrices = [one for one in slowest if one.matrix is not None]
        rest = [one.numel for one in slowest if one.matrix is None]
        rest += [numel for chunk in self.chunks for numel in chunk._pieces()]
        numels = [one.numel for one in matrices]
        lists = [numels, rest] if self.muon.owners == "laid out" else [numels + rest]
        copies = ready_gradients(builder, strategy, self.training, lists, self.norm_groups)
        if not strategy.skips_update:
            self._update(matrices, rest)
            if self.muon.owners == "in turn" and not self._gathers_ahead:
                self._gather_unequal(kinds)
        builder.free("gradients", copies)
        for chunk in self.chunks:
            chunk.finish_update()

    def _update(self, matrices: Sequence[MuonTensor], rest: Sequence[int]) -> None:
        """Muon, matrix by matrix, then Adam or Lion."""
        builder, is_low = self.builder, self.strategy.param_dtype != "fp32"
        builder.host(UPDATE, "optimizer_step")
        for tensor in matrices:
            update_matrix(builder, tensor, self.muon.work)
        numel = sum(one.numel for one in matrices)
        if is_low and numel:
            builder.kernels("copy main weights", cast_kernels(numel, "fp32", self.strategy.param_dtype))
        if not rest:
            return
        if self.muon.others == "lion":
            casts = cast_kernels(sum(rest), "fp32", self.strategy.param_dtype) if is_low else ()
            kernels = (*megatron_lion_kernels(sum(rest), len(rest)), *casts)
            builder.kernels(UPDATE, kernels, overhead="optimizer_step")
            return
        training = replace(self.training, optimizer="adam")
        update(
            builder, training, Updated.flat(rest), gradient_dtype="fp32", state_dtype="fp32",
            low_precision_copy=is_low,
        )  # fmt: skip

    # -- gathers of unequal parts -----------------------------------------------------------------------

    def _gather_unequal(self, kinds: Sequence[Owned]) -> None:
        """Run `allgather_params`. See [Note: gathers of unequal parts]."""
        groups = [self.shard, *(part.shard for part in self.parts if part.is_experts)]
        for owned, group in zip(kinds, groups, strict=False):
            if group.size > 1 and any(owned):
                held = self._join(owned, "parameters")
                total = sum(one.numel for rank in owned for one in rank) * self.param_bytes
                self._all_gather(total, group.name, COMPUTE, "parameters")
                self._copy_others(owned)
                self.builder.free("buffers", held)

    def gather(self, bucket: Bucket, stream: str) -> int:
        """Issue the gather of a bucket's tensors from their owners (from 0.17 on) and return its event."""
        if self.muon.owners != "in turn":
            return super().gather(bucket, stream)
        part = self._part_of[bucket.number]
        owned = self._owned_in(bucket)
        self._received[bucket.number] = self._join(owned, f"bucket {bucket.number}")
        self.builder.wait_stream(NCCL, COMPUTE)
        total = sum(one.numel for rank in owned for one in rank) * self.param_bytes
        return self._all_gather(total, part.shard.name, stream, f"parameters {bucket.number}")

    def receive(self, bucket: Bucket) -> None:
        if self.muon.owners == "in turn":
            self._copy_others(self._owned_in(bucket))
            self.builder.free("buffers", self._received.pop(bucket.number))

    def _owned_in(self, bucket: Bucket) -> Owned:
        """The tensors of a bucket by owner."""
        own = {one for name in bucket.names for one in self._of[name]}
        kind = self.owned[1 if self._part_of[bucket.number].is_experts else 0]
        return [[one for one in rank if one in own] for rank in kind]

    def _join(self, owned: Owned, what: str) -> int:
        """Join the tensors that the fullest rank owns. Returns the bytes of these and of those that the
        others send.
        """
        fullest = most(owned, lambda one: one.numel)
        size = sum(one.numel for one in fullest) * self.param_bytes
        held = sum(one.numel for rank in owned for one in rank) * self.param_bytes
        self.builder.allocate("buffers", held)
        self.builder.kernels(f"join {what}", moves(size, size, launches=cat_launches(len(fullest))))
        return held

    def _copy_others(self, owned: Owned) -> None:
        """Copies of all but the fewest: the rank that owns least receives most."""
        least = most(owned, lambda one: -one.numel)
        count = sum(map(len, owned)) - len(least)
        size = self.param_bytes * sum(one.numel for rank in owned for one in rank if rank is not least)
        if count:
            self.builder.kernels("copy parameters", moves(size, size, launches=count))

    def _all_gather(self, size: int, group: str, stream: str, what: str) -> int:
        size = -(-size // self.builder.groups[group].size) * self.builder.groups[group].size
        name = f"all_gather {what}"
        dtype = self.strategy.param_dtype
        return self.builder.collective("all_gather", size, dtype, group, stream=stream, name=name)
