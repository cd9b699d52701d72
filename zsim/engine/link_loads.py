"""How busy every link is along a simulated step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field

import numpy as np
import simpy

from zsim.arrays import Floats
from zsim.dataclass import dataclass
from zsim.engine.prepare import prepare
from zsim.engine.simulate import Outcome
from zsim.fabric.fabric import Fabric
from zsim.fabric.messages import sends
from zsim.plan.ops import Collective, PointToPoint


def link_loads(outcome: Outcome, num_frames: int) -> Floats:
    """The fraction of each link's usable bandwidth that the job's collectives and messages take, as (links,
    frames).

    Each value is the mean over one of `num_frames` equal parts of the step. At 1 the link is full. A call's
    bytes move evenly from when the last simulated rank of its group has arrived and its latency is over until
    the call ends. Copies to host memory and drives are left out, and so are other jobs.
    """
    job, plan, topology = outcome.job, outcome.plan, outcome.topology
    prepared = prepare(
        job, plan, plan, topology, outcome.classes, outcome.slowdowns, simpy.Environment()
    )  # fmt: skip
    fabric, seconds = prepared.fabric, outcome.trace.step_seconds
    edges = np.linspace(0.0, seconds, num_frames + 1)
    found = np.zeros((topology.num_links, num_frames), dtype=np.float32)
    for (work, number), calls in _calls(outcome, fabric).items():
        start, end = calls.times(fabric.transfer(work, number).latency_seconds)
        done = np.clip((edges - start[:, None]) / (end - start)[:, None], 0.0, 1.0).sum(axis=0)
        links, carried = fabric.carried(work, number)
        found[links] += np.outer(carried, np.diff(done))
    whole: Floats = found / (topology.capacities()[:, None] * (seconds / num_frames))
    return whole


@dataclass
class _Calls:
    """The calls of one work on one communicator, by simulated rank: their starts and ends in order."""

    by_rank: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, rank: int, start: float, end: float) -> None:
        self.by_rank.setdefault(rank, []).append((start, end))

    def times(self, latency_seconds: float) -> tuple[Floats, Floats]:
        """(start, end) of the bytes of each call. A call lasts at least a nanosecond."""
        ranks = list(self.by_rank.values())
        alike = [np.array(one) for one in ranks if len(one) == len(ranks[0])]
        end = np.min([one[:, 1] for one in alike], axis=0)
        start = np.max([one[:, 0] for one in alike], axis=0) + latency_seconds
        return np.minimum(start, end - 1e-9), end


def _calls(outcome: Outcome, fabric: Fabric) -> dict[tuple[Collective, int], _Calls]:
    found: dict[tuple[Collective, int], _Calls] = {}
    plan, trace = outcome.plan, outcome.trace
    works = [[op.work for op in program.ops if op.work is not None] for program in plan.programs]
    for rank in outcome.classes.representatives:
        own = np.flatnonzero(trace.ranks == rank)
        times = zip(trace.start_seconds[own].tolist(), trace.end_seconds[own].tolist(), strict=True)
        for work, (start, end) in zip(works[int(plan.program_of[rank])], times, strict=True):
            if not isinstance(work, Collective | PointToPoint) or end <= start:
                continue
            for one, number in _on_links(work, int(rank), outcome, fabric):
                found.setdefault((one, number), _Calls()).add(int(rank), start, end)
    return found


def _on_links(
    work: Collective | PointToPoint, rank: int, outcome: Outcome, fabric: Fabric
) -> Iterator[tuple[Collective, int]]:
    """(work, communicator) of each collective that a rank's call puts on links. For messages these are the
    ones that the rank sends.
    """
    if isinstance(work, PointToPoint):
        for one in sends(work, outcome.plan.groups):
            yield one, fabric.pair_of(one.group, rank, is_sender=True)
    elif fabric.groups[work.group].size > 1:
        number = fabric.communicator_of(work.group, rank)
        if number >= 0:
            yield work, number
