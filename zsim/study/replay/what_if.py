"""Changes of a recorded step on other hardware: its groups, its kernels, and everything that stays.

# [Note: another number of GPUs]
The batch of each GPU stays, and with it the GPU's kernels and the full tensors of its collectives. Only
groups grow. The outermost group, whose groups fill the world (all ranks, or HSDP's replicas), grows with the
world, and inner groups stay. If the group over which states are sharded grows, their update takes
proportionally less time.

# [Note: another GPU]
Matrix products (attention included) scale with the ratio of the data sheets' bf16 peaks, all other kernels
with the ratio of memory bandwidths. Neither ratio accounts for shapes, power limits or launch-bound kernels.

Recorded ranks that are replayed concurrently. Each represents all ranks at its position in a pipeline.

# [Note: places of a pipeline]
A simulated step has one rank of every class, and the recording of a pipeline one rank of every stage: the
first, in even distances. The ranks up to the next recorded one are at the same position, and all of them
again where the stages begin anew. Groups of ranks without a file are copies of those with files, moved by the
distance between their first ranks. Whether ranks at one position also load the links identically is then
decided as for a simulated job.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from zsim.arrays import Ints
from zsim.engine.replay import collective_of, messages_of, shift_of
from zsim.errors import InputError, NotSimulatedError
from zsim.fabric.folding.classes import JobPlacement, refine_classes
from zsim.fabric.messages import Pairs, pair_name
from zsim.plan.ops import Collective, Group, RecordedWork
from zsim.plan.recorded.infer import POINT_TO_POINT
from zsim.plan.recorded.rank import RecordedRank
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.files import load_gpu
from zsim.specs.cluster.gpu import Gpu
from zsim.specs.experiment.placement import check_gpu_count
from zsim.specs.presets import gpu_preset_names
from zsim.specs.topology.topology import Topology
from zsim.trace.collective_names import group_ranks
from zsim.trace.trace import COLLECTIVES, SpanInfo, Trace

_MATRIX = re.compile(
    r"gemm|gemv|xmma|wgmma|cutlass|nvjet|Cijk_|flash|fmha|attention|attn|conv|winograd|mfma", re.IGNORECASE
)
_NOT_ON_FABRIC = frozenset({"gather", "scatter"})
_SHARDING = frozenset({"all_gather", "reduce_scatter"})
_UNEVEN_NOTE = (
    "ranks at one place of a pipeline lie at unequal places of the network; the slowest represents them all"
)


@dataclass
class WhatIf:
    """The hardware of a replay."""

    cluster: Cluster
    num_nodes: int
    gpus_per_node: int
    groups: dict[str, Group]
    """The groups of ranks on this hardware."""
    communicator_indices: Mapping[str, Ints] | None = None
    """See `Fabric`. Set where the recorded ranks are replayed concurrently, each for all ranks at its
    position in a pipeline.
    """
    notes: list[str] = field(default_factory=list)
    """Notes on the assumptions."""

    @property
    def topology(self) -> Topology:
        return Topology(self.cluster, self.num_nodes, self.gpus_per_node)

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.gpus_per_node


def make_what_if(step: Trace, cluster: Cluster, gpus: int | None, nodes: int | None) -> WhatIf:
    """The replay's hardware and groups. Raises InputError where the recorded groups do not fit the number of
    GPUs, or where sizes are not recorded.
    """
    if gpus is not None and nodes is not None and nodes * cluster.gpus_per_node != gpus:
        raise InputError(
            f"{nodes} nodes of {cluster.name} have {nodes * cluster.gpus_per_node} GPUs, found --gpus {gpus}"
        )
    world = gpus if gpus is not None else (nodes or 0) * cluster.gpus_per_node or step.world_size
    check_gpu_count(world, "replay: ")
    num_nodes, per_node = _shape(cluster, world)
    what_if = WhatIf(cluster, num_nodes, per_node, {})
    _check_sizes(step.infos)
    has_messages = any(info.messages for info in step.infos)
    if has_messages and world != step.world_size:
        raise NotSimulatedError(
            f"replay: ranks of the recording send to each other, and {world} GPUs have other pairs than "
            f"{step.world_size}; simulate the job instead (zsim run --gpus {world})"
        )
    representatives = find_representatives(step, what_if.topology) if has_messages else None
    if representatives is not None:
        what_if.groups.update(representatives.groups)
        what_if.communicator_indices = representatives.communicator_indices
        what_if.notes += [] if representatives.by_links else [_UNEVEN_NOTE]
        return what_if
    collective_infos = {
        info.group: info
        for info in step.infos
        if info.kind in COLLECTIVES and info.kind not in POINT_TO_POINT
    }
    for name, info in collective_infos.items():
        what_if.groups[name] = _group(step, name, info, world, what_if.notes)
    if any(info.kind in POINT_TO_POINT for info in step.infos):
        what_if.notes.append("send and recv take their recorded time: their fabric is not modelled here")
    return what_if


def _shape(cluster: Cluster, gpus: int) -> tuple[int, int]:
    per_node = cluster.gpus_per_node
    if gpus <= per_node:
        return 1, gpus
    if gpus % per_node:
        raise InputError(
            f"{gpus} GPUs do not fill nodes of {per_node} ({cluster.name}); expected a multiple of {per_node}"
        )
    return gpus // per_node, per_node


def _group(step: Trace, name: str, info: SpanInfo, world: int, notes: list[str]) -> Group:
    """The group in the new world. See [Note: another number of GPUs]."""
    recorded_shape = step.metadata.get("groups", {}).get(name)
    size, stride = recorded_shape or (info.group_size, 1)
    if stride is None:
        raise NotSimulatedError(
            f"replay: group '{name}' has ranks at unequal distances; replay without --cluster"
        )
    if recorded_shape is None and 1 < size < step.world_size:
        notes.append(f"which ranks are in group '{name}' is not recorded: taken to be neighbours")
    if world != step.world_size and size * stride == step.world_size:
        grown = size * world
        if grown % step.world_size or grown < step.world_size:
            raise InputError(
                f"group '{name}' of {size} ranks cannot grow from {step.world_size} to {world} GPUs; "
                f"expected a multiple of {step.world_size // size}"
            )
        size = grown // step.world_size
    rows = step.metadata.get("group_members", {}).get(name, ())
    if world == step.world_size and world % (size * stride) and any(0 in row for row in rows):
        return Group(name, np.array([row for row in rows if 0 in row]))  # the first and the last stage
    if world % (size * stride):
        raise InputError(
            f"{world} GPUs do not split into groups '{name}' of {size} ranks {stride} apart; expected a "
            f"multiple of {size * stride}"
        )
    return Group.regular(name, world, size, stride)


def _check_sizes(infos: Iterable[SpanInfo]) -> None:
    unsized = [info for info in infos if info.kind in COLLECTIVES and not info.bytes]
    if unsized:
        raise InputError(
            f"the sizes of {len(unsized)} kinds of collectives are not recorded ({unsized[0].name[:40]}), so "
            "they cannot be put on another fabric; record with torch.profiler (torch 2.1 or newer, or "
            "record_shapes=True), or replay without --cluster"
        )
    unknown = [info.kind for info in infos if info.kind in _NOT_ON_FABRIC]
    if unknown:
        raise NotSimulatedError(f"replay: {unknown[0]} on a modelled fabric; replay without --cluster")


def change_rank(rank: RecordedRank, step: Trace, what_if: WhatIf, recorded_gpu: Gpu | None) -> RecordedRank:
    """The rank with group sizes and kernel durations changed for the new hardware."""
    shards = _shard_ratio(step, what_if)
    matrix, memory = speedups(recorded_gpu, what_if.cluster.gpu)

    def change_work(work: RecordedWork) -> RecordedWork:
        info, seconds = work.info, work.seconds
        if info is None:
            return work
        if (
            info.kind in POINT_TO_POINT and what_if.communicator_indices is None
        ):  # with what it waited: see the note
            return replace(work, meets=False, seconds=work.bounds[1] - work.bounds[0])
        if info.kind in COLLECTIVES:
            info = info._replace(group_size=what_if.groups[info.group].size)
        elif info.kind in ("compute", "optimizer", "copy"):
            seconds /= matrix if is_matrix_product(info) else memory
            if info.kind == "optimizer":
                seconds *= shards
        return replace(work, info=info, seconds=seconds)

    return rank.map_payloads(change_work)


def _shard_ratio(step: Trace, what_if: WhatIf) -> float:
    """The recorded over the new size of the group over which states are sharded, or 1 without sharding."""
    sharding = {info.group: info.group_size for info in step.infos if info.kind in _SHARDING}
    if not sharding:
        return 1.0
    name = max(sharding, key=lambda group: sharding[group])
    ratio = sharding[name] / what_if.groups[name].size
    if ratio != 1.0:
        what_if.notes.append(
            f"the optimizer's kernels take {ratio:.3g} of their recorded time: states are sharded over "
            f"{what_if.groups[name].size} ranks, not {sharding[name]}"
        )
    return ratio


def is_matrix_product(info: SpanInfo) -> bool:
    """Whether a kernel scales with the GPU's peak. Its arithmetic intensity decides where it is known, else
    its name.
    """
    if info.flops and info.hbm_bytes:
        return info.flops / info.hbm_bytes > 100.0  # FLOP per byte; the ridge of current GPUs is 150 to 300
    return _MATRIX.search(info.name) is not None


def speedups(recorded: Gpu | None, new: Gpu) -> tuple[float, float]:
    if recorded is None or recorded.name == new.name:
        return 1.0, 1.0
    return _peak(new) / _peak(recorded), new.memory.bandwidth / recorded.memory.bandwidth


def _peak(gpu: Gpu) -> float:
    """FLOP/s of 16-bit matrix products (fp16, else fp32, where the GPU has no bf16)."""
    return gpu.peak.bf16 or gpu.peak.fp16 or gpu.peak.fp32


def recorded_gpu(metadata: Mapping[str, object], gpu_name: str | None) -> Gpu | None:
    """The GPU of the recording, or None if it is unknown.

    Without `gpu_name` it is the preset that best fits the device's name and memory: a module (SXM) rather
    than a PCIe card, unless the name says so.
    """
    if gpu_name is not None:
        return load_gpu(gpu_name)
    device = str(metadata.get("gpu", ""))
    if device in gpu_preset_names():
        return load_gpu(device)
    words = set(re.findall(r"[a-z]*\d+[a-z]*", device.lower()))
    fitting = [name for name in gpu_preset_names() if _model_of(name) in words]
    memory = metadata.get("gpu_memory_bytes")
    gpus = [load_gpu(name) for name in fitting]
    if not gpus:
        return None
    memory_bytes = float(memory) if isinstance(memory, int | float) else gpus[0].memory.capacity
    is_card = "pcie" in device.lower()
    return min(
        gpus, key=lambda gpu: (abs(gpu.memory.capacity - memory_bytes), ("pcie" in gpu.name) != is_card)
    )


def _model_of(preset: str) -> str:
    """The model in a preset's name: `h100-sxm-80gb` -> h100, `rtx-4090` -> 4090."""
    return next((word for word in preset.split("-") if re.search(r"\d", word)), preset)


@dataclass(frozen=True)
class RepresentativeRanks:
    """The recorded ranks as representatives of the whole world."""

    groups: dict[str, Group]
    """The groups of the whole world, pairs included."""
    communicator_indices: Mapping[str, Ints]
    """See `Fabric`."""
    by_links: bool
    """Whether members of a block load the same links identically."""


def find_representatives(step: Trace, topology: Topology) -> RepresentativeRanks | None:
    """The representatives of the step's world, or None if the recording does not determine them. None too if
    it has no messages whose two sides are known.
    """
    ranks = np.unique(step.ranks).tolist()
    info_of_group = {info.group: info for info in step.infos if info.kind in COLLECTIVES}
    if not any(info.messages for info in step.infos) or not _are_messages_paired(step.infos):
        return None
    rows = {name: _recorded_communicators(step, name, info, ranks) for name, info in info_of_group.items()}
    kinds = _rank_kinds(ranks, step.world_size)
    if kinds is None or not all(_is_complete(info, rows.get(info.group, []), kinds) for info in step.infos):
        return None
    groups: dict[str, Group] = {}
    for name, communicators in rows.items():
        members = _translate_communicators(communicators, kinds)
        if members is None:
            return None
        groups[name] = Group(name, members)
    payloads = [payload for info in dict.fromkeys(step.infos) for payload in _link_payloads(info)]
    groups |= _pairs(step, groups, kinds, ranks)
    placement = JobPlacement(topology, groups, payloads, kinds)
    for by_links in (True, False):
        classes = refine_classes([placement], by_links=by_links)[0]
        if classes.representatives == sorted(ranks):
            return RepresentativeRanks(groups, classes.class_of_group, by_links)
    return None


def _are_messages_paired(infos: Iterable[SpanInfo]) -> bool:
    """Whether every send has a receive of its size, one position back or any other number of positions."""
    sides: dict[str, set[tuple[str, int, int]]] = {"send": set(), "recv": set()}
    for info in infos:
        for direction, count, distance in info.messages:
            sides[direction].add((info.group, count, shift_of(direction, distance, max(info.group_size, 1))))
    return sides["send"] == sides["recv"]


def _recorded_communicators(
    step: Trace, name: str, info: SpanInfo, ranks: Sequence[int]
) -> list[tuple[int, ...]]:
    """The communicators of a kind of group that the recording names."""
    named = step.metadata.get("group_members", {}).get(name)
    if named is not None:
        return [tuple(row) for row in named]
    rows = (tuple(group_ranks(name, info.group_size, rank, step.metadata)) for rank in ranks)
    return list(dict.fromkeys(rows))


def _rank_kinds(ranks: Sequence[int], world: int) -> Ints | None:
    """A number per rank of the world, equal for ranks at the position of one recorded rank, or None if the
    recorded ranks do not have one position each. See [Note: places of a pipeline].
    """
    if len(ranks) == world:
        return np.arange(world)
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else world
    is_even = list(ranks) == list(range(0, len(ranks) * stride, stride))
    if not is_even or world % (len(ranks) * stride):
        return None
    return np.arange(world) // stride % len(ranks)


def _is_complete(info: SpanInfo, rows: Sequence[tuple[int, ...]], kinds: Ints) -> bool:
    """Whether the other sides of a call's messages are recorded.

    The ranks of the call's group are at one position each, or all at the same one. In the latter case every
    call must send on what it receives, as in a ring. (A file of one pipeline rank has neither.)
    """
    if not info.messages:
        return True
    if all(len(set(kinds[list(row)].tolist())) == len(row) for row in rows):
        return True
    sides: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for direction, count, distance in info.messages:
        sides[direction == "send"].append((count, shift_of(direction, distance, info.group_size)))
    is_ring = sorted(sides[True]) == sorted(sides[False])
    return is_ring and all(len(set(kinds[list(row)].tolist())) == 1 for row in rows)


def _translate_communicators(communicators: Sequence[tuple[int, ...]], kinds: Ints) -> Ints | None:
    """All communicators of a kind of group, from those that are recorded, or None where they do not fit the
    world.
    """
    world = len(kinds)
    by_kind = {int(kinds[row[0]]): row for row in reversed(communicators)}
    is_free, rows = np.ones(world, dtype=bool), []
    exact = {row[0]: row for row in communicators}
    for rank in range(world):
        template = exact.get(rank) or by_kind.get(int(kinds[rank]))
        if not is_free[rank] or template is None:
            continue
        row = np.array(template) + (rank - template[0])
        if row.max() >= world or row.min() < 0 or not is_free[row].all():
            return None
        if not np.array_equal(kinds[row], kinds[np.array(template)]):
            return None
        is_free[row] = False
        rows.append(row)
    return np.array(rows) if rows else None


def _link_payloads(info: SpanInfo) -> list[Collective]:
    """The payloads that a call puts on links: a collective, or its sends."""
    if info.messages:
        return [payload for is_sent, payload in messages_of(info) if is_sent]
    return [collective_of(info)] if info.kind in COLLECTIVES else []


def _pairs(step: Trace, groups: Mapping[str, Group], kinds: Ints, ranks: Sequence[int]) -> dict[str, Pairs]:
    """The pairs between which ranks send, by name."""
    senders: dict[tuple[str, int], set[int]] = {}
    for rank in ranks:
        for info in {step.infos[i] for i in np.unique(step.info_indices[step.ranks == rank]).tolist()}:
            for direction, _, distance in info.messages:
                if direction == "send":
                    key = info.group, shift_of(direction, distance, info.group_size)
                    senders.setdefault(key, set()).add(int(kinds[rank]))
    pairs_by_name = {}
    for (name, shift), sender_kinds in sorted(senders.items()):
        members = groups[name].members
        sends = np.isin(kinds[members], sorted(sender_kinds))
        pairs = np.stack([members, np.roll(members, -shift, axis=1)], axis=2)[sends]
        pairs_by_name[pair_name(name, shift)] = Pairs(pair_name(name, shift), pairs)
    return pairs_by_name
