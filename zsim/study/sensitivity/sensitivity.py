"""The numbers of a cluster and of a strategy that a study varies, by name, each with the keys it scales.

A knob is defined by the experiment's own dotted keys, so that `--set` can repeat every variation. A
requirement is the least of one knob, alone, that brings the step to a target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel

from zsim.engine.simulate import simulate_job
from zsim.errors import InputError, check_choice, did_you_mean
from zsim.explain.job import step_work
from zsim.plan.make import make_plan
from zsim.plan.memory.capacity import peak_bytes, usable_bytes
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.rl import RlTable
from zsim.specs.experiment.tables import Experiment
from zsim.specs.lazy_model import Table
from zsim.specs.topology.node_links import require_identical_nodes
from zsim.study.rollouts import changed_numbers, turned_numbers
from zsim.study.search import least_factor
from zsim.study.tune.framework import tuning_of
from zsim.units import format_bytes, format_seconds

Unit = Literal["B/s", "FLOP/s", "s", "B", ""]


@dataclass(frozen=True)
class Knob:
    """One number to vary. The values at all its keys of the cluster are multiplied by the same factor."""

    name: str
    keys: tuple[str, ...]
    """Dotted keys of the cluster. "*" matches every key of a table."""
    unit: Unit = ""
    display_unit: str = ""
    """The display unit."""
    per_unit: float = 1.0
    """The size of the display unit in SI."""
    is_whole: bool = False
    is_fraction: bool = False
    """The number is never above 1."""
    is_excess: bool = False
    """Only the part above 1 is scaled."""
    is_cost: bool = False
    """A smaller number is faster."""
    rate_keys: tuple[str, ...] = ()
    """Those of `keys` that are in B/s where the others have no unit."""

    @property
    def bound(self) -> float | None:
        """The limit that no machine passes: efficiencies end at 1, slowdowns at 1 from above. None without a
        limit."""
        return 1.0 if self.is_fraction or self.is_excess else None

    def amount(self, cluster: Cluster) -> float | None:
        """The cluster's amount in the display unit. None (or 0) where it has none."""
        value = next((value for _, value in self._matching_values(cluster)), None)
        return None if value is None else value / self.per_unit

    def overrides(self, cluster: Cluster, factor: float) -> dict[str, Any]:
        """The dotted keys and values to set for `factor` times as much. Numbers that the cluster lacks are
        left out.
        """
        return {
            f"cluster.{key}": self._format_value(key, self._scale_value(value, factor))
            for key, value in self._matching_values(cluster)
        }

    def scale_cluster(self, cluster: Cluster, factor: float) -> Cluster:
        """The cluster with `factor` times as much, without an upper limit except that fractions stop at 1."""
        for key, value in self._matching_values(cluster):
            number = round(value * factor) if self.is_whole else self._scale_value(value, factor)
            cluster = _replace_value(cluster, key.split("."), number)
        return cluster

    def _scale_value(self, value: float, factor: float) -> float:
        scaled = 1 + (value - 1) * factor if self.is_excess else value * factor
        return min(scaled, 1.0) if self.is_fraction else scaled

    def _format_value(self, key: str, value: float) -> Any:
        if self.is_whole:
            return max(round(value), 1)
        if self.unit == "B":
            return f"{max(round(value), 1)} B"
        unit = "B/s" if key in self.rate_keys else self.unit
        return f"{value!r} {unit}" if unit else value

    def _matching_values(self, cluster: Cluster) -> Iterator[tuple[str, float]]:
        require_identical_nodes(cluster, self.name)
        for key in self.keys:
            for path, value in _values(cluster, key.split("."), ()):
                if value and not (self.is_excess and value <= 1):
                    yield ".".join(path), float(value)


def _values(
    table: Any, pattern: list[str], prefix: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], int | float]]:
    """(path, number) of every number that matches `pattern`, where "*" is any key."""
    if not pattern:
        if isinstance(table, int | float) and not isinstance(table, bool):
            yield prefix, table
        return
    if table is None:
        return
    segment, remaining = pattern[0], pattern[1:]
    entries: Mapping[str, Any] = (
        {name: getattr(table, name) for name in type(table).model_fields}
        if isinstance(table, BaseModel)
        else table
    )
    names = list(entries) if segment == "*" else [segment]
    for name in names:
        if name in entries:
            yield from _values(entries[name], remaining, (*prefix, name))


def _replace_value(table: Any, path: list[str], value: float) -> Any:
    segment, remaining = path[0], path[1:]
    if isinstance(table, BaseModel):
        inner = _replace_value(getattr(table, segment), remaining, value) if remaining else value
        return table.model_copy(update={segment: inner})
    return {**table, segment: _replace_value(table[segment], remaining, value) if remaining else value}


def _times(prefix: str) -> tuple[str, ...]:
    names = ("base", "intra_round", "inter_round", "network_overhead", "ramp", "network_ramp")
    return tuple(f"{prefix}.{name}" for name in names)


_PROTOCOLS = ("collectives.protocols.*", "collectives.algorithms.*.*")

HARDWARE: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob("peak arithmetic", ("gpu.peak.bf16", "gpu.peak.fp16", "gpu.peak.tf32", "gpu.peak.fp32",
                                 "gpu.peak.fp8"), "FLOP/s", "TFLOP/s", 1e12),
        Knob("matrix products' efficiency", ("gpu.gemm.max_fraction", "gpu.gemm.by_dtype.*"),
             is_fraction=True),
        Knob("short products' k_half", ("gpu.gemm.k_half",), is_cost=True),
        Knob("attention's efficiency", ("gpu.attention.forward_fraction", "gpu.attention.backward_fraction"),
             is_fraction=True),
        Knob("HBM bandwidth", ("gpu.memory.bandwidth",), "B/s", "GB/s", 1e9),
        Knob("HBM efficiency", (
            "gpu.memory_bound.elementwise_fraction", "gpu.memory_bound.optimizer_fraction",
            "gpu.memory_bound.copy_fraction",
        ), is_fraction=True),
        Knob("gap between kernels", ("gpu.launch.seconds_per_kernel",), "s", "us", 1e-6, is_cost=True),
        Knob("slowdown beside collectives", ("gpu.interference.compute_slowdown",), is_excess=True,
             is_cost=True),
        Knob("slowdown of collectives", ("gpu.interference.communication_slowdown",), is_excess=True,
             is_cost=True),
        Knob("NVLink bandwidth", ("node_link.bandwidth",), "B/s", "GB/s per GPU", 1e9),
        Knob("NVLink efficiency", ("node_link.efficiency",), is_fraction=True),
        Knob("network bandwidth", ("nic.bandwidth",), "B/s", "Gb/s per card", 1e9 / 8),
        Knob("network efficiency", ("nic.efficiency",), is_fraction=True),
        Knob("collectives' latency", tuple(key for prefix in _PROTOCOLS for key in _times(prefix)), "s", "us",
             1e-6, is_cost=True),
        Knob("collectives' protocol efficiency", tuple(
            f"{prefix}.{name}" for prefix in _PROTOCOLS for name in ("intra_fraction", "inter_fraction")
        ), is_fraction=True),
        Knob("PCIe bandwidth", ("pcie.bandwidth",), "B/s", "GB/s per GPU", 1e9),
        Knob("C2C bandwidth", ("c2c.bandwidth",), "B/s", "GB/s per GPU", 1e9),
        Knob("host's launches", ("host.seconds_per_launch",), "s", "us", 1e-6, is_cost=True),
        Knob("frameworks' host code", ("host.overhead_factor",), is_cost=True),
        Knob("host memory bandwidth", ("host.memory_bandwidth",), "B/s", "GB/s per node", 1e9),
        Knob("CPU optimizer", (
            "offload.optimizer_fraction", "offload.copy_fraction", "offload.thread_bandwidth",
        ), rate_keys=("offload.thread_bandwidth",)),
        Knob("drives", ("nvme.drives",), display_unit="drives", is_whole=True),
        Knob("drive bandwidth", ("nvme.read_bandwidth", "nvme.write_bandwidth"), "B/s", "GB/s read per drive",
             1e9),
    )
}  # fmt: skip


def software_numbers(job: Job) -> dict[str, tuple[str, float, bool]]:
    """The sizes of the job's framework, by name: (dotted key, value, whether it is a whole number)."""
    return tuning_of(job.kind).sizes(job.experiment.strategy, job.strategy)


SPREAD = 0.2  # relative, for a number whose spread is not stated


@dataclass(frozen=True)
class Variation:
    """One number turned down and up."""

    name: str
    kind: str  # "hardware" or "software"
    value: float | None
    unit: str
    low: float
    """The factor by which the number is turned down."""
    high: float
    """The factor by which the number is turned up."""
    overrides: tuple[Mapping[str, Any], Mapping[str, Any]]
    """The changes of the experiment, down and up."""
    is_spread_stated: bool
    """The factors come from the spread that the number's file states, not from the default."""


@dataclass(frozen=True)
class SensitivityBar:
    """The steps that a variation leads to."""

    variation: Variation
    low_seconds: float | None
    """The step with the number turned down, or None where that experiment is invalid."""
    high_seconds: float | None
    """The step with the number turned up, or None where that experiment is invalid."""
    error: str | None
    """The reason why an experiment is invalid."""

    def swing(self, step_seconds: float) -> float:
        """The largest relative change of the step."""
        step_times = [
            step_time for step_time in (self.low_seconds, self.high_seconds) if step_time is not None
        ]
        return max((abs(seconds / step_seconds - 1) for seconds in step_times), default=0.0)


def hardware_variations(cluster: Cluster, spread: float) -> list[Variation]:
    """A variation for every number that the cluster has."""
    variations = []
    for knob in HARDWARE.values():
        amount = knob.amount(cluster)
        if not amount:
            continue
        low, high, is_known = _factors(knob, cluster, spread)
        changes = knob.overrides(cluster, low), knob.overrides(cluster, high)
        unit = knob.display_unit
        if knob.is_excess:  # only the part above 1 is turned
            amount, unit = amount - 1, "above 1"
        variations.append(Variation(knob.name, "hardware", amount, unit, low, high, changes, is_known))
    return variations


def _factors(knob: Knob, cluster: Cluster, spread: float) -> tuple[float, float, bool]:
    """(low factor, high factor, whether they come from the spread stated in the number's table instead of the
    default).
    """
    *path, name = knob.keys[0].split(".")
    table: Any = cluster
    for part in path:
        table = getattr(table, part, None)
    stated = table.spread.get(name) if isinstance(table, Table) else None
    if stated is None:
        value = knob.amount(cluster) or 1.0
        high = min(1 + spread, 1 / value) if knob.is_fraction else 1 + spread
        return 1 - spread, high, False
    low, high = stated
    value = getattr(table, name)
    if knob.is_excess:
        return (low - 1) / (value - 1), (high - 1) / (value - 1), True
    return low / value, high / value, True


def rollout_variations(table: RlTable, deviation: float) -> list[Variation]:
    """A variation for every number that `[rl]` states. Its factors are 1 where it has no others near it."""
    variations = []
    for key, value, _ in turned_numbers(table):
        down, up = (changed_numbers(table, key, factor) for factor in (1 - deviation, 1 + deviation))
        low, high = (float(changes[key]) / value for changes in (down, up))
        variations.append(Variation(key, "software", value, "", low, high, (down, up), False))
    return variations


def software_variations(job: Job, spread: float) -> list[Variation]:
    """A variation for every size that the job's framework reads."""
    variations = []
    for name, (key, value, is_whole) in software_numbers(job).items():
        down, up = (value * (1 - spread), value * (1 + spread))
        changes = tuple({key: round(number) if is_whole else number} for number in (down, up))
        variations.append(
            Variation(name, "software", value, "", 1 - spread, 1 + spread, (changes[0], changes[1]), False)
        )
    return variations


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
        check_choice(f"--resource {name}: ", name, HARDWARE)
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
