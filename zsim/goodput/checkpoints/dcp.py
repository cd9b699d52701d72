"""torch.distributed.checkpoint (DCP): what each rank writes after the planner has removed copies.

Transcribed from torch 2.13 distributed/checkpoint: `create_default_local_save_plan` (every rank lists its own
chunk of each DTensor, and every plain tensor and value whole), `dedup_save_plans` (an item that several ranks
list goes to the rank with the fewest bytes so far, by the size of the whole tensor), `write_data` and
`_split_by_size_and_type` (files of a rank). States are those of `get_model_state_dict` and
`get_optimizer_state_dict`: a tied weight is saved under both of its names.

# [Note: many ranks]
The planner goes through every item of every rank. Above `_MAX_ITEMS` it is run once for the chunk of a
tensor that is at one place of the sharding group: chunks at other places are shared by other ranks and fall
alike. Adam's step counters (4 bytes) are then dealt out evenly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from zsim.arrays import Ints
from zsim.goodput.checkpoints.pickled import VALUE_BYTES, archive_bytes
from zsim.goodput.checkpoints.saved import Saved, SavedFile
from zsim.goodput.checkpoints.tensors import (
    GROUP_KEYS,
    STATES,
    STEP_BYTES,
    HeldStates,
    HeldTensor,
    trained,
)

_MAX_ITEMS = 30_000  # [Note: many ranks]
# Bytes of `.metadata` per name and per chunk, and of a name in a group's list of parameters: recorded
# (traces/checkpoints/files.json), for names of some 40 letters.
_METADATA_NAME, _METADATA_CHUNK, _LISTED_NAME = 166, 180, 43
Key = tuple[str, int | None, int]


@dataclass(frozen=True, slots=True)
class DcpLayout:
    """`shards`: ranks that every tensor is cut over along its first dimension; `replicas`: so many such
    groups hold the same. `dtype_bytes`: of parameters and states."""

    shards: int
    replicas: int
    dtype_bytes: int
    threads: int = 1
    single_file_per_rank: bool = True


class _Item(NamedTuple):
    """An entry of a rank's plan. `weight`: bytes of the whole tensor, by which files and ranks are balanced;
    0: a value that is no tensor. `chunk`: bytes of this rank's part."""

    key: Key
    weight: int
    chunk: int
    is_parameter: bool


class _Source(NamedTuple):
    """A tensor in the order of the state dict. `is_counter`: Adam's step, a plain tensor."""

    name: str
    tensor: HeldTensor
    is_parameter: bool
    is_counter: bool = False


def dcp_files(held: HeldStates, layout: DcpLayout) -> Saved:
    """The files of `dcp.save`."""
    sources = [_sources(held, stage) for stage in held.tensors]
    values = GROUP_KEYS[held.optimizer]
    per_stage = held.data_ranks * held.tensor_ranks
    items = sum((len(stage) + values) * per_stage for stage in sources)
    listed = _one_by_one if items <= _MAX_ITEMS else _by_place
    files = listed(held, layout, sources)
    local = _local_bytes(held, layout, sources)
    names = sum(map(len, sources)) + values
    chunks = names + sum(_more_chunks(held, layout, stage) for stage in sources)
    metadata = SavedFile(".metadata", 0, overhead=_METADATA_NAME * names + _METADATA_CHUNK * chunks)
    return Saved(
        "dcp", (metadata, *files), staged=local, read=local, items=items, chunks=chunks,
        read_items=items, states=held.num_parameters, is_synced=True,
    )  # fmt: skip


def _sources(held: HeldStates, stage: tuple[HeldTensor, ...]) -> list[_Source]:
    found = [_Source(tensor.name, tensor, True) for tensor in stage]
    for tensor in trained(stage):
        if held.has_steps:
            found.append(_Source(f"{tensor.name}.step", tensor, False, is_counter=True))
        found += [_Source(f"{tensor.name}.{name}", tensor, False) for name in STATES[held.optimizer]]
    return found


def _more_chunks(held: HeldStates, layout: DcpLayout, stage: list[_Source]) -> int:
    """Chunks of a stage beyond one per name."""
    cut = [source for source in stage if not source.is_counter]
    return sum(
        min(layout.shards, max(1, one.tensor.rows)) * (held.tensor_ranks if one.tensor.is_cut else 1) - 1
        for one in cut
    )


def chunk_rows(rows: int, shards: int) -> Ints:
    """Rows of every shard, as `torch.chunk` cuts them: equal ones, then a smaller one, then none."""
    each = -(-rows // shards)
    return np.clip(rows - each * np.arange(shards, dtype=np.int64), 0, each)


def _local_bytes(held: HeldStates, layout: DcpLayout, sources: list[list[_Source]]) -> Ints:
    """Bytes of the states that each rank holds."""
    found = np.zeros(held.world_size, dtype=np.int64)
    for stage, groups in zip(sources, held.ranks, strict=True):
        mine = np.zeros(layout.shards, dtype=np.int64)
        for source in stage:
            mine += STEP_BYTES if source.is_counter else _chunk_bytes(source, layout)
        for ranks in groups:
            found[ranks] = np.tile(mine, layout.replicas)
    return found


def _chunk_bytes(source: _Source, layout: DcpLayout) -> Ints:
    row_bytes = prod(source.tensor.shape[1:]) * layout.dtype_bytes
    return chunk_rows(source.tensor.rows, layout.shards) * row_bytes


# -- all items of all ranks ----------------------------------------------------------------------------


def _one_by_one(held: HeldStates, layout: DcpLayout, sources: list[list[_Source]]) -> list[SavedFile]:
    plans: list[list[_Item]] = [[] for _ in range(held.world_size)]
    for stage, groups in zip(sources, held.ranks, strict=True):
        for place, ranks in enumerate(groups):
            for shard in range(layout.shards):
                items = list(_items(held, layout, stage, place, shard))
                for replica in range(layout.replicas):
                    plans[ranks[replica * layout.shards + shard]] = items
    listed = sum(1 for stage in held.tensors for _ in trained(stage))
    files = []
    for rank, items in enumerate(_without_copies(plans)):
        for number, part in enumerate(_parts(items, layout)):
            name = f"__{rank}_{number}.distcp"
            files.append(_file(name, rank, part, listed, f"{GROUP_KEYS[held.optimizer] - 1}"))
    return files


def _items(
    held: HeldStates, layout: DcpLayout, stage: list[_Source], place: int, shard: int
) -> Iterator[_Item]:
    size, ranks = layout.dtype_bytes, held.tensor_ranks
    for source in stage:
        tensor = source.tensor
        if source.is_counter:
            yield _Item((source.name, None, 0), STEP_BYTES, STEP_BYTES, False)
            continue
        is_cut = tensor.is_cut
        chunk = int(_chunk_bytes(source, layout)[shard])
        begin = min(shard * -(-tensor.rows // layout.shards), tensor.rows)
        whole = tensor.numel * (ranks if is_cut else 1) * size
        yield _Item((source.name, begin, place if is_cut else 0), whole, chunk, source.is_parameter)
    for number in range(GROUP_KEYS[held.optimizer]):
        yield _Item((f"{number}", None, 0), 0, 0, False)


def _without_copies(plans: list[list[_Item]]) -> list[list[_Item]]:
    """`dedup_save_plans`: ties go to the first of a Python set of the ranks' numbers, as there."""
    holders: dict[Key, set[int]] = defaultdict(set)
    weights: dict[Key, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan:
            holders[item.key].add(rank)
            weights[item.key] = item.weight or 1
    load = [0] * len(plans)
    writer: dict[Key, int] = {}
    for key, ranks in holders.items():
        chosen = min(ranks, key=lambda rank: load[rank])
        load[chosen] += weights[key]
        writer[key] = chosen
    return [[item for item in plan if writer[item.key] == rank] for rank, plan in enumerate(plans)]


def _parts(items: list[_Item], layout: DcpLayout) -> list[list[_Item]]:
    """The files of a rank: by item, or by thread (`_split_by_size_and_type`)."""
    if not layout.single_file_per_rank:
        return [[item] for item in items]
    if layout.threads == 1:
        return [items]
    parts: list[list[_Item]] = [[] for _ in range(layout.threads)]
    for number, value in enumerate(item for item in items if not item.weight):
        parts[number % layout.threads].append(value)
    load = [0] * layout.threads
    for item in sorted((item for item in items if item.weight), key=lambda item: -item.weight):
        lightest = load.index(min(load))
        parts[lightest].append(item)
        load[lightest] += item.weight
    return parts


def _file(name: str, rank: int, items: list[_Item], listed: int, list_key: str) -> SavedFile:
    parameters = sum(item.chunk for item in items if item.is_parameter)
    states = sum(item.chunk for item in items if not item.is_parameter)
    archives = sum(archive_bytes(item.chunk) if item.weight else VALUE_BYTES for item in items)
    if any(item.key[0] == list_key for item in items):
        archives += listed * _LISTED_NAME
    return SavedFile(name, rank, parameters, states, archives - parameters - states)


# -- [Note: many ranks] --------------------------------------------------------------------------------


def _by_place(held: HeldStates, layout: DcpLayout, sources: list[list[_Source]]) -> list[SavedFile]:
    world = held.world_size
    parameters, states, counts = (np.zeros(world, dtype=np.int64) for _ in range(3))
    counters = 0
    for stage, groups in zip(sources, held.ranks, strict=True):
        # [replica, tensor-parallel place]: bytes given so far, and of each place of the sharding group
        load = np.zeros((layout.replicas, held.tensor_ranks), dtype=np.int64)
        given = np.zeros((2, layout.replicas, held.tensor_ranks, layout.shards), dtype=np.int64)
        count = np.zeros(load.shape, dtype=np.int64)
        for source in stage:
            if source.is_counter:
                counters += 1
                continue
            chunks = _chunk_bytes(source, layout)
            weight = source.tensor.numel * layout.dtype_bytes
            kind = 0 if source.is_parameter else 1
            if source.tensor.is_cut:
                chosen, places = load.argmin(axis=0), np.arange(held.tensor_ranks)
                weight *= held.tensor_ranks
            else:
                first = np.unravel_index(int(load.argmin()), load.shape)
                chosen, places = np.array([first[0]]), np.array([first[1]])
            load[chosen, places] += weight
            given[kind, chosen, places] += chunks
            count[chosen, places] += 1
        for place, ranks in enumerate(groups):
            parameters[ranks] = given[0, :, place].reshape(-1)
            states[ranks] = given[1, :, place].reshape(-1)
            counts[ranks] = np.repeat(count[:, place], layout.shards)
    dealt = counters // world + (np.arange(world) < counters % world)
    states += STEP_BYTES * dealt
    each = archive_bytes(1 << 20) - (1 << 20)
    overhead = (counts + dealt) * each
    copies = counts + dealt if not layout.single_file_per_rank else np.full(world, layout.threads)
    ending = "0" if layout.threads == 1 and layout.single_file_per_rank else "*"
    columns = zip(parameters.tolist(), states.tolist(), overhead.tolist(), copies.tolist(), strict=True)
    return [SavedFile(f"__{rank}_{ending}.distcp", rank, *column) for rank, column in enumerate(columns)]
