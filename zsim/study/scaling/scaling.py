"""One experiment on a growing number of GPUs: how far from linear, where efficiency breaks, and why.

Weak scaling keeps the batch per GPU, strong scaling the global batch. Fill mode gives every GPU the largest
micro-batch that fits without being held up by torch's allocator, which grows as sharding leaves more room.

Degrees of tensor, pipeline and context parallelism stay, and the replicas of the model grow in number. With
`grow` one of the degrees grows instead, and the replicas stay.

# [Note: what a token costs]
The cost of a token, in GPU-seconds by cause, is the step's critical path by cause, times the number of GPUs,
over the tokens of the step. Efficiency is the lowest total cost over the cost at this count, so a loss of
efficiency has a reason: the cause whose cost per token grew most. Time that leaves the path under one cause
may reappear under another: if computation gets faster, communication that it had hidden is exposed. So where
some causes grew and others shrank, the growth of the largest cause overstates its effect. Its net change is
its share of the total change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, log2
from pathlib import Path
from typing import Any, Literal

from zsim.engine.simulate import simulate_job
from zsim.errors import InputError, ZsimError, did_you_mean
from zsim.files import check_folder
from zsim.report.framework import report_role
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.meanings import BREAKDOWN, CAPACITY
from zsim.report.views.result import Column, ResultTable, Section
from zsim.report.views.text.plain import paragraph, table
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.spec import ModelSpec
from zsim.study.differences import is_shared, range_of_row, verdict_of_row
from zsim.study.rollouts import drop_rollout, resize_rollout
from zsim.study.search import largest_fitting
from zsim.study.sweep.identity import Record
from zsim.study.sweep.points import Point
from zsim.study.sweep.row import RUN_COLUMNS
from zsim.study.sweep.sweep import run_points
from zsim.units import format_duration
from zsim.validated.verdict import Verdict

Mode = Literal["weak", "strong", "fill"]
GROWN = ("tensor", "pipeline", "context")
KNEE = 0.05  # loss of efficiency per doubling
_MAX_COUNTS = 200


@dataclass(frozen=True)
class ScalingPoint:
    """The experiment on one number of GPUs, or `error`, the reason why it has no step there."""

    gpus: int
    error: str | None = None
    nodes: int = 0
    micro_batch_size: int = 0
    gradient_accumulation_steps: int = 0
    step_seconds: float = 0.0
    step_tokens: int = 0
    mfu_fraction: float | None = None
    fits: bool = False
    gpu_peak_bytes: int = 0
    gpu_capacity_bytes: int | None = None
    costs: Mapping[str, float] = field(default_factory=dict)
    """GPU-seconds per token, by cause."""
    allocator_retries: int | None = None
    largest_micro_batch: int | None = None
    step_seconds_range: tuple[float, float] | None = None
    is_shared: bool = False
    """Whether several ranks share a replica of the model."""
    whole_run: Mapping[str, Any] | None = None
    """Columns of the run of days, where the experiment has `[run]`."""
    verdict: Verdict | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.step_tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def token_gpu_seconds(self) -> float:
        """Cost of a token in GPU-seconds."""
        return self.gpus * self.step_seconds / self.step_tokens if self.step_tokens else 0.0


@dataclass(frozen=True, slots=True)
class EfficiencyChange:
    """The change of efficiency between two counts, from `before` to `after`, mostly due to `cause`."""

    start: int
    end: int
    before: float
    after: float
    cause: str
    cause_change: float
    """The change of the cost of `cause` alone, relative to a token's total cost at `start`."""
    change: float
    """The change of a token's total cost, relative to that cost at `start`."""
    net_change: float
    """`cause_change` less its share of opposite changes, so that net changes add up to `change`."""
    offset: str = ""
    """The cause with the largest opposite change ("" without one)."""

    @property
    def change_per_doubling(self) -> float:
        return (self.after - self.before) / log2(self.end / self.start)


@dataclass(frozen=True)
class Scaling:
    """The points of all counts in order."""

    title: str
    mode: Mode
    points: tuple[ScalingPoint, ...]
    base: ScalingPoint
    """The point where a token costs least, to which efficiency is relative. See `best_of`."""
    is_stopped: bool = False
    grow: str | None = None
    """The degree of `GROWN` that grows with the GPUs, if any."""

    def efficiency(self, point: ScalingPoint) -> float:
        return self.base.token_gpu_seconds / point.token_gpu_seconds

    @property
    def runs(self) -> list[ScalingPoint]:
        return [point for point in self.points if point.error is None]

    def changes(self) -> list[EfficiencyChange]:
        """The change of efficiency from each count to the next, over the counts that fit, if any do."""
        return [self._change_between(first, second) for first, second in pairwise(self._comparable_points())]

    def _comparable_points(self) -> list[ScalingPoint]:
        return [point for point in self.runs if point.fits] or self.runs

    def knees(self) -> list[EfficiencyChange]:
        """Falls of more than `KNEE` per doubling. Consecutive ones with the same cause are merged."""
        return self._merge_changes(lambda delta: delta.change_per_doubling < -KNEE)

    def gains(self) -> list[EfficiencyChange]:
        """Rises of more than `KNEE` per doubling: faster than linear."""
        return self._merge_changes(lambda delta: delta.change_per_doubling > KNEE)

    def _merge_changes(self, is_wanted: Callable[[EfficiencyChange], bool]) -> list[EfficiencyChange]:
        by_gpus = {point.gpus: point for point in self.runs}
        merged: list[EfficiencyChange] = []
        for delta in filter(is_wanted, self.changes()):
            if merged and merged[-1].end == delta.start and merged[-1].cause == delta.cause:
                merged[-1] = self._change_between(by_gpus[merged[-1].start], by_gpus[delta.end])
            else:
                merged.append(delta)
        return merged

    def _change_between(self, first: ScalingPoint, second: ScalingPoint) -> EfficiencyChange:
        before, after = self.efficiency(first), self.efficiency(second)
        sign = 1 if after < before else -1
        names = dict.fromkeys([*first.costs, *second.costs])
        growth = {name: second.costs.get(name, 0.0) - first.costs.get(name, 0.0) for name in names}
        cause = max(growth, key=lambda name: sign * growth[name], default="")
        total_cost = first.token_gpu_seconds
        change = (second.token_gpu_seconds - total_cost) / total_cost
        share = growth.get(cause, 0.0) / total_cost
        aligned = sum(cost for cost in growth.values() if cost * sign > 0) / total_cost
        net = share * change / aligned if aligned else 0.0
        opposite = min(growth, key=lambda name: sign * growth[name], default="")
        offset = opposite if sign * growth.get(opposite, 0.0) < 0 else ""
        return EfficiencyChange(first.gpus, second.gpus, before, after, cause, share, change, net, offset)


def best_of(runs: Sequence[ScalingPoint]) -> ScalingPoint:
    """The point with the lowest cost per token, the fewest GPUs among equals. It is chosen among the points
    that fit without allocator retries, or else among those that fit, or else among all.
    """
    fitting = [point for point in runs if point.fits] or list(runs)
    roomy = [point for point in fitting if not point.allocator_retries] or fitting
    return min(roomy, key=lambda point: point.token_gpu_seconds)


def parse_counts(text: str) -> list[int]:
    """The GPU counts of "8..1024" (doubling), "8..4096:4" (times four) or "8,24,64", ascending."""
    if ".." in text:
        span, _, factor = text.partition(":")
        first, last = (_count(part, text) for part in span.split("..", 1))
        step = _count(factor, text) if factor else 2
        if step < 2 or last < first:
            raise InputError(f"--gpus {text}: expected FIRST..LAST upwards, times at least 2")
        counts = [first]
        while counts[-1] * step <= last:
            counts.append(counts[-1] * step)
    else:
        counts = sorted({_count(part, text) for part in text.split(",")})
    if len(counts) > _MAX_COUNTS:
        raise InputError(f"--gpus {text}: {len(counts)} counts, expected at most {_MAX_COUNTS}")
    return counts


def _count(part: str, text: str) -> int:
    try:
        count = int(part)
    except ValueError:
        count = 0
    if count < 1:
        raise InputError(f"--gpus {text}: expected counts as in 8..1024, 8..4096:4 or 8,24,64")
    return count


def run_scaling(
    experiment: Experiment,
    counts: Sequence[int],
    mode: Mode,
    folder: Path,
    *,
    global_batch: int | None = None,
    grow: str | None = None,
    jobs: int = 1,
    is_quiet: bool = False,
) -> Scaling:
    """Simulate the experiment on each number of GPUs. Results are kept in `folder` by content.

    `global_batch` is in sequences (strong only), by default the experiment's. `grow` is the degree of `GROWN`
    that grows with the GPUs, from the experiment's on its GPUs (None: all stay). Raises InputError where no
    count can be simulated, or `folder` cannot be made.
    """
    if grow is not None and grow not in GROWN:
        raise InputError(f"--grow {grow}: expected one of {', '.join(GROWN)}{did_you_mean(grow, GROWN)}")
    if global_batch is not None and mode != "strong":
        raise InputError("--global-batch: only strong scaling has one batch for all; add --strong")
    check_folder(folder)
    if experiment.rl is not None and (grow is not None or global_batch is not None):
        option = "--global-batch" if grow is None else "--grow"
        raise InputError(f"{option}: does nothing for an experiment with [rl]; expected it left out")
    job, total = _try_resolve(experiment), experiment.training.global_batch_size
    is_of_all = mode == "strong" and (global_batch or total) is not None
    if (
        experiment.rl is None
        and job is None
        and (grow is not None or ((mode == "strong" or total is not None) and not is_of_all))
    ):
        resolve(experiment)  # raises with the reason why there is no batch to keep, or no degree
    batch = global_batch or total or (job and round(job.sequences_per_step)) or 1
    points, largest = [], []
    for number, count in enumerate(counts):
        resized, largest_batch, error = None, None, None
        try:
            resized, largest_batch = _resize(experiment, job, count, mode, batch, grow)
        except ZsimError as problem:
            error = str(problem)
        points.append(Point(number, {"gpus": count}, resized, error))
        largest.append(largest_batch)
    run = run_points(points, folder, jobs=jobs, is_quiet=is_quiet)
    empty: Record = {"status": "error", "error": "not run", "row": {}}
    scaling_points = tuple(
        _scaling_point(point, run.records.get(point.number, empty), largest_batch)
        for point, largest_batch in zip(points, largest, strict=True)
    )
    runs = [candidate for candidate in scaling_points if candidate.error is None]
    if not runs and not run.is_stopped:
        raise InputError(f"none of {len(counts)} counts of GPUs can be simulated: {scaling_points[0].error}")
    base = best_of(runs) if runs else scaling_points[0]
    first = next((p.experiment for p, s in zip(points, scaling_points, strict=True) if s is base), None)
    return Scaling(_title(first or experiment), mode, scaling_points, base, run.is_stopped, grow)


def _try_resolve(experiment: Experiment) -> Job | None:
    try:
        return resolve(experiment)
    except ZsimError:
        return None


def _resize(
    experiment: Experiment, job: Job | None, gpus: int, mode: Mode, batch: int, grow: str | None = None
) -> tuple[Experiment, int | None]:
    """(the experiment on `gpus` GPUs with the mode's batch and shard groups of the same size, the largest
    micro-batch that fits in mode "fill", else None)."""
    if experiment.rl is not None:
        return resize_rollout(experiment, gpus, mode), None
    overrides: dict[str, Any] = {"gpus": gpus, "nodes": None}
    ranks = 1 if job is None else job.parallelism.model_ranks
    if grow is not None and job is not None:
        overrides[f"parallelism.{grow}"] = degree = _grow_degree(job, gpus, grow)
        ranks = ranks // getattr(job.parallelism, grow) * degree
    replicate = getattr(experiment.strategy, "replicate", None)
    if replicate and replicate > 1 and job is not None:
        shard = job.world_size * ranks // job.parallelism.model_ranks // replicate
        if gpus % shard:
            raise InputError(f"gpus: found {gpus}, expected a multiple of the shard group's {shard}")
        overrides["strategy.replicate"] = gpus // shard
    micro = job.training.micro_batch_size if job is not None else experiment.training.micro_batch_size or 1
    steps = job.training.gradient_accumulation_steps if job is not None else 1
    largest = None
    if mode == "strong":
        micro, steps = _split_batch(batch, gpus, micro, ranks)
    elif mode == "fill":
        micro, largest = _fill(lambda size: _set_batch(experiment, overrides, size, steps, gpus // ranks))
    return _set_batch(experiment, overrides, micro, steps, gpus // ranks), largest


def _grow_degree(job: Job, gpus: int, axis: str) -> int:
    """The degree that keeps the number of replicas on `gpus` GPUs."""
    degree: int = getattr(job.parallelism, axis)
    grown_degree, remainder = divmod(degree * gpus, job.world_size)
    if remainder or not grown_degree:
        gpus_per_degree = job.world_size // degree
        raise InputError(
            f"gpus: found {gpus:,}, expected a multiple of {gpus_per_degree:,}: {axis} grows from {degree:,} "
            f"on {job.world_size:,} GPUs"
        )
    return grown_degree


def _fill(resize: Callable[[int], Experiment]) -> tuple[int, int]:
    """(micro-batch to use, largest micro-batch that fits). If torch's allocator slows the step with the
    largest one, smaller ones are tried as long as that reduces the time per sequence.
    """
    largest = largest_fitting(resize) or 1
    size, best, cheapest = largest, 1, inf
    while size >= 1:
        outcome = simulate_job(resolve(resize(size)))
        seconds = outcome.trace.step_seconds / size
        if seconds >= cheapest:
            break
        best, cheapest = size, seconds
        if outcome.allocation is None or not outcome.allocation.extra_seconds:
            break
        size -= max(1, size // 16)
    return best, largest


def _split_batch(batch: int, gpus: int, micro: int, gpus_per_replica: int) -> tuple[int, int]:
    """(micro-batch, steps) of a replica, whose micro-batch only shrinks to divide the replica's batch."""
    replicas = gpus // gpus_per_replica
    if gpus % gpus_per_replica or batch % replicas:
        replica_phrase = f", {gpus_per_replica:,} to a replica" if gpus_per_replica > 1 else ""
        raise InputError(f"a batch of {batch:,} sequences does not divide over {gpus:,} GPUs{replica_phrase}")
    replica_batch = batch // replicas
    size = max(divisor for divisor in range(1, min(micro, replica_batch) + 1) if replica_batch % divisor == 0)
    return size, replica_batch // size


def _set_batch(
    experiment: Experiment, overrides: Mapping[str, Any], micro: int, steps: int, replicas: int
) -> Experiment:
    changes = {**overrides, "training.global_batch_size": None}
    changes |= experiment.strategy.batch_overrides(micro, steps, replicas)
    return change_experiment(experiment, changes)


def _scaling_point(point: Point, record: Record, largest: int | None) -> ScalingPoint:
    gpus = point.values["gpus"]
    if record["status"] != "ok":
        return ScalingPoint(gpus, record["error"])
    row = record["row"]
    prefix, per_token = "critical_path_seconds.", gpus / row["step_tokens"]
    costs = {
        name.removeprefix(prefix): seconds * per_token
        for name, seconds in row.items()
        if name.startswith(prefix)
    }
    return ScalingPoint(
        gpus,
        None,
        row["nodes"],
        row["training.micro_batch_size"],
        row["training.gradient_accumulation_steps"],
        row["step_seconds"],
        row["step_tokens"],
        row["mfu_fraction"],
        row["fits"],
        row["gpu_peak_bytes"],
        row["gpu_capacity_bytes"],
        costs,
        row.get("allocator_retries"),
        largest,
        range_of_row(row),
        is_shared(row),
        {name: row.get(name) for name in RUN_COLUMNS} if "run_error" in row else None,
        verdict_of_row(row),
    )


def _title(experiment: Experiment) -> str:
    job = _try_resolve(drop_rollout(experiment))
    if job is None:
        model = experiment.model
        return model.name if isinstance(model, ModelSpec) else str(model)
    label = report_role(job.kind).headline(job, job.strategy)
    return f"{job.model.name} | {label} | {job.cluster.name}"


# -- Whole runs in a scaling study: goodput, days and GPU-hours by the number of GPUs ----------------------


_COLUMNS = [Column(title) for title in ("GPUs", "days", "5 to 95 %", "goodput", "failures", "save every")]


def run_lines(scaling: Scaling) -> Iterator[str]:
    """A table of the runs, then the number of GPUs with the fewest days. Empty without `[run]`."""
    answers = _answers(scaling)
    if not answers:
        return
    yield ""
    yield "whole runs, with saves and failures"
    heading, *lines = table(_COLUMNS, [_cells(point, answer) for point, answer in answers])
    yield heading
    for (_, answer), line in zip(answers, lines, strict=True):
        error = answer["run_error"]
        yield from [line] if error is None else paragraph(f"{line} {error}", indent=8)
    mean_days = [
        (answer["expected_days"], point.gpus) for point, answer in answers if answer["expected_days"]
    ]
    if mean_days:
        days, gpus = min(mean_days)
        yield from paragraph(f"The fewest days: {days:.2f}, on {gpus:,} GPUs.")


def run_section(scaling: Scaling) -> list[Section]:
    """The page's section with its figures. Empty without `[run]`."""
    answers = _answers(scaling)
    if not answers:
        return []
    figures = [
        ("goodput", "Goodput: the steps' time over the whole run's, saves and failures included.",
         _figure(answers, "goodput_fraction", 100.0, "%", BREAKDOWN["compute"].color)),
        ("days", "Days to the last token; dashed: if nothing were saved and nothing failed.",
         _days_figure(answers)),
    ]  # fmt: skip
    rows = [[*_cells(point, answer), answer["run_error"] or ""] for point, answer in answers]
    return [Section("Whole runs", figures, ResultTable("", [*_COLUMNS, Column("", is_left=True)], rows))]


def run_dict(point: ScalingPoint) -> dict[str, Any]:
    """The run's entries in the study's JSON."""
    return {} if point.whole_run is None else {"run": dict(point.whole_run)}


def _answers(scaling: Scaling) -> list[tuple[ScalingPoint, Mapping[str, Any]]]:
    return [(point, point.whole_run) for point in scaling.runs if point.whole_run is not None]


def _cells(point: ScalingPoint, answer: Mapping[str, Any]) -> list[str]:
    if answer["run_error"] is not None:
        return [f"{point.gpus:,}", "", "", "", "", ""]
    days, low, high = answer["expected_days"], answer["days_low"], answer["days_high"]
    interval, goodput = answer["interval_seconds"], answer["goodput_fraction"]
    return [
        f"{point.gpus:,}",
        "no mean" if days is None else f"{days:.2f}",
        f"{low:.1f} to {high:.1f}" if high is not None else f"from {low:.1f}",
        "-" if goodput is None else f"{goodput * 100:.1f} %",
        f"{answer['failures']:,.1f}",
        "-" if interval is None else format_duration(interval),
    ]


def _figure(
    answers: list[tuple[ScalingPoint, Mapping[str, Any]]], name: str, factor: float, unit: str, color: str
) -> Figure:
    figure = Figure(layout(360))
    points = [
        (point.gpus, answer[name] * factor) for point, answer in answers if answer.get(name) is not None
    ]
    figure.add_scatter(
        name=name.removesuffix("_fraction").replace("_", " "),
        x=[gpus for gpus, _ in points],
        y=[value for _, value in points],
        mode="lines+markers",
        line={"color": color, "width": 3},
        hovertemplate="%{x:,} GPUs: %{y:,.1f} " + unit + "<extra></extra>",
    )
    counts = [point.gpus for point, _ in answers]
    figure.update_xaxes(title_text="GPUs", type="log", tickvals=counts, ticktext=[f"{n:,}" for n in counts])
    figure.update_yaxes(title_text=unit, automargin=True, rangemode="tozero")
    return figure


def _days_figure(answers: list[tuple[ScalingPoint, Mapping[str, Any]]]) -> Figure:
    figure = _figure(answers, "expected_days", 1.0, "days", BREAKDOWN["compute"].color)
    figure.add_scatter(
        name="steps alone",
        x=[point.gpus for point, answer in answers if answer["ideal_days"] is not None],
        y=[answer["ideal_days"] for _, answer in answers if answer["ideal_days"] is not None],
        mode="lines",
        line={"dash": "dash", "width": 2, "color": CAPACITY.color},
        hoverinfo="skip",
    )
    figure.update_yaxes(type="log")
    return figure
