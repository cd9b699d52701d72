"""All that a run of days is simulated with, as plain values: no experiment, no step, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from zsim.dataclass import dataclass
from zsim.goodput.checkpoint import Checkpoint
from zsim.specs.experiment.run.failures import FailureLaw
from zsim.specs.experiment.run.recovery import RecoveryPolicy


@dataclass(frozen=True, slots=True)
class Saves:
    """When what is saved. `every`: steps between two saves of the most frequent kind. `local`: a copy in host
    memory or on the node's drives, made at every save; `remote`: in the store, made at every
    `remote_every`-th (at every one where there is no `local`). `survives_node`: local copies have a peer, so
    that the loss of one node leaves them. `keep`: saves kept in the store, None for all; one of
    `archive_steps` steps is kept for ever."""

    every: int
    remote: Checkpoint | None = None
    local: Checkpoint | None = None
    remote_every: int = 1
    survives_node: bool = False
    keep: int | None = None
    archive_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the run. `steps` of `step_seconds` on all `nodes`; `step_sigma`: relative standard deviation
    of one step. `slowdown_by_nodes`: on fewer nodes, seconds that make up for one full step, over
    `step_seconds`. `startup_seconds`: until training goes on, without loading; `in_process_seconds`: where
    processes stay. `replicas`: that can go on without one another (per-step). `failure_share`: of the rate
    of failures, which is that of the largest phase."""

    steps: int
    step_seconds: float
    nodes: int
    saves: Saves
    startup_seconds: float = 0.0
    in_process_seconds: float = 0.0
    step_sigma: float = 0.0
    slowdown_by_nodes: Mapping[int, float] = field(default_factory=dict)
    replicas: int = 1
    failure_share: float = 1.0


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of failures. `weight`: its share. `nodes`: that go with it, none of them if `keeps_node`.
    `repair_median`: None for an exponential law. `detect_seconds`: None for the recovery's own.
    `found_later`: mean seconds until silent corruption is found."""

    name: str
    weight: float
    keeps_node: bool = False
    nodes: int = 1
    repair_seconds: float = 0.0
    repair_median: float | None = None
    detect_seconds: float | None = None
    found_later: float | None = None


@dataclass(frozen=True, slots=True)
class Failures:
    """`per_second`: of all nodes of the largest phase at the first day's rate. `ageing`: (seconds, factor of
    the rate from then on). Intervals in seconds; rates of 0 for what does not happen."""

    per_second: float = 0.0
    causes: tuple[Cause, ...] = (Cause("failure", 1.0),)
    law: FailureLaw = "exponential"
    shape: float = 1.0
    ageing: tuple[tuple[float, float], ...] = ()
    rack_fraction: float = 0.0
    rack_nodes: int = 1
    leaf_fraction: float = 0.0
    leaf_nodes: int = 1
    planned_every: float | None = None
    planned_takes: float = 0.0
    preemptions_per_second: float = 0.0
    preemption_takes: float = 0.0
    preemption_notice: float = 0.0
    stragglers_per_second: float = 0.0
    straggler_slowdown: float = 1.0
    straggler_takes: float = 0.0


@dataclass(frozen=True, slots=True)
class Recovery:
    """`detect_seconds` of a failure; of the `hang_fraction` it is `hang_seconds`. `least_nodes`: with which
    "shrink" goes on. `stall_seconds`, `rejoin_seconds`, `least_replicas`: of "per-step"."""

    policy: RecoveryPolicy = "restart"
    detect_seconds: float = 0.0
    hang_fraction: float = 0.0
    hang_seconds: float = 0.0
    swap_seconds: float = 0.0
    spares: int = 0
    least_nodes: int = 1
    stall_seconds: float = 0.0
    rejoin_seconds: float = 0.0
    least_replicas: int = 1


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run. `horizon_seconds`: the clock at which it ends, else after its last step. `limit_seconds`: when a
    run that does not end is given up. `evaluation_every` steps it takes `evaluation_seconds`."""

    phases: tuple[Phase, ...]
    failures: Failures = Failures()
    recovery: Recovery = Recovery()
    evaluation_every: int = 0
    evaluation_seconds: float = 0.0
    horizon_seconds: float | None = None
    limit_seconds: float = float("inf")

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def failures_per_second(self) -> float:
        """The rate of failures of the first phase's nodes."""
        return self.failures.per_second * self.phases[0].failure_share

    @property
    def ideal_seconds(self) -> float:
        """Seconds of all steps, one after the other."""
        return sum(phase.steps * phase.step_seconds for phase in self.phases)
