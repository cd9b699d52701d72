"""A fabric with a separate clock, for the times of collectives on idle links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import simpy

from zsim.fabric.fabric import Fabric
from zsim.plan.ops import Collective, Group
from zsim.specs.topology.topology import Topology


def idle_fabric(topology: Topology, group: Group, collectives: Sequence[Collective] | None = None) -> Fabric:
    """The idle links of `topology`, ready to run `collectives` in all groups of `group`'s kind at once. None:
    any collective.
    """
    return Fabric(simpy.Environment(), topology, {group.name: group}, is_folded=True, collectives=collectives)


def idle_seconds(topology: Topology, groups: Mapping[str, Group], collectives: Iterable[Collective]) -> float:
    """Seconds of all `collectives` one after the other on otherwise idle links. The groups of a kind run at
    once, all as slow as the slowest of them.
    """
    calls = Counter(collectives)
    fabric = Fabric(simpy.Environment(), topology, groups, is_folded=True, collectives=calls)
    return sum(count * fabric.transfer(work, 0).isolated_seconds for work, count in calls.items())
