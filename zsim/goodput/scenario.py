"""All that a run of days is simulated with, as plain values: no experiment, no step, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zsim.specs.experiment.job import Job
from zsim.specs.experiment.run.failures import (
    NODE_GPUS,
    CauseTable,
    FailureLaw,
    FailuresTable,
    RecoveryPolicy,
    resolve_failures,
)
from zsim.specs.lazy_model import resolve_table


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One save of a whole job."""

    bytes: int
    blocking_seconds: float
    """The time that the step waits: gather, plan, staging, and writing where it is synchronous."""
    durable_seconds: float
    """From the start of a save to its commit."""
    slowdown_seconds: float
    """The time that background writing adds in all to the steps that run meanwhile."""
    load_seconds: float
    """Reading it back on all ranks."""
    host_bytes_per_node: int
    """Staging memory."""


@dataclass(frozen=True, slots=True)
class Startup:
    """Seconds from the launcher's call to the first step."""

    process_seconds: float
    """Imports, device, model."""
    communicators_seconds: float
    compile_seconds: float
    first_step_seconds: float
    """How much longer the first step takes than a steady one."""

    @property
    def seconds(self) -> float:
        return (
            self.process_seconds + self.communicators_seconds + self.compile_seconds + self.first_step_seconds
        )


@dataclass(frozen=True, slots=True)
class Saves:
    """The schedule of saves."""

    every: int
    """Steps between two saves of the most frequent kind."""
    remote: Checkpoint | None = None
    """A save to the store, which every `remote_every`-th save is (every one where there is no `local`)."""
    local: Checkpoint | None = None
    """A copy in host memory or on the node's drives, which the other saves are."""
    remote_every: int = 1
    survives_node: bool = False
    """Local copies have a peer, so that the loss of one node leaves them."""
    keep: int | None = None
    """Saves kept in the store, None for all."""
    archive_steps: int | None = None
    """One save of so many steps is kept for ever."""

    def has_local_after(self, nodes: int) -> bool:
        """Whether a local copy is left when so many nodes are lost."""
        return self.local is not None and (nodes == 0 or (self.survives_node and nodes == 1))


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the run: `steps` of `step_seconds` on all `nodes`."""

    steps: int
    step_seconds: float
    nodes: int
    saves: Saves
    startup_seconds: float = 0.0
    """Until training goes on, without loading."""
    in_process_seconds: float = 0.0
    """The same, where processes stay."""
    step_sigma: float = 0.0
    """Relative standard deviation of one step."""
    slowdown_by_nodes: Mapping[int, float] = field(default_factory=dict)
    """On fewer nodes, seconds that make up for one full step, over `step_seconds`."""
    replicas: int = 1
    """Replicas that can go on without one another (per-step)."""
    failure_share: float = 1.0
    """The part of the rate of failures, which is that of the largest phase."""
    starts_anew: bool = True
    """The job is started again for it, if it is not the first."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of failures."""

    name: str
    weight: float
    """Its share of all failures."""
    keeps_node: bool = False
    nodes: int = 1
    """Nodes that are lost with it, none of them if `keeps_node`."""
    repair_seconds: float = 0.0
    repair_median: float | None = None
    """None for an exponential law."""
    detect_seconds: float | None = None
    """None for the recovery's default."""
    found_later: float | None = None
    """Mean seconds until silent corruption is detected."""


@dataclass(frozen=True, slots=True)
class Failures:
    """Rates and laws of failures. Intervals are in seconds, and a rate is 0 for what does not happen."""

    per_second: float = 0.0
    """The rate of all nodes of the largest phase on the first day."""
    causes: tuple[Cause, ...] = (Cause("failure", 1.0),)
    law: FailureLaw = "exponential"
    shape: float = 1.0
    ageing: tuple[tuple[float, float], ...] = ()
    """(seconds, factor of the rate from then on)."""
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
    """The time that a job takes to recover, by policy."""

    policy: RecoveryPolicy = "restart"
    detect_seconds: float = 0.0
    """Until a failure is detected, except in the `hang_fraction`, where it is `hang_seconds`."""
    hang_fraction: float = 0.0
    hang_seconds: float = 0.0
    swap_seconds: float = 0.0
    spares: int = 0
    least_nodes: int = 1
    """The number of nodes with which "shrink" goes on."""
    stall_seconds: float = 0.0
    """A time of policy "per-step", as `rejoin_seconds`. `least_replicas` belongs to it too."""
    rejoin_seconds: float = 0.0
    least_replicas: int = 1


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run. Every `evaluation_every` steps it takes `evaluation_seconds`."""

    phases: tuple[Phase, ...]
    failures: Failures = Failures()
    recovery: Recovery = Recovery()
    evaluation_every: int = 0
    evaluation_seconds: float = 0.0
    horizon_seconds: float | None = None
    """The clock at which it ends. None if it ends after its last step."""
    limit_seconds: float = float("inf")
    """The time after which a run that does not end is given up."""

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def failures_per_second(self) -> float:
        """The rate of failures of the first phase's nodes."""
        return self.failures.per_second * self.phases[0].failure_share

    @property
    def ideal_seconds(self) -> float:
        """Seconds of all steps without any interruption."""
        return sum(phase.steps * phase.step_seconds for phase in self.phases)


# -- A job's failures from the rates of its fleet: by its nodes, their GPUs, and the causes ----------------


DAY = 86_400.0
_SECONDS_PER_1000_NODE_DAYS = 1000 * DAY  # seconds of a rate per 1,000 node-days


def failures_of(table: FailuresTable | None, job: Job, nodes: int) -> Failures:
    """The failures of a job on so many nodes.

    The rate is r n (G / G0)^(e - 1) above G0 GPUs and r n below, with n nodes of 8 GPUs, r per node, and G
    GPUs.
    """
    resolved = resolve_failures(table)
    gpus = nodes * job.cluster.gpus_per_node
    standard_nodes = gpus / NODE_GPUS
    rate = resolved.total_per_1000_node_days() / _SECONDS_PER_1000_NODE_DAYS * standard_nodes
    if gpus > resolved.exponent_above_gpus:
        rate *= (gpus / resolved.exponent_above_gpus) ** (resolved.exponent - 1)
    planned = resolved.planned_per_day
    stragglers = resolved.stragglers_per_1000_node_days / _SECONDS_PER_1000_NODE_DAYS * standard_nodes
    return resolve_table(
        Failures,
        resolved,
        per_second=rate,
        causes=tuple(_causes(resolved)),
        shape=resolved.shape or 1.0,
        ageing=tuple((day * DAY, factor) for day, factor in resolved.ageing),
        planned_every=DAY / planned if planned else None,
        preemptions_per_second=resolved.preemptions_per_day / DAY,
        stragglers_per_second=stragglers,
    )


def _causes(table: FailuresTable) -> list[Cause]:
    if not table.causes:
        hardware = 1 - table.transient_fraction
        node_loss = Cause(
            "node lost", hardware, repair_seconds=table.repair, repair_median=table.repair_median
        )
        return [node_loss, Cause("transient", table.transient_fraction, keeps_node=True)]
    return [_cause(name, cause, table) for name, cause in table.causes.items()]


def _cause(name: str, cause: CauseTable, table: FailuresTable) -> Cause:
    repair, median = cause.repair, cause.repair_median
    if repair is None:
        repair, median = table.repair, table.repair_median
    weight = cause.per_1000_node_days if cause.share is None else cause.share
    return Cause(
        name.replace("-", " "), weight or 0.0, cause.keeps_node, cause.nodes, repair, median,
        cause.detect, cause.found_later,
    )  # fmt: skip
