"""Replayed ranks on a clock: collectives take what each rank recorded, or what a topology's links need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import simpy

from zsim.engine.replay import OnEnd, Replayer
from zsim.fabric.fabric import Fabric
from zsim.fabric.flight import Flight
from zsim.fabric.folding.alike import are_alike
from zsim.plan.ops import Collective, CollectiveKind, Group
from zsim.plan.recorded.replay_ops import ReplayOp, ReplayPlan, as_recorded
from zsim.specs.topology.topology import Topology
from zsim.trace.trace import Trace

_KINDS: Mapping[str, CollectiveKind] = {
    "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce",
    "all_to_all": "all_to_all", "broadcast": "broadcast", "reduce": "reduce",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a step is replayed. `is_folded`: the replayed rank stands for all; `slowdown`: how much slower
    kernels run there while a collective is under way."""

    topology: Topology
    groups: Mapping[str, Group]
    is_folded: bool
    slowdown: float

    def is_uneven(self) -> bool:
        """Whether one rank stands for others at unequal places of the network."""
        return self.is_folded and not are_alike(self.topology, self.groups)


def run_replay(
    step: Trace, plans: Mapping[int, ReplayPlan], place: Place | None, num_steps: int = 1
) -> tuple[dict[int, float], Trace]:
    """Seconds of each rank's step, and the step as a trace; the last of `num_steps` that the plans hold.

    Without a `place` nothing is another than it was, and every span has its recorded time.
    """
    if place is None:
        plans = {rank: as_recorded(plan) for rank, plan in plans.items()}
    runner = _Runner(plans, place)
    seconds = runner.replayer.run(num_steps)
    return seconds, runner.replayer.trace(step, seconds)


class _Runner:
    """What decides how long a collective takes."""

    def __init__(self, plans: Mapping[int, ReplayPlan], place: Place | None) -> None:
        self.env = simpy.Environment()
        self.fabric: Fabric | None = None
        self.is_folded = place is not None and place.is_folded
        if place is not None:
            ops = [op for plan in plans.values() for op in plan.ops if op.meeting is not None]
            works = dict.fromkeys(_work(op) for op in ops)
            self.fabric = Fabric(
                self.env, place.topology, place.groups, is_folded=place.is_folded, works=works
            )
        slowdown = None if place is None else place.slowdown
        self.replayer = Replayer(self.env, plans, self._block_of, self._run_collective, slowdown)

    def _run_collective(self, op: ReplayOp, rank: int, on_end: OnEnd, busy: int) -> Flight:
        """As modelled, beside the kernels of the replay."""
        assert self.fabric is not None
        instance = self._block_of(op.info.group, rank)
        return self.fabric.run(self.fabric.transfer(_work(op), instance), on_end, busy)

    def _block_of(self, group: str, rank: int) -> int:
        """The number of a group's block on the fabric; the one there is when one rank stands for all, whose
        own number may be that of a rank which the fabric is too small for."""
        assert self.fabric is not None
        return 0 if self.is_folded else self.fabric.instance_of(group, rank)


def _work(op: ReplayOp) -> Collective:
    return Collective(_KINDS[op.info.kind], op.info.bytes, op.info.dtype, op.info.group)
