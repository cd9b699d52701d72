"""The reference engine's units: parameters that are gathered and reduced together."""

from __future__ import annotations

from zsim.dataclass import dataclass
from zsim.plan.workload.workload import Workload
from zsim.specs.strategy.frameworks import Reference


@dataclass
class EngineUnit:
    """Parameters that are gathered and reduced together."""

    name: str
    segments: tuple[str, ...]
    num_parameters: int
    numel: int
    padded_numel: int
    is_kept: bool = False
    is_gathered: bool = True
    gathered: int | None = None
    """The event of a gather in flight, None if there is none."""
    autograd_bytes: int = 0


def make_engine_units(workload: Workload, world_size: int, strategy: Reference) -> list[EngineUnit]:
    """The units: the root, then the blocks in forward order."""
    before, *blocks, after = workload.segments
    between = [segment for segment in blocks if segment.kind == "between"]
    wrapped = [segment for segment in blocks if segment.kind == "block"]
    parts = [("root", (before, *between, after)), *((block.name, (block,)) for block in wrapped)]
    units = []
    for name, segments in parts:
        parameters = [parameter for segment in segments for parameter in segment.parameters]
        numel = sum(parameter.numel for parameter in parameters)
        padded = -(-numel // world_size) * world_size
        is_kept = strategy.keep_gathered and (name == "root" or name == parts[-1][0])
        names = tuple(segment.name for segment in segments)
        units.append(EngineUnit(name, names, len(parameters), numel, padded, is_kept))
    return units
