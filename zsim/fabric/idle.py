"""A fabric on a clock of its own, for what runs alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import simpy

from zsim.fabric.fabric import Fabric
from zsim.plan.ops import Collective, Group
from zsim.specs.topology.topology import Topology


def idle_fabric(topology: Topology, group: Group, works: Sequence[Collective]) -> Fabric:
    """The links of `topology` with nothing on them, ready for `works` of all groups like `group` at once."""
    return Fabric(simpy.Environment(), topology, {group.name: group}, is_folded=True, works=works)


def idle_seconds(topology: Topology, groups: Mapping[str, Group], works: Iterable[Collective]) -> float:
    """All `works` one after the other on links that carry nothing else: the groups of a kind at once, and all
    as slow as the slowest of them."""
    calls = Counter(works)
    fabric = Fabric(simpy.Environment(), topology, groups, is_folded=True, works=calls)
    return sum(count * fabric.transfer(work, 0).seconds_alone for work, count in calls.items())
