"""How much more of one resource would hide what it costs: found by simulation, not by formula.

The plan is made once; only the cluster changes. A resource is "enough" when the step is within `tolerance`
of what it would be with a thousand times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zsim.engine.simulate import simulate_job
from zsim.errors import InputError, did_you_mean
from zsim.plan.make import make_plan
from zsim.plan.ops import DriveIo, OffloadWork
from zsim.specs.experiment import Experiment
from zsim.specs.hardware import Cluster
from zsim.specs.job import resolve
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


def _drives(cluster: Cluster, factor: float) -> Cluster:
    assert cluster.nvme is not None
    drives = round(cluster.nvme.drives * factor)
    return cluster.model_copy(update={"nvme": cluster.nvme.model_copy(update={"drives": drives})})


def _drive_rates(cluster: Cluster, factor: float) -> Cluster:
    nvme = cluster.nvme
    assert nvme is not None
    rates = {
        "read_bandwidth": nvme.read_bandwidth * factor,
        "write_bandwidth": nvme.write_bandwidth * factor,
    }
    return cluster.model_copy(update={"nvme": nvme.model_copy(update=rates)})


def _pcie(cluster: Cluster, factor: float) -> Cluster:
    pcie = cluster.pcie.model_copy(update={"bandwidth": cluster.pcie.bandwidth * factor})
    return cluster.model_copy(update={"pcie": pcie})


def _memory(cluster: Cluster, factor: float) -> Cluster:
    """Host memory's bandwidth alone: the CPU's own rates, fractions of it, stay as they are."""
    host = cluster.host.model_copy(update={"memory_bandwidth": cluster.host.memory_bandwidth * factor})
    rates = {
        name: getattr(cluster.offload, name) / factor for name in ("optimizer_fraction", "copy_fraction")
    }
    return cluster.model_copy(update={"host": host, "offload": cluster.offload.model_copy(update=rates)})


def _cpu(cluster: Cluster, factor: float) -> Cluster:
    rates = {
        name: getattr(cluster.offload, name) * factor for name in ("optimizer_fraction", "copy_fraction")
    }
    return cluster.model_copy(update={"offload": cluster.offload.model_copy(update=rates)})


@dataclass(frozen=True, slots=True)
class _Resource:
    scale: Callable[[Cluster, float], Cluster]
    unit: str
    amount: Callable[[Cluster], float]
    is_whole: bool = False


RESOURCES: dict[str, _Resource] = {
    "drives": _Resource(_drives, "drives", lambda c: float(c.nvme.drives) if c.nvme else 0.0, True),
    "drive bandwidth": _Resource(
        _drive_rates, "GB/s read per drive", lambda c: c.nvme.read_bandwidth / 1e9 if c.nvme else 0.0
    ),
    "pcie": _Resource(_pcie, "GB/s per GPU", lambda c: c.pcie.bandwidth / 1e9),
    "host memory": _Resource(_memory, "GB/s per node", lambda c: c.host.memory_bandwidth / 1e9),
    "cpu": _Resource(
        _cpu,
        "GB/s of optimizer traffic per node",
        lambda c: c.host.memory_bandwidth * c.offload.optimizer_fraction / 1e9,
    ),
}


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
    available = chosen.amount(job.cluster)
    if available == 0:
        raise InputError(f"cluster '{job.cluster.name}' has no drives to ask about")
    plan = make_plan(job)

    def seconds(factor: float) -> float:
        varied = replace(job, cluster=chosen.scale(job.cluster, factor))
        return simulate_job(varied, plan=plan).trace.step_seconds

    now, best = seconds(1.0), seconds(_PLENTY)
    limit = best * (1 + tolerance)
    if now <= limit:
        return Need(resource, chosen.unit, available, available, now, best)
    factor = _least_factor(lambda value: seconds(value) <= limit, available if chosen.is_whole else None)
    return Need(resource, chosen.unit, available, available * factor, now, seconds(factor))


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


def _least_factor(is_enough: Callable[[float], bool], whole: float | None) -> float:
    """The least factor that is enough: of 1/whole steps, or to 1 %."""
    low, high = 1.0, 2.0
    while not is_enough(high):
        low, high = high, 2 * high
    step = 1.0 / whole if whole else 0.0
    while high - low > max(step * 1.5, 0.01 * high if not whole else 0.0):
        middle = (low + high) / 2
        if whole:
            middle = round(middle * whole) / whole
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high
