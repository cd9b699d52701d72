"""torch.distributed.checkpoint (DCP): what each rank writes after the planner has removed copies.

Transcribed from torch 2.13 distributed/checkpoint: `create_default_local_save_plan` (every rank lists its
chunk of each DTensor, and every plain tensor and value in full), `dedup_save_plans` (an item that several
ranks list goes to the rank with the fewest bytes so far, by the size of the full tensor), `write_data` and
`_split_by_size_and_type` (files of a rank). States are those of `get_model_state_dict` and
`get_optimizer_state_dict`. A tied weight is saved under both of its names.

# [Note: many ranks]
The planner goes through every item of every rank. Above `_MAX_ITEMS` it is run once for the chunk of a tensor
at one position of the sharding group. Chunks at other positions are shared by other ranks and are distributed
identically. Adam's step counters (4 bytes) are then dealt out evenly.

# [Note: spread experts]
torchtitan's routed experts are DTensors over a separate mesh. Their first dimension, the experts, is cut over
the ranks of expert parallelism. Each part is cut over the ranks that hold it, along the experts where there
are as many as ranks, else along the next dimension (0.2.2 models/llama4/infra/parallelize.py `apply_fsdp`).
Their step counters are plain tensors under one name, as all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.dataclass import dataclass
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
    """How tensors are cut over ranks, and how ranks write them."""

    shards: int
    """Ranks that every tensor is cut over along its first dimension."""
    replicas: int
    """Groups of ranks that hold the same states."""
    dtype_bytes: int
    """Bytes of an element of parameters and states."""
    threads: int = 1
    single_file_per_rank: bool = True
    expert_shards: int = 1
    """Ranks that routed experts are cut over, if these are expert-parallel."""
    is_on_host: bool = False
    """States live in host memory (`cpu_offload`)."""

    def shards_of(self, tensor: HeldTensor) -> int:
        return self.expert_shards if tensor.is_spread else self.shards

    def rows_of(self, tensor: HeldTensor) -> int:
        """Length of the dimension along which a tensor is cut, [Note: spread experts]."""
        if tensor.is_spread and self.expert_shards > tensor.rows:
            return tensor.shape[1]
        return tensor.rows


class _Item(NamedTuple):
    """An entry of a rank's plan."""

    key: Key
    weight: int
    """Bytes of the full tensor, by which files and ranks are balanced. 0 for a value that is no tensor."""
    chunk: int
    """Bytes of this rank's part."""
    is_parameter: bool


class _Source(NamedTuple):
    """A tensor in the order of the state dict."""

    name: str
    tensor: HeldTensor
    is_parameter: bool
    is_counter: bool = False
    """Whether it is Adam's step, a plain tensor."""


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
        on_host=local if layout.is_on_host else None,
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
    cut = [source.tensor for source in stage if not source.is_counter]
    return sum(
        min(layout.shards_of(one), max(1, layout.rows_of(one))) * held.places_of(one) - 1 for one in cut
    )


def chunk_rows(rows: int, shards: int) -> Ints:
    """Rows of every shard, as `torch.chunk` cuts them: equal ones, then a smaller one, then none."""
    each = -(-rows // shards)
    return np.clip(rows - each * np.arange(shards, dtype=np.int64), 0, each)


def _local_bytes(held: HeldStates, layout: DcpLayout, sources: list[list[_Source]]) -> Ints:
    """Bytes of the states that each rank holds."""
    found = np.zeros(held.world_size, dtype=np.int64)
    for number, stage in enumerate(sources):
        for is_spread, groups in _groups(held, number):
            shards = layout.expert_shards if is_spread else layout.shards
            mine = np.zeros(shards, dtype=np.int64)
            for source in stage:
                if source.is_counter:
                    mine += 0 if is_spread else STEP_BYTES
                elif source.tensor.is_spread == is_spread:
                    mine += _chunk_bytes(source, layout)
            for ranks in groups:
                found[ranks] += np.tile(mine, layout.replicas)
    return found


def _groups(held: HeldStates, stage: int) -> Iterator[tuple[bool, tuple[Ints, ...]]]:
    """(whether it is of expert-parallel tensors, ranks per model shard) of a pipeline rank's two kinds of
    tensors.
    """
    yield False, held.ranks[stage]
    if held.expert_ranks:
        yield True, held.expert_ranks[stage]


def _chunk_bytes(source: _Source, layout: DcpLayout) -> Ints:
    tensor = source.tensor
    rows = layout.rows_of(tensor)
    row_bytes = tensor.numel // rows * layout.dtype_bytes if rows else 0
    return chunk_rows(rows, layout.shards_of(tensor)) * row_bytes


# -- all items of all ranks ----------------------------------------------------------------------------


class _Spot(NamedTuple):
    """The position of a rank among those that hold the parts of a tensor."""

    place: int
    shard: int


def _one_by_one(held: HeldStates, layout: DcpLayout, sources: list[list[_Source]]) -> list[SavedFile]:
    plans: list[list[_Item]] = [[] for _ in range(held.world_size)]
    for number, stage in enumerate(sources):
        spots: dict[bool, dict[int, _Spot]] = {}
        for is_spread, groups in _groups(held, number):
            shards = layout.expert_shards if is_spread else layout.shards
            spots[is_spread] = {
                int(rank): _Spot(place, index % shards)
                for place, ranks in enumerate(groups)
                for index, rank in enumerate(ranks)
            }
        for rank in spots[False]:
            plans[rank] = list(_items(held, layout, stage, {kind: at[rank] for kind, at in spots.items()}))
    listed = sum(1 for stage in held.tensors for _ in trained(stage))
    files = []
    for rank, items in enumerate(_without_copies(plans)):
        for number, part in enumerate(_parts(items, layout)):
            name = f"__{rank}_{number}.distcp"
            files.append(_file(name, rank, part, listed, f"{GROUP_KEYS[held.optimizer] - 1}"))
    return files


def _items(
    held: HeldStates, layout: DcpLayout, stage: list[_Source], spots: Mapping[bool, _Spot]
) -> Iterator[_Item]:
    """A rank's plan. `shard_indices` is keyed by whether a tensor is of expert-parallel experts."""
    size = layout.dtype_bytes
    for source in stage:
        tensor = source.tensor
        if source.is_counter:
            yield _Item((source.name, None, 0), STEP_BYTES, STEP_BYTES, False)
            continue
        place, shard = spots[tensor.is_spread]
        places, rows = held.places_of(tensor), layout.rows_of(tensor)
        chunk = int(_chunk_bytes(source, layout)[shard])
        begin = min(shard * -(-rows // layout.shards_of(tensor)), rows)
        whole = tensor.numel * places * size
        yield _Item((source.name, begin, place if places > 1 else 0), whole, chunk, source.is_parameter)
    for number in range(GROUP_KEYS[held.optimizer]):
        yield _Item((f"{number}", None, 0), 0, 0, False)


def _without_copies(plans: list[list[_Item]]) -> list[list[_Item]]:
    """`dedup_save_plans`. Ties go to the first of a Python set of the ranks' numbers, as in torch."""
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


class _Given:
    """The chunks of tensors of one kind that ranks write.

    `load[replica, model_shard]` is bytes in the planner's balance. `bytes[kind, replica, model_shard, shard]`
    is bytes of parameters and of states. `count` is chunks.
    """

    def __init__(self, layout: DcpLayout, places: int, shards: int) -> None:
        self.load = np.zeros((layout.replicas, places), dtype=np.int64)
        self.bytes = np.zeros((2, layout.replicas, places, shards), dtype=np.int64)
        self.count = np.zeros(self.load.shape, dtype=np.int64)
        self.shards = shards

    def add(self, source: _Source, places: int, beside: Floats, layout: DcpLayout) -> None:
        """Assign a tensor's chunks, of `num_model_shards` parts, to the lightest ranks.

        `other_load[replica]` is what these have of the other kind.
        """
        load, weight = self.load + beside[:, None], source.tensor.numel * places * layout.dtype_bytes
        if places > 1 or load.shape[1] == 1:
            chosen, at = load.argmin(axis=0), np.arange(load.shape[1])
        else:
            first = np.unravel_index(int(load.argmin()), load.shape)
            chosen, at = np.array([first[0]]), np.array([first[1]])
        self.load[chosen, at] += weight
        self.bytes[0 if source.is_parameter else 1, chosen, at] += _chunk_bytes(source, layout)
        self.count[chosen, at] += 1


def _by_place(held: HeldStates, layout: DcpLayout, sources: list[list[_Source]]) -> list[SavedFile]:
    world = held.world_size
    parameters, states, counts = (np.zeros(world, dtype=np.int64) for _ in range(3))
    counters = 0
    for number, stage in enumerate(sources):
        given = {False: _Given(layout, held.tensor_ranks, layout.shards)}
        if held.expert_ranks:
            given[True] = _Given(layout, held.expert_places, layout.expert_shards)
        for source in stage:
            if source.is_counter:
                counters += 1
                continue
            kind = source.tensor.is_spread
            others = [one.load.mean(axis=1) for other, one in given.items() if other != kind]
            beside = others[0] if others else np.zeros(layout.replicas)
            given[kind].add(source, held.places_of(source.tensor), beside, layout)
        for kind, groups in _groups(held, number):
            of_kind = given[kind]
            for place, ranks in enumerate(groups):
                parameters[ranks] += of_kind.bytes[0, :, place].reshape(-1)
                states[ranks] += of_kind.bytes[1, :, place].reshape(-1)
                counts[ranks] += np.repeat(of_kind.count[:, place], of_kind.shards)
    dealt = counters // world + (np.arange(world) < counters % world)
    states += STEP_BYTES * dealt
    each = archive_bytes(1 << 20) - (1 << 20)
    overhead = (counts + dealt) * each
    copies = counts + dealt if not layout.single_file_per_rank else np.full(world, layout.threads)
    ending = "0" if layout.threads == 1 and layout.single_file_per_rank else "*"
    columns = zip(parameters.tolist(), states.tolist(), overhead.tolist(), copies.tolist(), strict=True)
    return [SavedFile(f"__{rank}_{ending}.distcp", rank, *column) for rank, column in enumerate(columns)]
