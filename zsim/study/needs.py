"""How much more of one resource would hide the cost of offloading. The answer comes from simulation, not from
a formula.

The plan is made once and only the cluster varies. More of a resource stops helping once the step is within
`tolerance` of the step with a thousand times as much. Offloading counts as hidden there only if its stalls
are no more than `tolerance` of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from zsim.cost.rates.offload import optimizer_bytes_per_second, thread_share
from zsim.engine.simulate import Outcome, simulate_job
from zsim.errors import InputError, check_choice
from zsim.plan.make import make_plan
from zsim.plan.ops import DriveIo, OffloadWork
from zsim.report.offload import offload_section
from zsim.report.report import traced_step
from zsim.report.views.displayable import DisplayableList, Figures
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout, time_scale
from zsim.report.views.meanings import CAPACITY, COMMUNICATION
from zsim.report.views.text.plain import paragraph
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.load import ExperimentSource, experiment_of
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.study.search import least_factor
from zsim.study.sensitivity.sensitivity import HARDWARE, Knob
from zsim.units import format_seconds

_PLENTY = 1000.0
_WORTH_NAMING = 0.01  # of all stalls


@dataclass(frozen=True, slots=True)
class Need:
    """The amount of one resource that brings the step to its best time, as far as this resource alone can."""

    resource: str
    unit: str
    available: float
    """The cluster's amount, in `unit`."""
    needed: float
    """The amount that brings the step to `best_step_seconds`, within the tolerance."""
    step_seconds: float
    """The step with the available amount."""
    best_step_seconds: float
    stall_seconds: Mapping[str, float]
    """Remaining stalls of offloading in a step with the needed amount, by cause."""
    is_hidden: bool
    """Whether these stalls are within the tolerance."""

    @property
    def is_enough(self) -> bool:
        """Whether more of the resource alone does not help."""
        return self.needed <= self.available

    def sentence(self) -> str:
        """E.g. "drives: 19 drives instead of 8 would hide the offloading: 420 ms instead of 606 ms per step".
        Where stalls remain, e.g. "cpu: up to 480 GB/s instead of 240 would shorten the step".
        """
        best, now = format_seconds(self.best_step_seconds), format_seconds(self.step_seconds)
        if self.is_hidden:
            if self.is_enough:
                return f"{self.resource}: {self.available:.4g} {self.unit} are enough"
            return (
                f"{self.resource}: {self.needed:.4g} {self.unit} instead of {self.available:.4g} would hide "
                f"the offloading: {best} instead of {now} per step"
            )
        if self.is_enough:
            comparison = f"more than {self.available:.4g} {self.unit} does not help by itself: {now} per step"
        else:
            comparison = (
                f"up to {self.needed:.4g} {self.unit} instead of {self.available:.4g} would shorten the "
                f"step: {best} instead of {now}"
            )
        return f"{self.resource}: {comparison}, of which {self._stalls()}"

    def _stalls(self) -> str:
        """E.g. "490 ms (42 %) are still stalls of offloading (CPU step 410 ms, DRAM 80 ms)"."""
        total_seconds = sum(self.stall_seconds.values())
        largest_first = sorted(self.stall_seconds.items(), key=lambda entry: -entry[1])
        causes = [
            f"{cause} {format_seconds(seconds)}"
            for cause, seconds in largest_first
            if seconds > _WORTH_NAMING * total_seconds
        ]
        share = total_seconds / (self.step_seconds if self.is_enough else self.best_step_seconds)
        total_text = f"{format_seconds(total_seconds)} ({share:.0%})".replace("%", " %")
        return f"{total_text} are still stalls of offloading ({', '.join(causes)})"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_enough": self.is_enough, "sentence": self.sentence()}


RESOURCES: dict[str, Knob] = {
    "drives": HARDWARE["drives"],
    "drive bandwidth": HARDWARE["drive bandwidth"],
    "pcie": HARDWARE["PCIe bandwidth"],
    "c2c": HARDWARE["C2C bandwidth"],
    "host memory": HARDWARE["host memory bandwidth"],
    "cpu": HARDWARE["CPU optimizer"],
}


def _available(knob: Knob, cluster: Cluster, gpus_per_node: int) -> tuple[float, str]:
    """(the cluster's amount, its unit). CPUs are measured by the optimizer traffic that they sustain with the
    threads that the ranks of a node have.
    """
    if knob is HARDWARE["CPU optimizer"]:
        host, rates = cluster.host, cluster.offload
        rate = optimizer_bytes_per_second(host, rates)
        share = thread_share(host, rates, gpus_per_node, rate)
        return rate * share / 1e9, "GB/s of optimizer traffic per node"
    return knob.amount(cluster) or 0.0, knob.display_unit


def offload_need(experiment: Experiment, resource: str, *, tolerance: float = 0.01) -> Need:
    """The least amount of `resource` beyond which more of it alone does not help, and the stalls that remain
    at that amount. Drives are counted in whole drives, rates to 1 %.

    Raises InputError for an unknown resource, or for drives where the cluster has none.
    """
    check_choice(f"resource: found '{resource}', ", resource, RESOURCES)
    job = resolve(experiment)
    chosen = RESOURCES[resource]
    available, unit = _available(chosen, job.cluster, job.gpus_per_node)
    if available == 0:
        what = "C2C links" if resource == "c2c" else "drives"
        raise InputError(f"cluster '{job.cluster.name}' has no {what} to ask about")
    plan = make_plan(job)

    def outcome(factor: float) -> Outcome:
        varied = replace(job, cluster=chosen.scale_cluster(job.cluster, factor))
        return simulate_job(varied, plan=plan)

    def seconds(factor: float) -> float:
        return outcome(factor).trace.step_seconds

    current_seconds, best_seconds = seconds(1.0), seconds(_PLENTY)
    limit, factor = best_seconds * (1 + tolerance), 1.0
    if current_seconds > limit:
        factor = least_factor(lambda value: seconds(value) <= limit, available if chosen.is_whole else None)
    outcome_at_limit = outcome(factor)
    stalls, reached_seconds = _stalls(outcome_at_limit), outcome_at_limit.trace.step_seconds
    is_hidden = sum(stalls.values()) <= tolerance * reached_seconds
    if factor == 1.0:
        reached_seconds = best_seconds
    return Need(
        resource, unit, available, available * factor, current_seconds, reached_seconds, stalls, is_hidden
    )


def _stalls(outcome: Outcome) -> dict[str, float]:
    """Seconds that the step waits for offloading, by cause. Causes that cost nothing are left out."""
    step = traced_step(outcome.trace)
    section = offload_section(step.trace, step.breakdown, step.rank, outcome.limits, ())
    if section is None:
        return {}
    return {cause: seconds for cause, seconds in section.stall_seconds.items() if seconds > 0}


def _used_resources(experiment: Experiment) -> list[str]:
    job = resolve(experiment)
    payloads = [payload for payload in make_plan(job).all_work() if isinstance(payload, OffloadWork)]
    if not payloads:
        raise InputError("nothing is offloaded; expected offload_param, offload_optimizer or cpu_offload")
    has_drives = any(isinstance(payload, DriveIo) for payload in payloads)
    other_link = "c2c" if job.cluster.c2c is None else "pcie"
    return [name for name in RESOURCES if name != other_link and (has_drives or not name.startswith("drive"))]


@dataclass(frozen=True, repr=False, eq=False)
class NeedsResult(DisplayableList[Need]):
    """The need of each resource separately, all others unchanged."""

    items: tuple[Need, ...]

    def records(self) -> Sequence[Mapping[str, Any]]:
        """One row per resource."""
        return self.to_dict()

    def columns(self) -> Sequence[str]:
        return ("resource", "available", "needed", "unit", "step_seconds", "best_step_seconds", "is_hidden")

    def lines(self) -> Iterator[str]:
        for need in self.items:
            yield from paragraph(need.sentence(), indent=2)

    def to_dict(self) -> list[dict[str, Any]]:
        """The array that `zsim needs --json` writes."""
        return [need.to_dict() for need in self.items]

    def plots(self) -> Figures:
        return {"steps": self._steps}

    def _steps(self) -> Figure:
        scale, unit = time_scale(max(need.step_seconds for need in self.items))
        figure = Figure(layout(150 + 60 * len(self.items), barmode="group"))
        for name, color, seconds in (
            ("now", CAPACITY.color, [need.step_seconds for need in self.items]),
            ("with what is needed", COMMUNICATION.color, [need.best_step_seconds for need in self.items]),
        ):
            figure.add_bar(
                name=name, orientation="h", y=[need.resource for need in self.items],
                x=[value * scale for value in seconds], marker_color=color,
            )  # fmt: skip
        figure.update_xaxes(title_text=f"{unit} per step", rangemode="tozero")
        figure.update_yaxes(autorange="reversed", automargin=True)
        return figure


def needs(
    experiment: ExperimentSource = None,
    resources: Sequence[str] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
) -> NeedsResult:
    """How much more of what would hide the cost of offloading, as `zsim needs` finds it by simulation.

    `resources` are "drives", "drive bandwidth", "pcie", "c2c", "host memory", "cpu", by default all that the
    job uses.

        for need in zsim.needs("offloaded.toml", ["cpu"]):
            print(need.sentence())

    Raises InputError where nothing is offloaded.
    """
    resolved_experiment = experiment_of(experiment, overrides)
    names = _used_resources(resolved_experiment) if resources is None else resources
    return NeedsResult(tuple(offload_need(resolved_experiment, name) for name in names))
