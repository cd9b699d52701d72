"""How busy every link is along a simulated step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import simpy

from zsim.arrays import Floats
from zsim.engine.prepare import StepRequest, prepare
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
    topology = outcome.topology
    request = StepRequest(outcome.job, outcome.plan, topology, outcome.slowdowns, is_steady=False)
    prepared = prepare(request, outcome.classes, simpy.Environment())
    fabric, seconds = prepared.fabric, outcome.trace.step_seconds
    edges = np.linspace(0.0, seconds, num_frames + 1)
    frame_bytes = np.zeros((topology.num_links, num_frames), dtype=np.float32)
    for (work, number), calls in _calls(outcome, fabric).items():
        start, end = calls.times(fabric.transfer(work, number).latency_seconds)
        calls_done = np.clip((edges - start[:, None]) / (end - start)[:, None], 0.0, 1.0).sum(axis=0)
        links, carried_bytes = fabric.link_bytes(work, number)
        frame_bytes[links] += np.outer(carried_bytes, np.diff(calls_done))
    loads: Floats = frame_bytes / (topology.capacities()[:, None] * (seconds / num_frames))
    return loads


@dataclass
class _Calls:
    """The calls of one work on one communicator, by simulated rank: their starts and ends in order."""

    by_rank: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, rank: int, start: float, end: float) -> None:
        self.by_rank.setdefault(rank, []).append((start, end))

    def times(self, latency_seconds: float) -> tuple[Floats, Floats]:
        """(start, end) of the bytes of each call. A call lasts at least a nanosecond."""
        calls_per_rank = list(self.by_rank.values())
        complete_calls = [np.array(calls) for calls in calls_per_rank if len(calls) == len(calls_per_rank[0])]
        end = np.min([times[:, 1] for times in complete_calls], axis=0)
        start = np.max([times[:, 0] for times in complete_calls], axis=0) + latency_seconds
        return np.minimum(start, end - 1e-9), end


def _calls(outcome: Outcome, fabric: Fabric) -> dict[tuple[Collective, int], _Calls]:
    calls_of_work: dict[tuple[Collective, int], _Calls] = {}
    plan, trace = outcome.plan, outcome.trace
    payloads = [[op.work for op in program.ops if op.work is not None] for program in plan.programs]
    for rank in outcome.classes.representatives:
        rows = np.flatnonzero(trace.ranks == rank)
        times = zip(trace.start_seconds[rows].tolist(), trace.end_seconds[rows].tolist(), strict=True)
        for work, (start, end) in zip(payloads[int(plan.program_of[rank])], times, strict=True):
            if not isinstance(work, Collective | PointToPoint) or end <= start:
                continue
            for collective, number in _collectives_of_call(work, int(rank), outcome, fabric):
                calls_of_work.setdefault((collective, number), _Calls()).add(int(rank), start, end)
    return calls_of_work


def _collectives_of_call(
    work: Collective | PointToPoint, rank: int, outcome: Outcome, fabric: Fabric
) -> Iterator[tuple[Collective, int]]:
    """(work, communicator) of each collective that a rank's call puts on links. For messages these are the
    ones that the rank sends.
    """
    if isinstance(work, PointToPoint):
        for message in sends(work, outcome.plan.groups):
            yield message, fabric.pair_of(message.group, rank, is_sender=True)
    elif fabric.groups[work.group].size > 1:
        number = fabric.communicator_of(work.group, rank)
        if number >= 0:
            yield work, number
