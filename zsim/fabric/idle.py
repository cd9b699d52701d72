"""A fabric on a clock of its own, for what runs alone."""

from __future__ import annotations

from collections.abc import Sequence

import simpy

from zsim.fabric.fabric import Fabric
from zsim.plan.ops import Collective, Group
from zsim.specs.topology import Topology


def idle_fabric(topology: Topology, group: Group, works: Sequence[Collective]) -> Fabric:
    """The links of `topology` with nothing on them, ready for `works` of all groups like `group` at once."""
    return Fabric(simpy.Environment(), topology, {group.name: group}, is_folded=True, works=works)
