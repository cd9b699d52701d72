"""What would have to be true: the least of each resource, alone, that brings a step to a target."""

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
from zsim.study.sensitivity.knobs import HARDWARE, Knob
from zsim.units import format_bytes, format_seconds

PLENTY = 1000.0
# Of an MFU, which is a fraction of it: with more of it a step is shorter, and its MFU lower.
_PEAK = "peak arithmetic"
_NO_PEAK = "an MFU is a fraction of it, so more of it lowers the MFU"
TARGETS = ("step_seconds", "mfu", "tokens_per_second_per_gpu", "fits")


@dataclass(frozen=True)
class StepTarget:
    """A step of at most `step_seconds`; `text` is what was asked for. `is_of_peak`: as a fraction of the
    GPU's peak, so that the step holds for GPUs of this peak only."""

    text: str
    step_seconds: float
    is_of_peak: bool = False


@dataclass(frozen=True)
class Requirement:
    """`needed` of a resource alone reaches the target: None where not even a thousand times as much (or a
    thousandth), or all that there can be (`bound`, e.g. an efficiency of 1), does, and the step then takes
    `best_seconds`."""

    name: str
    unit: str
    available: float
    needed: float | None
    best_seconds: float
    bound: float | None = None

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
    """`step_seconds=2.5`, `mfu=0.5`, `tokens_per_second_per_gpu=4000` as the step that it means."""
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
        return StepTarget(text, work.tokens / number)
    if work.peak_flops_per_second is None or number >= 1:
        raise InputError(f"--target {text}: expected a fraction of the GPU's peak below 1")
    return StepTarget(text, work.model_flops / (number * work.peak_flops_per_second), is_of_peak=True)


def left_out(target: StepTarget) -> dict[str, str]:
    """Resources that mean nothing for the target, with why."""
    return {_PEAK: _NO_PEAK} if target.is_of_peak else {}


def check_resources(target: StepTarget, names: Sequence[str]) -> None:
    """Raises InputError for unknown resources, and for those that the target leaves out."""
    for name in names:
        if name not in HARDWARE:
            raise InputError(
                f"--resource {name}: expected one of {', '.join(HARDWARE)}{did_you_mean(name, HARDWARE)}"
            )
        if name in left_out(target):
            raise InputError(
                f"--resource {name}: {left_out(target)[name]}; expected another resource, or "
                "--target step_seconds=..."
            )


def requirements(
    experiment: Experiment, target: str, names: Sequence[str] | None = None, *, jobs: int = 1
) -> list[Requirement]:
    """For each resource alone, the least (or, of latencies, the most) that reaches the target, to 1 %.

    Without `names`, of all that the cluster has; a target of MFU leaves out the peak, since an MFU is of the
    peak of the GPU that runs. Raises InputError for unknown targets and resources.
    """
    job = resolve(experiment)
    wanted = parse_target(target, job)
    check_resources(wanted, names or ())
    chosen = [HARDWARE[name] for name in names or HARDWARE if name not in left_out(wanted)]
    chosen = [knob for knob in chosen if knob.amount(job.cluster)]
    if jobs == 1:
        return [requirement(job, knob, wanted) for knob in chosen]
    import joblib

    return list(joblib.Parallel(jobs)(joblib.delayed(requirement)(job, knob, wanted) for knob in chosen))


def requirement(job: Job, knob: Knob, target: StepTarget) -> Requirement:
    """What of one resource reaches the target."""
    available = knob.amount(job.cluster) or 0.0
    known: dict[float, float] = {}

    def cluster(factor: float) -> Cluster:
        return knob.scaled(job.cluster, 1 / factor if knob.is_wanted_less else factor)

    def seconds(factor: float) -> float:
        if factor not in known:
            known[factor] = simulate_job(replace(job, cluster=cluster(factor))).trace.step_seconds
        return known[factor]

    def made(needed: float | None) -> Requirement:
        return Requirement(knob.name, knob.shown, available, needed, seconds(PLENTY), knob.bound)

    is_enough: Callable[[float], bool] = lambda factor: seconds(factor) <= target.step_seconds  # noqa: E731
    if is_enough(1.0):
        return made(available)
    if not is_enough(PLENTY):
        return made(None)
    factor = least_factor(is_enough, available if knob.is_whole else None)
    return made(knob.amount(cluster(factor)))


def memory_to_fit(experiment: Experiment) -> str:
    """How much memory a GPU would need for the job, in a sentence: from the plan, without simulation."""
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
