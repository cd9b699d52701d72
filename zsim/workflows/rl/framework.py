"""A framework of reinforcement learning: the defaults and the times of the host that a loop takes from it.

Each is a module `workflow` of a folder of `zsim.frameworks`, with `WORKFLOW`. `rl.framework` names the
folder, with hyphens for underscores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

from zsim.cost.inference.iteration import HostRates
from zsim.errors import InputError, did_you_mean
from zsim.specs.experiment.rl.table import Algorithm, Placement, Transport
from zsim.specs.strategy.registry import role_of, workflow_names


@dataclass(frozen=True, slots=True)
class SyncRates:
    """The times of a weight sync that are the framework's own."""

    transport: Transport
    bucket_bytes: float
    seconds_per_tensor: float
    """Python of one parameter: gathering it, renaming it, and the engine's loading of it."""
    bytes_per_second: float
    """Rate at which an engine takes buckets over, with all copies. The path to it may be slower."""
    seconds: float = 0.0
    """Whatever the model: metadata, and messages between processes."""


@dataclass(frozen=True, slots=True)
class Offloads:
    """The states that leave the GPUs of a colocated job for the rollout, and the engine's sleep."""

    parameters: bool
    optimizer: bool
    sleep_level: Literal[0, 1, 2]


@dataclass(frozen=True, slots=True)
class ControllerRates:
    """Python of a step outside all phases: the controller, and the data that it hands out."""

    seconds: float
    """Seconds of a step."""
    seconds_per_million_tokens: float
    """The same for every million tokens of the rollout."""


@dataclass(frozen=True, slots=True)
class RlFramework:
    """The defaults and times of a framework of reinforcement learning."""

    name: str
    engine: str
    memory_utilization: Mapping[Placement, float]
    max_num_seqs: int
    max_num_batched_tokens: int
    syncs: Mapping[Placement, SyncRates]
    offloads: Offloads
    """Those of the colocated placement."""
    hosts: Mapping[Placement, HostRates]
    """The engine's Python, per iteration. Engines that answer each request by itself take longer for each."""
    algorithms: tuple[Algorithm, ...]
    placements: tuple[Placement, ...]
    controllers: Mapping[Placement, ControllerRates]
    has_reference: bool = True
    """A reference pass unless the experiment says otherwise."""
    recomputes_logprobs: bool = True
    """A pass for the old log-probabilities even where every rollout is one update."""
    static_balance: bool = True
    """Requests are dealt out to replicas beforehand."""
    enforces_eager: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where the numbers come from, by field."""


def workflow_of(name: str) -> RlFramework:
    """The framework of a name. Raises InputError for one that zsim does not know."""
    if name not in workflow_names():
        raise InputError(
            f"rl.framework: found '{name}', expected one of {', '.join(workflow_names())}"
            f"{did_you_mean(name, workflow_names())}"
        )
    return cast(RlFramework, role_of(name.replace("-", "_"), "workflow", "WORKFLOW"))
