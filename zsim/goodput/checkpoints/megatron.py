"""Megatron-Core's distributed checkpoint (`--ckpt-format torch_dist`) with its fully parallel save.

Transcribed from Megatron-LM core/dist_checkpointing (exchange_utils.py `distribute_shards_to_ranks`,
strategies/fully_parallel.py, strategies/torch.py): within a data-parallel group a shard that several ranks
hold is written by the rank that has least so far, shards of few holders first, then large ones. With the
distributed optimizer each rank's masters and moments are its own. A rank writes `thread_count` = 2 files.

Rank 0 plans what is left without copies (strategies/torch.py `keep_only_main_replica`) and sends nothing back
(state_dict_saver.py `can_run_decentralized_global_plan`), while training waits; besides, every rank gets the
shapes of all that any rank holds (validation.py `determine_global_metadata`), in a save and in a load. With
`--ckpt-assume-constant-structure` later saves do neither (core_v0.19.0).
"""

from __future__ import annotations

import numpy as np

from zsim.arrays import Ints
from zsim.dtypes import DTYPE_BYTES
from zsim.goodput.checkpoints.pickled import archive_bytes
from zsim.goodput.checkpoints.saved import Saved, SavedFile
from zsim.goodput.checkpoints.tensors import HeldStates, HeldTensor, own, trained
from zsim.plan.frameworks.megatron.buffer import lay_out
from zsim.specs.strategy.megatron import Megatron

_FILES_PER_RANK = 2
_COMMON_BYTES, _METADATA_PER_CHUNK = 16_384, 280  # common.pt with the arguments; `.metadata`, as DCP's


def megatron_files(held: HeldStates, strategy: Megatron) -> Saved:
    """The files of one save."""
    world = held.world_size
    parameters, states, counts = (np.zeros(world, dtype=np.int64) for _ in range(3))
    held_items = chunks = 0
    for stage, groups in zip(held.tensors, held.ranks, strict=True):
        sizes = [tensor.numel * DTYPE_BYTES[strategy.param_dtype] for tensor in own(stage)]
        kinds = _kinds(held, strategy)
        for ranks in groups:
            group = len(ranks)
            if strategy.distributed_optimizer:
                pieces = _pieces(stage, strategy, group)
                mine = np.resize([4 * kinds * sum(piece) for piece in pieces], group)
                mine[len(pieces) :] = 0  # other instances hold copies
                given = _dealt(sizes, mine.copy())
                parameters[ranks], states[ranks] = given - mine, mine
                counts[ranks] = np.resize([kinds * len(piece) for piece in pieces], group)
                num_pieces = kinds * sum(map(len, pieces))
                chunks += num_pieces
                held_items += num_pieces * (group // len(pieces))
            else:
                moments = [4 * tensor.numel for tensor in trained(stage) for _ in range(kinds)]
                given = _dealt(sizes + moments, np.zeros(group, dtype=np.int64))
                share = sum(sizes) / max(1, sum(sizes) + sum(moments))
                parameters[ranks] = np.round(given * share).astype(np.int64)
                states[ranks] = given - parameters[ranks]
                chunks += len(moments)
                held_items += len(moments) * group
            counts[ranks] += -(-len(sizes) // group)
            chunks += len(sizes)
            held_items += len(sizes) * group
    overhead = counts * (archive_bytes(1 << 20) - (1 << 20))
    files = [
        SavedFile("common.pt", 0, overhead=_COMMON_BYTES),
        SavedFile(".metadata", 0, overhead=_METADATA_PER_CHUNK * chunks),
    ]
    for rank in range(world):
        for number in range(_FILES_PER_RANK):
            amounts = int(parameters[rank]), int(states[rank]), int(overhead[rank])
            parts = (_half(amount, number) for amount in amounts)
            files.append(SavedFile(f"__{rank}_{number}.distcp", rank, *parts))
    staged = parameters + states
    return Saved(
        "megatron", tuple(files), staged, _read(held, strategy), items=chunks, chunks=chunks,
        read_items=held_items, checked_items=held_items, is_answered=False, states=held.num_parameters,
        is_synced=True,
    )  # fmt: skip


def _kinds(held: HeldStates, strategy: Megatron) -> int:
    """fp32 numbers per parameter: masters of 16-bit ones, and moments."""
    return (0 if strategy.param_dtype == "fp32" else 1) + held.num_states


def _pieces(stage: tuple[HeldTensor, ...], strategy: Megatron, group: int) -> list[list[int]]:
    """Elements of every tensor that each rank of an instance of the optimizer updates."""
    shards = _shards(strategy, group)
    numels = {tensor.name: tensor.numel for tensor in trained(stage)}
    buffer = lay_out(numels, strategy.bucket_size, shards, is_sharded=True)
    return [buffer.pieces(place, shards) for place in range(shards)]


def _half(amount: int, number: int) -> int:
    return amount // _FILES_PER_RANK + (amount % _FILES_PER_RANK if number == 0 else 0)


def _shards(strategy: Megatron, group: int) -> int:
    return group // strategy.optimizer_instances


def _dealt(sizes: list[int], load: Ints) -> Ints:
    """`distribute_shards_to_ranks` of shards that all ranks hold, large ones first, on top of `load`."""
    for size in sorted(sizes, reverse=True):
        load[int(load.argmin())] += size
    return load


def _read(held: HeldStates, strategy: Megatron) -> Ints:
    """Every rank reads all that it holds: whole parameters, and its share of the states."""
    found = np.zeros(held.world_size, dtype=np.int64)
    kinds = _kinds(held, strategy)
    for stage, groups in zip(held.tensors, held.ranks, strict=True):
        numel = sum(tensor.numel for tensor in own(stage))
        states = 4 * kinds * sum(tensor.numel for tensor in trained(stage))
        for ranks in groups:
            shards = _shards(strategy, len(ranks)) if strategy.distributed_optimizer else 1
            found[ranks] = numel * DTYPE_BYTES[strategy.param_dtype] + states // shards
    return found
