"""Megatron-Core's distributed checkpoint (`--ckpt-format torch_dist`) with its fully parallel save.

Transcribed from Megatron-LM core/dist_checkpointing (exchange_utils.py `distribute_shards_to_ranks`,
strategies/fully_parallel.py, strategies/torch.py). Within a data-parallel group a shard that several ranks
hold is written by the rank that has least so far, shards of few holders first, then large ones. With the
distributed optimizer each rank saves its partition of masters and moments. A rank writes `thread_count` = 2
files.

Every routed expert is a separate shard, whose index among all experts is an offset
(transformer/moe/experts.py `sharded_state_dict`), and the two products of a gated MLP's first weight are two
(`apply_swiglu_sharded_factory`). Expert-parallel experts have a separate optimizer, over the ranks that hold
the same ones. The data-parallel group that has the first of these writes the parameters. What all
tensor-parallel ranks hold, norms and routers, is written by the first ones (utils.py
`make_sharded_tensor_for_checkpoint`: `replica_id`), but its states by each from core 0.15 on, whose ranks
save the buckets of their optimizer as they are (optimizer/distrib_optimizer.py
`sharded_param_state_dp_reshardable`).

Rank 0 plans what is left without copies (strategies/torch.py `keep_only_main_replica`) and sends nothing back
(state_dict_saver.py `can_run_decentralized_global_plan`), while training waits. Besides, every rank gets the
shapes of all that any rank holds (validation.py `determine_global_metadata`), in a save and in a load. With
`--ckpt-assume-constant-structure` later saves do neither (core_v0.19.0).

A local checkpoint (`--non-persistent-ckpt-type local`, training/checkpointing.py `save_checkpoint`: with
nvidia-resiliency-ext, on the node's drives or in its memory) is not planned. Every rank gets all shapes and
keeps the shards that `distribute_shards_to_ranks` gives it (tensor_aware_state_dict.py `from_state_dict`),
without `.metadata`. Its load checks the shapes again, and ranks that read a shard broadcast it to those that
hold it (`to_state_dict`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zsim.arrays import Ints
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.megatron.buffer import make_layout
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.goodput.checkpoints.saved import (
    ModelStates,
    SavedFile,
    SavedFiles,
    StateTensor,
    archive_bytes,
    untied_tensors,
)

_FILES_PER_RANK = 2
_GATED = ("linear_fc1", "gate_up_proj")
_COMMON_BYTES, _METADATA_PER_CHUNK = 16_384, 280  # common.pt with the arguments; `.metadata`, as DCP's


def megatron_files(model_states: ModelStates, strategy: MegatronConfig) -> SavedFiles:
    """The files of one save."""
    shares = _RankShares(model_states, strategy)
    for number in range(len(model_states.tensors)):
        shares.add_stage(number)
    parameters, states, counts = shares.parameters, shares.states, shares.counts
    overhead = counts * (archive_bytes(1 << 20) - (1 << 20))
    files = [
        SavedFile("common.pt", 0, overhead=_COMMON_BYTES),
        SavedFile(".metadata", 0, overhead=_METADATA_PER_CHUNK * shares.chunks),
    ]
    for rank in range(model_states.world_size):
        for number in range(_FILES_PER_RANK):
            amounts = int(parameters[rank]), int(states[rank]), int(overhead[rank])
            file_amounts = (_file_share(amount, number) for amount in amounts)
            files.append(SavedFile(f"__{rank}_{number}.distcp", rank, *file_amounts))
    return SavedFiles(
        "megatron", tuple(files), parameters + states, _read(model_states, strategy), items=shares.chunks,
        chunks=shares.chunks, read_items=shares.num_items, checked_items=shares.num_items,
        is_answered=False, has_local_plan=False, states=model_states.num_parameters, is_synced=True,
        is_planned_at_once=True,
    )  # fmt: skip


class _RankShares:
    """The ranks' shares in a save: bytes of `parameters` and `states`, `counts` of shards.

    `chunks` is the number of shards without copies, `num_items` with them, of all ranks.
    """

    def __init__(self, model_states: ModelStates, strategy: MegatronConfig) -> None:
        self.model_states, self.strategy = model_states, strategy
        self.kinds = _num_kinds(model_states, strategy)
        world = model_states.world_size
        self.parameters, self.states, self.counts = (np.zeros(world, dtype=np.int64) for _ in range(3))
        self.chunks = self.num_items = 0

    def add_stage(self, number: int) -> None:
        """Deal out a pipeline rank's tensors."""
        dense, expert_tensors = (
            _tensors_of_kind(self.model_states, number, False),
            _tensors_of_kind(self.model_states, number, True),
        )
        experts = self.model_states.expert_ranks[number] if self.model_states.expert_ranks else ()
        tensor_parallel = [tensor for tensor in dense if tensor.is_tensor_parallel]
        if self.strategy.distributed_optimizer:
            for tensor_rank, ranks in enumerate(self.model_states.ranks[number]):
                writes_all = tensor_rank == 0 or self.strategy.saves_replicated_states
                self._add_partitioned_states(dense, ranks, dense if writes_all else tensor_parallel)
            for ranks in experts:
                self._add_partitioned_states(expert_tensors, ranks, expert_tensors)
        for tensor_place, ranks in enumerate(self.model_states.ranks[number]):
            load = self.states[ranks]
            members = {int(rank): index for index, rank in enumerate(ranks)}
            for expert_group in experts:
                if int(expert_group[0]) in members:  # the main replica's group
                    holders = np.array(
                        [
                            members[int(expert_rank)]
                            for expert_rank in expert_group
                            if int(expert_rank) in members
                        ]
                    )
                    self._assign_shards(expert_tensors, ranks, load, holders, len(expert_group))
            everyone = np.arange(len(ranks))
            self._assign_shards(tensor_parallel if tensor_place else dense, ranks, load, everyone, len(ranks))

    def _add_partitioned_states(
        self, tensors: Sequence[StateTensor], ranks: Ints, written: Sequence[StateTensor]
    ) -> None:
        """Add the distributed optimizer's masters and moments of `tensors`.

        The `written` ones are saved by the ranks that update them. Other instances hold copies.
        """
        pieces = _pieces(tensors, self.strategy, len(ranks), written)
        state_bytes = np.array([4 * self.kinds * sum(piece) for piece in pieces], dtype=np.int64)
        writer_ranks = ranks[: len(pieces)]
        self.states[writer_ranks] += state_bytes
        self.counts[writer_ranks] += np.array([self.kinds * len(piece) for piece in pieces], dtype=np.int64)
        number = self.kinds * sum(map(len, pieces))
        self.chunks += number
        self.num_items += number * (len(ranks) // len(pieces))

    def _assign_shards(
        self, tensors: Sequence[StateTensor], ranks: Ints, load: Ints, holders: Ints, copies: int
    ) -> None:
        """`distribute_shards_to_ranks` for shards that `holders`, indices into `ranks`, have.

        `load` is their bytes so far, and `copies` the number of holders anywhere.
        """
        size = DTYPE_BYTES[self.strategy.param_dtype]
        shards = [(size * numel, False) for tensor in tensors for numel in _shards_of(tensor)]
        if not self.strategy.distributed_optimizer:
            shards += [
                (4 * numel, True)
                for tensor in tensors if tensor.is_trainable
                for numel in _shards_of(tensor)
                for _ in range(self.kinds)
            ]  # fmt: skip
        for amount, is_state in sorted(shards, key=lambda shard: -shard[0]):
            lightest = int(holders[load[holders].argmin()])
            load[lightest] += amount
            (self.states if is_state else self.parameters)[ranks[lightest]] += amount
            self.counts[ranks[lightest]] += 1
        self.chunks += len(shards)
        self.num_items += len(shards) * copies


def _tensors_of_kind(model_states: ModelStates, stage: int, is_expert_parallel: bool) -> list[StateTensor]:
    """A pipeline rank's tensors, either the expert-parallel ones or the others."""
    return [
        tensor
        for tensor in untied_tensors(model_states.tensors[stage])
        if tensor.is_expert_parallel == is_expert_parallel
    ]


def _shards_of(tensor: StateTensor) -> list[int]:
    """Elements of every shard that a parameter is saved as."""
    num_parts = len(_parameter_names(tensor)) * (2 if any(name in tensor.name for name in _GATED) else 1)
    return [tensor.numel // num_parts] * num_parts


def _num_kinds(model_states: ModelStates, strategy: MegatronConfig) -> int:
    """fp32 numbers per parameter: masters of 16-bit ones, and moments."""
    return (0 if strategy.param_dtype == "fp32" else 1) + model_states.num_states


def _pieces(
    tensors: Sequence[StateTensor], strategy: MegatronConfig, group: int, written: Sequence[StateTensor]
) -> list[list[int]]:
    """Elements of every tensor `written` that each rank of an instance of the optimizer updates."""
    shards = _num_shards(strategy, group)
    numels: dict[str, int] = {}
    for tensor in tensors:
        if tensor.is_trainable:
            numels |= dict.fromkeys(_parameter_names(tensor), tensor.numel // len(_parameter_names(tensor)))
    buffer = make_layout(numels, strategy.bucket_size, shards, is_sharded=True)
    return buffer.pieces(shards, {name for tensor in written for name in _parameter_names(tensor)})


def _parameter_names(tensor: StateTensor) -> list[str]:
    """Names of Megatron's parameters that zsim has as one. In Megatron every routed expert is a separate
    parameter.
    """
    experts = tensor.rows if len(tensor.shape) == 3 else 1
    return [f"{tensor.name}.{number}" for number in range(experts)]


def _file_share(amount: int, number: int) -> int:
    return amount // _FILES_PER_RANK + (amount % _FILES_PER_RANK if number == 0 else 0)


def _num_shards(strategy: MegatronConfig, group: int) -> int:
    return group // strategy.optimizer_instances


def _read(model_states: ModelStates, strategy: MegatronConfig) -> Ints:
    """Bytes that every rank reads: complete parameters, and its share of the states."""
    bytes_per_rank = np.zeros(model_states.world_size, dtype=np.int64)
    size, kinds = DTYPE_BYTES[strategy.param_dtype], _num_kinds(model_states, strategy)
    for number in range(len(model_states.tensors)):
        expert_groups = model_states.expert_ranks[number] if model_states.expert_ranks else ()
        for is_expert_parallel, groups in ((False, model_states.ranks[number]), (True, expert_groups)):
            tensors = _tensors_of_kind(model_states, number, is_expert_parallel)
            numel = sum(tensor.numel for tensor in tensors)
            states = 4 * kinds * sum(tensor.numel for tensor in tensors if tensor.is_trainable)
            for ranks in groups:
                shards = _num_shards(strategy, len(ranks)) if strategy.distributed_optimizer else 1
                bytes_per_rank[ranks] += numel * size + states // shards
    return bytes_per_rank
