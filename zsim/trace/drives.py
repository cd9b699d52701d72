"""Rates of a node's drives over time, summed over the requests of all its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from zsim.arrays import Floats
from zsim.trace.trace import Trace

DIRECTIONS = ("read", "write")


@dataclass(frozen=True, slots=True)
class DriveRates:
    """Bytes per second that a node's drives read and write from `seconds[i]` to `seconds[i + 1]`.

    They are 0 after the last time. A request counts with its mean rate.
    """

    seconds: Floats
    read: Floats
    write: Floats


def drive_rates(trace: Trace, rank: int) -> DriveRates | None:
    """The rates on the node of `rank`. None if nothing is read or written.

    `Trace.metadata["node_ranks"]` maps each traced rank to the traced ranks on its node, and these to the
    number of the node's ranks that each represents. Without it `rank` represents all ranks of its node.
    """
    rates = {kind: _changes(trace, members_of(trace, rank), f"nvme_{kind}") for kind in DIRECTIONS}
    times = np.unique(np.concatenate([changes[0] for changes in rates.values()]))
    if not len(times):
        return None
    levels = []
    for kind in DIRECTIONS:
        change_times, rate_changes = rates[kind]
        changes = np.zeros(len(times))
        np.add.at(changes, np.searchsorted(times, change_times), rate_changes)
        level = np.cumsum(changes)
        levels.append(np.where(level > 1e-9 * max(float(level.max(initial=0.0)), 1.0), level, 0.0))
    return DriveRates(times, *levels)


def members_of(trace: Trace, rank: int) -> Mapping[int, int]:
    """Traced ranks on the node of `rank` -> how many of the node's ranks each represents."""
    node_ranks = trace.metadata.get("node_ranks")
    if node_ranks is not None and rank in node_ranks:
        members: Mapping[int, int] = node_ranks[rank]
        return members
    return {rank: int(trace.metadata.get("gpus_per_node", 1))}


def _changes(trace: Trace, members: Mapping[int, int], kind: str) -> tuple[Floats, Floats]:
    """(times, changes of the rate in bytes per second)."""
    is_kind = np.array([info.kind == kind for info in trace.infos], dtype=bool)
    sizes = np.array([float(info.bytes) for info in trace.infos])
    span_indices = np.flatnonzero(is_kind[trace.info_indices] & np.isin(trace.ranks, list(members)))
    starts, ends = trace.start_seconds[span_indices], trace.end_seconds[span_indices]
    has_length = ends > starts
    span_indices, starts, ends = span_indices[has_length], starts[has_length], ends[has_length]
    counts = np.array([members[rank] for rank in trace.ranks[span_indices].tolist()], dtype=np.float64)
    rates = sizes[trace.info_indices[span_indices]] / (ends - starts) * counts
    return np.concatenate([starts, ends]), np.concatenate([rates, -rates])
