"""Time that the frameworks' Python code takes on the host thread that issues the work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from zsim.files import PRESETS
from zsim.specs.cluster.cluster import HostDevice
from zsim.specs.cluster.files import read_toml
from zsim.specs.lazy_model import Evidence, StrictTable, Table
from zsim.specs.messages import validate_table
from zsim.units import Seconds

_PRESET = PRESETS / "frameworks.toml"
MEASURED_RANKS = 8  # most ranks of the steps behind [allocator_retry_wait] there


class HostCost(Table):
    """Seconds of one framework event on the reference CPU."""

    seconds: Seconds
    seconds_on_gpu: Seconds | None = None
    """Seconds where kernels are launched on a GPU, whose streams, events and allocations take the host more.
    Left out: no more.
    """
    seconds_per_launch: Seconds = 0.0
    """Seconds of every kernel that is launched on a GPU, beyond the launch."""


class _FrameworkFile(StrictTable):
    """One `[event]` table per key of `Op.overhead`."""

    schema_version: Literal[1] = Field(alias="schema")
    events: dict[str, HostCost]


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds by event name, with their sources and evidence."""

    seconds: Mapping[str, float]
    """Seconds of an event on a CPU's ranks."""
    seconds_on_gpu: Mapping[str, float]
    """Seconds of an event on a GPU's ranks."""
    seconds_per_launch: Mapping[str, float]
    """Seconds of every launch of an event on a GPU's ranks."""
    sources: Mapping[str, str]
    evidence: Mapping[str, Evidence]


def load_host_costs(path: Path | None = None) -> HostCosts:
    """Host costs of the shipped `presets/frameworks.toml`, or of a file like it. Raises InputError where the
    file is wrong.
    """
    path = _PRESET if path is None else path
    data = read_toml(path)
    events = {key: value for key, value in data.items() if key != "schema"}
    file = validate_table({"schema": data.get("schema"), "events": events}, path.name, _FrameworkFile)
    return HostCosts(
        seconds={name: cost.seconds for name, cost in file.events.items()},
        seconds_on_gpu={
            name: cost.seconds if cost.seconds_on_gpu is None else cost.seconds_on_gpu
            for name, cost in file.events.items()
        },
        seconds_per_launch={name: cost.seconds_per_launch for name, cost in file.events.items()},
        sources={name: cost.source for name, cost in file.events.items()},
        evidence={name: cost.evidence for name, cost in file.events.items()},
    )


@cache
def shipped_host_costs() -> HostCosts:
    """Host costs of the shipped file."""
    return load_host_costs()


def host_seconds(
    overhead: str | None, events: int, launches: int, host: HostDevice, costs: HostCosts
) -> float:
    """Seconds the host thread needs to issue one op.

        t = f (e o + L d) + L c

    o: seconds of the framework event `overhead` on the reference CPU (0 for None). e: number of events. f:
    `overhead_factor` of this host. L: kernels launched. d: what the event takes for each of them, 0 on a
    CPU's ranks (c = 0), whose kernels' seconds hold it. c: `seconds_per_launch` of this host.
    """
    if overhead is None:
        return launches * host.seconds_per_launch
    if not host.seconds_per_launch:
        return host.overhead_factor * events * costs.seconds[overhead]
    event = events * costs.seconds_on_gpu[overhead] + launches * costs.seconds_per_launch[overhead]
    return host.overhead_factor * event + launches * host.seconds_per_launch


def retry_seconds(num_waiting: int, costs: HostCosts) -> float:
    """Seconds for which a retry of the allocator stalls the `num_waiting` ranks of the next collective,
    without the driver's calls for its segments.

        t = c                               one rank
        t = w (1 + 1/2 + ... + 1/min(n, m)) n ranks

    c: `allocator_retry` of a single rank. w: `allocator_retry_wait`, the mean of one of several ranks. m:
    `MEASURED_RANKS`. Ranks run short at about the same op, but their retries take different times, and the
    next collective waits for the straggler. The longest of n exponentially distributed times with mean w is
    on average w times the n-th harmonic number (Renyi, On the theory of order statistics, 1953). On more
    ranks than it was measured on it is taken to be no longer.
    """
    if num_waiting == 1:
        return costs.seconds["allocator_retry"]
    num_waiting = min(num_waiting, MEASURED_RANKS)
    return costs.seconds["allocator_retry_wait"] * sum(1 / rank for rank in range(1, num_waiting + 1))
