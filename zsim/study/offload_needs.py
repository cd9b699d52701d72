"""How much more of one resource would hide what it costs: found by simulation, not by formula.

The plan is made once; only the cluster changes. A resource is "enough" when the step is within `tolerance`
of what it would be with a thousand times as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from zsim.engine.simulate import simulate_job
from zsim.errors import InputError, did_you_mean
from zsim.plan.make import make_plan
from zsim.plan.ops import DriveIo, OffloadWork
from zsim.specs.experiment import Experiment
from zsim.specs.hardware import Cluster
from zsim.specs.job import resolve
from zsim.study.knobs import HARDWARE, Knob
from zsim.study.search import least_factor
from zsim.units import format_seconds

_PLENTY = 1000.0


@dataclass(frozen=True, slots=True)
class Need:
    """`needed` of `resource` brings the step to `best_step_seconds`, within the tolerance; `available` is
    what the cluster has, with which the step takes `step_seconds`."""

    resource: str
    unit: str
    available: float
    needed: float
    step_seconds: float
    best_step_seconds: float

    @property
    def is_enough(self) -> bool:
        return self.needed <= self.available

    def sentence(self) -> str:
        """E.g. "19 drives instead of 8 would hide the drives: 420 s instead of 606 s"."""
        if self.is_enough:
            return f"{self.resource}: {self.available:g} {self.unit} are enough"
        best, now = format_seconds(self.best_step_seconds), format_seconds(self.step_seconds)
        return (
            f"{self.resource}: {self.needed:g} {self.unit} instead of {self.available:g} would hide it: "
            f"{best} instead of {now} per step"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_enough": self.is_enough, "sentence": self.sentence()}


RESOURCES: dict[str, Knob] = {
    "drives": HARDWARE["drives"],
    "drive bandwidth": HARDWARE["drive bandwidth"],
    "pcie": HARDWARE["PCIe bandwidth"],
    "host memory": HARDWARE["host memory bandwidth"],
    "cpu": HARDWARE["CPU optimizer"],
}


def _available(knob: Knob, cluster: Cluster) -> tuple[float, str]:
    """(how much the cluster has, the unit): CPUs by the optimizer traffic that they keep up."""
    if knob is HARDWARE["CPU optimizer"]:
        rate = cluster.host.memory_bandwidth * cluster.offload.optimizer_fraction / 1e9
        return rate, "GB/s of optimizer traffic per node"
    return knob.amount(cluster) or 0.0, knob.shown


def offload_need(experiment: Experiment, resource: str, *, tolerance: float = 0.01) -> Need:
    """The least of `resource` that hides what it costs; drives are whole, rates to 1 %.

    Raises InputError for an unknown resource, or drives where the cluster has none.
    """
    if resource not in RESOURCES:
        raise InputError(
            f"resource: found '{resource}', expected one of {', '.join(RESOURCES)}"
            f"{did_you_mean(resource, RESOURCES)}"
        )
    job = resolve(experiment)
    chosen = RESOURCES[resource]
    available, unit = _available(chosen, job.cluster)
    if available == 0:
        raise InputError(f"cluster '{job.cluster.name}' has no drives to ask about")
    plan = make_plan(job)

    def seconds(factor: float) -> float:
        varied = replace(job, cluster=chosen.scaled(job.cluster, factor))
        return simulate_job(varied, plan=plan).trace.step_seconds

    now, best = seconds(1.0), seconds(_PLENTY)
    limit = best * (1 + tolerance)
    if now <= limit:
        return Need(resource, unit, available, available, now, best)
    factor = least_factor(lambda value: seconds(value) <= limit, available if chosen.is_whole else None)
    return Need(resource, unit, available, available * factor, now, seconds(factor))


def offload_needs(experiment: Experiment, resources: Sequence[str] | None = None) -> list[Need]:
    """The needs of each resource alone, the others as they are; without `resources`, of all that the plan
    uses. Raises InputError when nothing is offloaded."""
    if resources is None:
        resources = _used(experiment)
    return [offload_need(experiment, name) for name in resources]


def _used(experiment: Experiment) -> list[str]:
    works = [op.work for op in make_plan(resolve(experiment)).ops if isinstance(op.work, OffloadWork)]
    if not works:
        raise InputError("nothing is offloaded; expected offload_param, offload_optimizer or cpu_offload")
    has_drives = any(isinstance(work, DriveIo) for work in works)
    return [name for name in RESOURCES if has_drives or not name.startswith("drive")]
