"""Checkpoints of torch's frameworks: torch.distributed.checkpoint, or one file of all states.

# [Note: DCP]
In torch.distributed.checkpoint each rank writes what is left after the planner has removed copies.
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

# [Note: a full state dict]
Rank 0 writes one file with all states: `torch.save`, after a gather where states are sharded. torch 2.13
distributed/checkpoint/state_dict.py with `full_state_dict=True, cpu_offload=True`: every DTensor is
all-gathered in turn, and rank 0 keeps it in host memory. A gathered tensor is the front of its padded buffer,
and torch.save writes buffers, so padding is saved. A tied weight, one buffer before, is then two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.dtypes import DTYPE_BYTES
from zsim.goodput.checkpoints.saved import (
    GROUP_KEYS,
    STATES,
    STEP_BYTES,
    VALUE_BYTES,
    Config,
    FrameworkCheckpoint,
    ModelStates,
    PickledFile,
    SavedFile,
    SavedFiles,
    StateTensor,
    archive_bytes,
    trainable_tensors,
    untied_tensors,
)
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.run.checkpoint import CheckpointTable


class TorchCheckpoint(FrameworkCheckpoint[Config]):
    """States that are cut over the ranks of a replica."""

    formats = ("dcp", "full")
    has_local_replicas = True

    def num_copies(self, config: Config, states: ModelStates) -> int:
        """Groups of ranks that hold the same states."""
        raise NotImplementedError

    def element_bytes(self, job: Job) -> int:
        """Bytes of an element of parameters and states."""
        return DTYPE_BYTES[job.training.stored_dtype]

    def is_on_host(self, config: Config) -> bool:
        """Whether states live in host memory."""
        return False

    def layout(self, job: Job, config: Config, states: ModelStates, table: CheckpointTable) -> DcpLayout:
        """How tensors are cut over ranks, and how ranks write them."""
        copies = self.num_copies(config, states)
        return DcpLayout(
            states.data_ranks // copies, copies, self.element_bytes(job), table.threads,
            table.single_file_per_rank, states.expert_data_ranks // copies, self.is_on_host(config),
        )  # fmt: skip

    def files(self, job: Job, config: Config, states: ModelStates, table: CheckpointTable) -> SavedFiles:
        layout = self.layout(job, config, states, table)
        return full_file(states, layout) if table.format == "full" else dcp_files(states, layout)

    def num_shards(self, job: Job, config: Config, states: ModelStates) -> int:
        return self.layout(job, config, states, CheckpointTable()).shards


FILE = "checkpoint.pt"

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

    def shards_of(self, tensor: StateTensor) -> int:
        return self.expert_shards if tensor.is_expert_parallel else self.shards

    def rows_of(self, tensor: StateTensor) -> int:
        """Length of the dimension along which a tensor is cut, [Note: spread experts]."""
        if tensor.is_expert_parallel and self.expert_shards > tensor.rows:
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
    tensor: StateTensor
    is_parameter: bool
    is_counter: bool = False
    """Whether it is Adam's step, a plain tensor."""


def dcp_files(model_states: ModelStates, layout: DcpLayout) -> SavedFiles:
    """The files of `dcp.save`."""
    sources = [_sources(model_states, stage) for stage in model_states.tensors]
    values = GROUP_KEYS[model_states.optimizer]
    per_stage = model_states.data_ranks * model_states.tensor_ranks
    items = sum((len(stage) + values) * per_stage for stage in sources)
    plan_files = _plan_items if items <= _MAX_ITEMS else _plan_chunks
    files = plan_files(model_states, layout, sources)
    local = _local_bytes(model_states, layout, sources)
    names = sum(map(len, sources)) + values
    chunks = names + sum(_extra_chunks(model_states, layout, stage) for stage in sources)
    metadata = SavedFile(".metadata", 0, overhead=_METADATA_NAME * names + _METADATA_CHUNK * chunks)
    return SavedFiles(
        "dcp", (metadata, *files), staged=local, read=local, items=items, chunks=chunks,
        read_items=items, states=model_states.num_parameters, is_synced=True,
        is_copied_ahead=True, is_staged_by_item=True,
        on_host=local if layout.is_on_host else None,
    )  # fmt: skip


def _sources(model_states: ModelStates, stage: tuple[StateTensor, ...]) -> list[_Source]:
    sources = [_Source(tensor.name, tensor, True) for tensor in stage]
    for tensor in trainable_tensors(stage):
        if model_states.has_steps:
            sources.append(_Source(f"{tensor.name}.step", tensor, False, is_counter=True))
        sources += [
            _Source(f"{tensor.name}.{name}", tensor, False) for name in STATES[model_states.optimizer]
        ]
    return sources


def _extra_chunks(model_states: ModelStates, layout: DcpLayout, stage: list[_Source]) -> int:
    """Chunks of a stage beyond one per name."""
    tensors = [source.tensor for source in stage if not source.is_counter]
    return sum(
        min(layout.shards_of(tensor), max(1, layout.rows_of(tensor))) * model_states.model_shards_of(tensor)
        - 1
        for tensor in tensors
    )


def chunk_rows(rows: int, shards: int) -> Ints:
    """Rows of every shard, as `torch.chunk` cuts them: equal ones, then a smaller one, then none."""
    rows_per_shard = -(-rows // shards)
    return np.clip(rows - rows_per_shard * np.arange(shards, dtype=np.int64), 0, rows_per_shard)


def _local_bytes(model_states: ModelStates, layout: DcpLayout, sources: list[list[_Source]]) -> Ints:
    """Bytes of the states that each rank holds."""
    bytes_per_rank = np.zeros(model_states.world_size, dtype=np.int64)
    for stage_index, stage in enumerate(sources):
        for is_spread, groups in _groups(model_states, stage_index):
            shards = layout.expert_shards if is_spread else layout.shards
            bytes_per_shard = np.zeros(shards, dtype=np.int64)
            for source in stage:
                if source.is_counter:
                    bytes_per_shard += 0 if is_spread else STEP_BYTES
                elif source.tensor.is_expert_parallel == is_spread:
                    bytes_per_shard += _chunk_bytes(source, layout)
            for ranks in groups:
                bytes_per_rank[ranks] += np.tile(bytes_per_shard, layout.replicas)
    return bytes_per_rank


def _groups(model_states: ModelStates, stage: int) -> Iterator[tuple[bool, tuple[Ints, ...]]]:
    """(whether it is of expert-parallel tensors, ranks per model shard) of a pipeline rank's two kinds of
    tensors.
    """
    yield False, model_states.ranks[stage]
    if model_states.expert_ranks:
        yield True, model_states.expert_ranks[stage]


def _chunk_bytes(source: _Source, layout: DcpLayout) -> Ints:
    tensor = source.tensor
    rows = layout.rows_of(tensor)
    row_bytes = tensor.numel // rows * layout.dtype_bytes if rows else 0
    return chunk_rows(rows, layout.shards_of(tensor)) * row_bytes


# -- all items of all ranks ----------------------------------------------------------------------------


class _ShardIndex(NamedTuple):
    """The position of a rank among those that hold the parts of a tensor."""

    model_shard: int
    shard: int


def _plan_items(
    model_states: ModelStates, layout: DcpLayout, sources: list[list[_Source]]
) -> list[SavedFile]:
    plans: list[list[_Item]] = [[] for _ in range(model_states.world_size)]
    for number, stage in enumerate(sources):
        shard_indices: dict[bool, dict[int, _ShardIndex]] = {}
        for is_spread, groups in _groups(model_states, number):
            shards = layout.expert_shards if is_spread else layout.shards
            shard_indices[is_spread] = {
                int(rank): _ShardIndex(model_shard, index % shards)
                for model_shard, ranks in enumerate(groups)
                for index, rank in enumerate(ranks)
            }
        for rank in shard_indices[False]:
            plans[rank] = list(
                _items(model_states, layout, stage, {kind: at[rank] for kind, at in shard_indices.items()})
            )
    num_listed = sum(1 for stage in model_states.tensors for _ in trainable_tensors(stage))
    files = []
    for rank, items in enumerate(_remove_duplicates(plans)):
        for number, file_items in enumerate(_split_into_files(items, layout)):
            name = f"__{rank}_{number}.distcp"
            files.append(
                _file(name, rank, file_items, num_listed, f"{GROUP_KEYS[model_states.optimizer] - 1}")
            )
    return files


def _items(
    model_states: ModelStates,
    layout: DcpLayout,
    stage: list[_Source],
    shard_indices: Mapping[bool, _ShardIndex],
) -> Iterator[_Item]:
    """A rank's plan. `shard_indices` is keyed by whether a tensor is of expert-parallel experts."""
    size = layout.dtype_bytes
    for source in stage:
        tensor = source.tensor
        if source.is_counter:
            yield _Item((source.name, None, 0), STEP_BYTES, STEP_BYTES, False)
            continue
        model_shard, shard = shard_indices[tensor.is_expert_parallel]
        num_model_shards, rows = model_states.model_shards_of(tensor), layout.rows_of(tensor)
        chunk = int(_chunk_bytes(source, layout)[shard])
        begin = min(shard * -(-rows // layout.shards_of(tensor)), rows)
        full_bytes = tensor.numel * num_model_shards * size
        yield _Item(
            (source.name, begin, model_shard if num_model_shards > 1 else 0),
            full_bytes,
            chunk,
            source.is_parameter,
        )
    for number in range(GROUP_KEYS[model_states.optimizer]):
        yield _Item((f"{number}", None, 0), 0, 0, False)


def _remove_duplicates(plans: list[list[_Item]]) -> list[list[_Item]]:
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
        writer_rank = min(ranks, key=lambda rank: load[rank])
        load[writer_rank] += weights[key]
        writer[key] = writer_rank
    return [[item for item in plan if writer[item.key] == rank] for rank, plan in enumerate(plans)]


def _split_into_files(items: list[_Item], layout: DcpLayout) -> list[list[_Item]]:
    """The files of a rank: by item, or by thread (`_split_by_size_and_type`)."""
    if not layout.single_file_per_rank:
        return [[item] for item in items]
    if layout.threads == 1:
        return [items]
    files: list[list[_Item]] = [[] for _ in range(layout.threads)]
    for number, value in enumerate(item for item in items if not item.weight):
        files[number % layout.threads].append(value)
    load = [0] * layout.threads
    for item in sorted((item for item in items if item.weight), key=lambda item: -item.weight):
        lightest = load.index(min(load))
        files[lightest].append(item)
        load[lightest] += item.weight
    return files


def _file(name: str, rank: int, items: list[_Item], listed: int, list_key: str) -> SavedFile:
    parameters = sum(item.chunk for item in items if item.is_parameter)
    states = sum(item.chunk for item in items if not item.is_parameter)
    archives = sum(archive_bytes(item.chunk) if item.weight else VALUE_BYTES for item in items)
    if any(item.key[0] == list_key for item in items):
        archives += listed * _LISTED_NAME
    return SavedFile(name, rank, parameters, states, archives - parameters - states)


# -- [Note: many ranks] --------------------------------------------------------------------------------


class _ChunkBalance:
    """The chunks of tensors of one kind that ranks write.

    `load[replica, model_shard]` is bytes in the planner's balance. `bytes[kind, replica, model_shard, shard]`
    is bytes of parameters and of states. `count` is chunks.
    """

    def __init__(self, layout: DcpLayout, num_model_shards: int, shards: int) -> None:
        self.load = np.zeros((layout.replicas, num_model_shards), dtype=np.int64)
        self.bytes = np.zeros((2, layout.replicas, num_model_shards, shards), dtype=np.int64)
        self.count = np.zeros(self.load.shape, dtype=np.int64)
        self.shards = shards

    def add(self, source: _Source, num_model_shards: int, other_load: Floats, layout: DcpLayout) -> None:
        """Assign a tensor's chunks, of `num_model_shards` parts, to the lightest ranks.

        `other_load[replica]` is what these have of the other kind.
        """
        load, weight = (
            self.load + other_load[:, None],
            source.tensor.numel * num_model_shards * layout.dtype_bytes,
        )
        if num_model_shards > 1 or load.shape[1] == 1:
            replica_chosen, shard_index = load.argmin(axis=0), np.arange(load.shape[1])
        else:
            first = np.unravel_index(int(load.argmin()), load.shape)
            replica_chosen, shard_index = np.array([first[0]]), np.array([first[1]])
        self.load[replica_chosen, shard_index] += weight
        self.bytes[0 if source.is_parameter else 1, replica_chosen, shard_index] += _chunk_bytes(
            source, layout
        )
        self.count[replica_chosen, shard_index] += 1


def _plan_chunks(
    model_states: ModelStates, layout: DcpLayout, sources: list[list[_Source]]
) -> list[SavedFile]:
    world = model_states.world_size
    parameters, states, counts = (np.zeros(world, dtype=np.int64) for _ in range(3))
    counters = 0
    for number, stage in enumerate(sources):
        balances = {False: _ChunkBalance(layout, model_states.tensor_ranks, layout.shards)}
        if model_states.expert_ranks:
            balances[True] = _ChunkBalance(layout, model_states.expert_shards, layout.expert_shards)
        for source in stage:
            if source.is_counter:
                counters += 1
                continue
            kind = source.tensor.is_expert_parallel
            other_loads = [
                balance.load.mean(axis=1)
                for balance_kind, balance in balances.items()
                if balance_kind != kind
            ]
            other_load = other_loads[0] if other_loads else np.zeros(layout.replicas)
            balances[kind].add(source, model_states.model_shards_of(source.tensor), other_load, layout)
        for kind, groups in _groups(model_states, number):
            kind_balance = balances[kind]
            for model_shard, ranks in enumerate(groups):
                parameters[ranks] += kind_balance.bytes[0, :, model_shard].reshape(-1)
                states[ranks] += kind_balance.bytes[1, :, model_shard].reshape(-1)
                counts[ranks] += np.repeat(kind_balance.count[:, model_shard], kind_balance.shards)
    num_counters = counters // world + (np.arange(world) < counters % world)
    states += STEP_BYTES * num_counters
    overhead_per_item = archive_bytes(1 << 20) - (1 << 20)
    overhead = (counts + num_counters) * overhead_per_item
    copies = counts + num_counters if not layout.single_file_per_rank else np.full(world, layout.threads)
    ending = "0" if layout.threads == 1 and layout.single_file_per_rank else "*"
    columns = zip(parameters.tolist(), states.tolist(), overhead.tolist(), copies.tolist(), strict=True)
    return [SavedFile(f"__{rank}_{ending}.distcp", rank, *column) for rank, column in enumerate(columns)]


def full_file(model_states: ModelStates, layout: DcpLayout) -> SavedFiles:
    """The file, of all pipeline and tensor-parallel ranks."""
    file, gathered = PickledFile(FILE, 0), []
    for stage in model_states.tensors:
        for tensor in stage if layout.shards > 1 else untied_tensors(stage):
            size = _padded_bytes(model_states, tensor, layout)
            file.add_parameter(size)
            gathered.append(size)
        for tensor in trainable_tensors(stage):
            size = _padded_bytes(model_states, tensor, layout)
            file.add_states([size] * model_states.num_states + [STEP_BYTES] * model_states.has_steps)
            gathered += [size] * model_states.num_states
    world = model_states.world_size
    is_sharded = layout.shards * model_states.tensor_ranks * model_states.expert_shards > 1
    staged, read = np.zeros((2, world), dtype=np.int64)
    staged[0] = read[0] = file.tensors
    return SavedFiles(
        "full",
        (file.build(),),
        staged,
        read,
        gathered=tuple(gathered) if is_sharded else (),
        read_once=True,
        states=model_states.num_parameters,
    )


def _padded_bytes(model_states: ModelStates, tensor: StateTensor, layout: DcpLayout) -> int:
    """Bytes of a gathered tensor. For expert-parallel experts, over the ranks that cut each model shard
    first.
    """
    rows, shards = layout.rows_of(tensor), layout.shards_of(tensor)
    padded = -(-rows // shards) * shards
    return tensor.numel // rows * padded * model_states.model_shards_of(tensor) * layout.dtype_bytes
