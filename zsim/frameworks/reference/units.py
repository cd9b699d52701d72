"""The reference engine's units: parameters that are gathered and reduced together."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.frameworks.reference.settings import ReferenceConfig
from zsim.plan.workload.workload import Workload


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
    gather_event: int | None = None
    """The event of a gather in flight, None if there is none."""
    autograd_bytes: int = 0


def make_engine_units(workload: Workload, world_size: int, strategy: ReferenceConfig) -> list[EngineUnit]:
    """The units: the root, then the blocks in forward order."""
    first_segment, *blocks, last_segment = workload.segments
    between = [segment for segment in blocks if segment.kind == "between"]
    block_segments = [segment for segment in blocks if segment.kind == "block"]
    named_segments = [
        ("root", (first_segment, *between, last_segment)),
        *((block.name, (block,)) for block in block_segments),
    ]
    units = []
    for name, segments in named_segments:
        parameters = [parameter for segment in segments for parameter in segment.parameters]
        numel = sum(parameter.numel for parameter in parameters)
        padded_numel = -(-numel // world_size) * world_size
        is_kept = strategy.keep_gathered and (name == "root" or name == named_segments[-1][0])
        names = tuple(segment.name for segment in segments)
        units.append(EngineUnit(name, names, len(parameters), numel, padded_numel, is_kept))
    return units
