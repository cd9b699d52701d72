"""The requirements of a target: the least of each resource, alone, that brings the step to the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zsim.engine.simulate import simulate_job
from zsim.errors import InputError, did_you_mean
from zsim.explain.work import step_work
from zsim.plan.make import make_plan
from zsim.plan.memory.capacity import peak_bytes, usable_bytes
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.study.search import least_factor
from zsim.study.sensitivity.sensitivity import HARDWARE, Knob
from zsim.units import format_bytes, format_seconds

PLENTY = 1000.0
# A higher peak shortens the step but also lowers the MFU, which is a fraction of the peak.
_PEAK = "peak arithmetic"
_NO_PEAK = "an MFU is a fraction of it, so more of it lowers the MFU"
TARGETS = ("step_seconds", "mfu", "tokens_per_second_per_gpu", "fits")


@dataclass(frozen=True)
class StepTarget:
    """A step of at most `step_seconds`."""

    text: str
    """The target as the user wrote it."""
    step_seconds: float
    is_of_peak: bool = False
    """The target is a fraction of the GPU's peak, so the step holds only for GPUs with this peak."""


@dataclass(frozen=True)
class Requirement:
    """The amount of one resource that alone reaches the target."""

    name: str
    unit: str
    available: float
    needed: float | None
    """None if no amount reaches the target, neither a thousand times as much (for latencies a thousandth) nor
    the limit `bound`.
    """
    best_seconds: float
    """The step at that extreme."""
    bound: float | None = None
    """The limit that no machine passes, e.g. an efficiency of 1."""

    def sentence(self) -> str:
        if self.needed is None:
            best = format_seconds(self.best_seconds)
            most = "with any amount" if self.bound is None else f"at {self.bound:g}"
            return f"{self.name}: not by itself; {most} a step takes {best}"
        if self.needed == self.available:
            return f"{self.name}: {self.available:.4g} {self.unit}".rstrip() + " are enough"
        verb = "at least" if self.needed > self.available else "at most"
        times = self.needed / self.available
        return (
            f"{self.name}: {verb} {self.needed:.4g} {self.unit}".rstrip()
            + f" instead of {self.available:.4g} ({times:.2f} times)"
        )


def parse_target(text: str, job: Job) -> StepTarget:
    """The step target of `step_seconds=2.5`, `mfu=0.5` or `tokens_per_second_per_gpu=4000`."""
    name, equals, value = text.partition("=")
    name = name.strip().removesuffix("_fraction")
    if name not in TARGETS:
        raise InputError(
            f"--target {text}: expected one of {', '.join(f'{t}=...' for t in TARGETS[:-1])} or fits"
            f"{did_you_mean(name, TARGETS)}"
        )
    try:
        number = float(value) if equals else float("nan")
    except ValueError:
        number = float("nan")
    if not 0 < number < float("inf"):
        raise InputError(f"--target {text}: found {value!r}, expected a number above 0")
    work = step_work(job)
    if name == "step_seconds":
        return StepTarget(text, number)
    if name == "tokens_per_second_per_gpu":
        return StepTarget(text, work.tokens_per_gpu / number)
    if work.peak_flops_per_second is None or number >= 1:
        raise InputError(f"--target {text}: expected a fraction of the GPU's peak below 1")
    return StepTarget(text, work.model_flops / (number * work.peak_flops_per_second), is_of_peak=True)


def excluded_resources(target: StepTarget) -> dict[str, str]:
    """Resources that are meaningless for the target, with the reason."""
    return {_PEAK: _NO_PEAK} if target.is_of_peak else {}


def check_resources(target: StepTarget, names: Sequence[str]) -> None:
    """Raise InputError for unknown resources and for resources that are meaningless for the target."""
    for name in names:
        if name not in HARDWARE:
            raise InputError(
                f"--resource {name}: expected one of {', '.join(HARDWARE)}{did_you_mean(name, HARDWARE)}"
            )
        if name in excluded_resources(target):
            raise InputError(
                f"--resource {name}: {excluded_resources(target)[name]}; expected another resource, or "
                "--target step_seconds=..."
            )


def requirements(
    experiment: Experiment, target: str, names: Sequence[str] | None = None, *, jobs: int = 1
) -> list[Requirement]:
    """The least amount of each resource alone (for latencies the greatest) that reaches the target, to 1 %.

    Without `names` these are all resources that the cluster has. A target of MFU leaves out the peak, since
    MFU is relative to the peak of the GPU. Raises InputError for unknown targets and resources.
    """
    job = resolve(experiment)
    step_target = parse_target(target, job)
    check_resources(step_target, names or ())
    knobs = [HARDWARE[name] for name in names or HARDWARE if name not in excluded_resources(step_target)]
    knobs = [knob for knob in knobs if knob.amount(job.cluster)]
    if jobs == 1:
        return [requirement(job, knob, step_target) for knob in knobs]
    import joblib

    return list(joblib.Parallel(jobs)(joblib.delayed(requirement)(job, knob, step_target) for knob in knobs))


def requirement(job: Job, knob: Knob, target: StepTarget) -> Requirement:
    """The requirement on one resource alone for the target."""
    available = knob.amount(job.cluster) or 0.0
    seconds_by_factor: dict[float, float] = {}

    def cluster(factor: float) -> Cluster:
        return knob.scale_cluster(job.cluster, 1 / factor if knob.is_cost else factor)

    def seconds(factor: float) -> float:
        if factor not in seconds_by_factor:
            seconds_by_factor[factor] = simulate_job(replace(job, cluster=cluster(factor))).trace.step_seconds
        return seconds_by_factor[factor]

    def make_requirement(needed: float | None) -> Requirement:
        return Requirement(knob.name, knob.display_unit, available, needed, seconds(PLENTY), knob.bound)

    is_enough: Callable[[float], bool] = lambda factor: seconds(factor) <= target.step_seconds  # noqa: E731
    if is_enough(1.0):
        return make_requirement(available)
    if not is_enough(PLENTY):
        return make_requirement(None)
    factor = least_factor(is_enough, available if knob.is_whole else None)
    return make_requirement(knob.amount(cluster(factor)))


def memory_to_fit(experiment: Experiment) -> str:
    """A sentence on how much memory a GPU would need for the job, from the plan, without simulation."""
    job = resolve(experiment)
    peak, usable = peak_bytes(job, make_plan(job)), usable_bytes(job.cluster)
    capacity = job.cluster.gpu.memory.capacity
    if peak <= usable:
        return f"GPU memory: {format_bytes(capacity)} are enough; {format_bytes(peak)} are used"
    needed = capacity * peak / usable
    return (
        f"GPU memory: at least {format_bytes(needed)} instead of {format_bytes(capacity)} "
        f"({needed / capacity:.2f} times), margin of the allocator included"
    )
