"""Measured runs and zsim's predictions of them, made on several processes if there are many."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from statistics import fmean, median
from typing import Any, TypeVar

from zsim.engine.allocation import Allocation
from zsim.engine.micro_batches import simulate_step
from zsim.errors import InputError, NotSimulatedError
from zsim.explain.pipeline import seconds_by_cause
from zsim.explain.variants import full_offload_range
from zsim.plan.memory.capacity import framework_memory, startup_bytes, usable_bytes
from zsim.plan.memory.tensors import bytes_at_peak, device_peaks
from zsim.plan.ops import state_bytes
from zsim.report.job_features import job_features
from zsim.specs.experiment.data.loading import waiting_seconds
from zsim.specs.experiment.job import Job
from zsim.validated.features import Features
from zsim.validated.memory import MemoryErrors, estimate_memory_errors, memory_runs
from zsim.validated.validation import (
    OFFLOADING,
    InputSpread,
    Validation,
    input_spread,
    validation_of,
    widen_for_input,
)
from zsim.validated.verdict import Verdict, verdict_of


def summarise(rows: Sequence[RowResult]) -> dict[str, Any]:
    """The figures of all rows, and of each source in alphabetical order."""
    sources = sorted({row.source for row in rows})
    by_source = {name: _figures([row for row in rows if row.source == name]) for name in sources}
    return _figures(rows) | {"by_source": by_source, "mean_of_sources": mean_of_sources(rows)}


def mean_of_sources(rows: Sequence[RowResult]) -> dict[str, float | None]:
    """The means over sources of each source's own mean, median and bias. All sources have the same weight,
    however many rows they have.
    """
    errors: dict[str, list[float]] = {}
    for row in rows:
        if row.relative_error is not None:
            errors.setdefault(row.source, []).append(row.relative_error)
    names = ("mean_absolute_error", "median_absolute_error", "bias")
    source_figures = [error_figures(source_errors) for source_errors in errors.values()]
    return {
        name: fmean(figures[name] or 0.0 for figures in source_figures) if source_figures else None
        for name in names
    }


def _figures(rows: Sequence[RowResult]) -> dict[str, Any]:
    times = [row.relative_error for row in rows if row.relative_error is not None]
    memory = [row.memory_relative_error for row in rows if row.memory_relative_error is not None]
    by_kind: dict[str, list[float]] = {}
    for row in rows:
        for kind, error in row.memory_errors.items():
            by_kind.setdefault(kind, []).append(error)
    outcomes = [row for row in rows if row.predicted_fits is not None and row.measured_fits is not None]
    return {
        "rows": len(times),
        "simulated": sum(row.status == "ok" for row in rows),
        "skipped": sum(row.status == "skipped" for row in rows),
        **error_figures(times),
        "within_range": _coverage([row.is_within_range for row in rows]),
        "memory": {"rows": len(memory), **error_figures(memory)},
        "memory_by_kind": {
            kind: {"rows": len(errors), **error_figures(errors)} for kind, errors in sorted(by_kind.items())
        },
        "fits": {
            "rows": len(outcomes),
            "right": sum(row.predicted_fits == row.measured_fits for row in outcomes),
        },
    }


def _coverage(outcomes: Iterable[bool | None]) -> dict[str, Any]:
    """The number of rows with an interval, and the fraction of them whose measured step lies inside."""
    judged = [is_inside for is_inside in outcomes if is_inside is not None]
    return {"rows": len(judged), "fraction": sum(judged) / len(judged) if judged else None}


def error_figures(errors: Iterable[float]) -> dict[str, float | None]:
    """Mean, median and worst absolute error, mean signed error, and the fraction within 10 %."""
    signed = list(errors)
    if not signed:
        names = ("mean_absolute_error", "median_absolute_error", "worst_absolute_error", "bias")
        return {**dict.fromkeys(names), "within_10_percent_fraction": None}
    absolute = [abs(error) for error in signed]
    return {
        "mean_absolute_error": fmean(absolute),
        "median_absolute_error": median(absolute),
        "worst_absolute_error": max(absolute),
        "bias": fmean(signed),
        "within_10_percent_fraction": sum(error <= 0.1 for error in absolute) / len(absolute),
    }


@dataclass(frozen=True)
class RowResult:
    """A row of a table, measured and predicted, or the reason why it was skipped. Errors are predicted over
    measured, less one.
    """

    row_id: str
    source: str
    status: str
    reason: str | None = None
    measured_seconds: float | None = None
    predicted_seconds: float | None = None
    relative_error: float | None = None
    measured_memory_bytes: int | None = None
    predicted_memory_bytes: int | None = None
    memory_relative_error: float | None = None
    memory_kind: str | None = None
    """The figure of memory that `measured_memory_bytes` and `predicted_memory_bytes` compare."""
    measured_fits: bool | None = None
    predicted_fits: bool | None = None
    predicted_retries: float | None = None
    """How often the allocator is predicted to run short, per micro-batch. None if the tensors alone exceed
    the GPU's memory.
    """
    predicted_failures: float | None = None
    """How often the allocator is predicted to find no room even then, per micro-batch. None if the tensors
    alone exceed the GPU's memory.
    """
    predicted_load: float | None = None
    """The peak over the usable bytes."""
    predicted_exact: float | None = None
    """The part of it that model states are."""
    verdict: Verdict | None = None
    """The verdict on the load, by the errors of other sources."""
    role: str = ""
    tier: str = ""
    assumptions: tuple[str, ...] = ()
    measured_memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of every kind that is published (allocated, active, reserved, device)."""
    predicted_memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of every kind."""
    predicted_range_seconds: tuple[float, float] | None = None
    """Contains the step with probability 80 %, according to runs of other sources (`validation`)."""
    validation: Validation | None = None
    framework: str = ""
    """The name of the program that was measured."""
    parallelism: str = ""
    """"TP", "PP", "CP", "mixed" or "data parallel"."""

    @property
    def is_within_range(self) -> bool | None:
        """Whether the measured step lies inside the predicted range, or None if either is missing."""
        if self.measured_seconds is None or self.predicted_range_seconds is None:
            return None
        low, high = self.predicted_range_seconds
        return low <= self.measured_seconds <= high

    @property
    def memory_errors(self) -> dict[str, float]:
        """Relative error of every memory figure that the row publishes, by kind."""
        predicted = self.predicted_memory
        return {kind: predicted[kind] / size - 1 for kind, size in self.measured_memory.items() if predicted}


@dataclass(frozen=True)
class CheckResult:
    """The results of all rows, in the order of the files."""

    rows: tuple[RowResult, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The rows and their summary, as `--json` has them."""
        rows = [_row_dict(row) for row in self.rows]
        return {"rows": rows, "summary": summarise(self.rows), "notes": list(self.notes)}


def _row_dict(row: RowResult) -> dict[str, Any]:
    validation = None if row.validation is None else row.validation.to_dict()
    bare = asdict(replace(row, validation=None, verdict=None))
    word, probability = (None, None) if row.verdict is None else (row.verdict.word, row.verdict.probability)
    return bare | {
        "assumptions": list(row.assumptions),
        "validation": validation,
        "verdict": word,
        "fits_probability": probability,
    }


Run = TypeVar("Run")
"""A row of a table of measured runs."""


def iterate_predictions(
    runs: Sequence[Run], predict: Callable[[Run], RowResult], *, processes: int | None = None
) -> Iterator[RowResult]:
    """`predict` of every run, each as soon as it and those before it are predicted, on several processes if
    there are many. Once the caller stops iterating, no further row is begun.
    """
    count = min(processes or os.cpu_count() or 1, 1 + len(runs) // 16)
    if count == 1:
        yield from map(predict, runs)
        return
    pool = ProcessPoolExecutor(count)
    try:
        yield from pool.map(predict, runs, chunksize=4)
    finally:
        pool.shutdown(cancel_futures=True)


def predict_job(
    measured: RowResult,
    job: Job,
    *,
    assumptions: tuple[str, ...] = (),
    framework: str = "",
    network: str | None = None,
    is_of_last_rank: bool = False,
) -> RowResult:
    """`measured` with the prediction of its job. Trust is judged by the runs of other sources.

    `framework` is its name in tables of errors, by default that of the job's features. `network` is the
    network between nodes where the cluster does not name it. `is_of_last_rank` says that the allocated bytes
    are those of the last pipeline rank. Raises NotSimulatedError where the framework would refuse the job.
    """
    try:
        step = predict_step(job, is_of_last_rank=is_of_last_rank)
    except InputError as error:
        raise NotSimulatedError(str(error)) from None
    kind = measured.memory_kind or "allocated"
    memory = step.memory | ({"total": step.peak_bytes} if kind == "total" else {})
    validation = _validation(measured.source, job, step, network)
    has_room = step.peak_bytes <= job.cluster.gpu.memory.capacity
    usable = usable_bytes(job.cluster)
    load, exact = step.peak_bytes / usable, step.state_bytes / usable
    return replace(
        measured,
        status="ok",
        predicted_seconds=step.seconds,
        relative_error=_relative_error(step.seconds, measured.measured_seconds),
        predicted_memory_bytes=memory[kind],
        memory_relative_error=_relative_error(memory[kind], measured.measured_memory_bytes),
        predicted_fits=step.peak_bytes <= usable,
        predicted_retries=step.retries if has_room else None,
        predicted_failures=step.failures if has_room else None,
        predicted_load=load,
        predicted_exact=exact,
        verdict=_verdict(measured.source, validation.features, (load, exact), step),
        assumptions=assumptions,
        predicted_memory=memory,
        predicted_range_seconds=validation.range_of(step.seconds),
        validation=validation,
        framework=framework or validation.features.framework,
    )


def _validation(source: str, job: Job, step: StepPrediction, network: str | None) -> Validation:
    """How far to trust the prediction, judged by validated runs of other sources."""
    breakdown, total_seconds = step.breakdown_seconds, sum(step.breakdown_seconds.values())
    features = job_features(job, breakdown, total_seconds, step.retries, network)
    judged = validation_of(features, excluded_source=source).extend_to_shorter(step.share_without_retries)
    return judged if step.offloading is None else widen_for_input(judged, step.offloading)


def _verdict(
    source: str, features: Features, load_and_exact: tuple[float, float], step: StepPrediction
) -> Verdict:
    """Whether the run fits, judged by published memory of other sources."""
    load, exact = load_and_exact
    is_short = load <= 1 and bool(step.retries or step.failures)
    return verdict_of(
        load,
        features.framework,
        exact=exact,
        is_short=is_short,
        errors=_errors_of_others(source, features.framework, features.is_mixture),
    )


@cache
def _errors_of_others(source: str, framework: str, is_mixture: bool) -> MemoryErrors:
    others = [run for run in memory_runs() if run.source != source]
    return estimate_memory_errors(framework, others, is_mixture=is_mixture)


@dataclass(frozen=True)
class StepPrediction:
    """A predicted step of a row."""

    seconds: float
    peak_bytes: int
    """The bytes at the peak, in total."""
    state_bytes: int
    """Its model states. 0 where the peak is before the first step."""
    framework_bytes: int
    """The framework's part of the peak."""
    allocation: Allocation | None
    """The behaviour of torch's allocator over `micro_batches`, which take `simulated_seconds`. None for a
    job that does not fit, where the allocator is not simulated.
    """
    micro_batches: int
    breakdown_seconds: Mapping[str, float]
    simulated_seconds: float
    last_rank_bytes: int | None = None
    """The peak of the allocated bytes of the last pipeline rank, if they are what is published."""
    offloading: InputSpread | None = None
    """The step with the inputs of offloading at both ends of their spreads. None where nothing is offloaded.
    """

    @property
    def retries(self) -> float:
        """How often the allocator runs short, per micro-batch."""
        return 0.0 if self.allocation is None else self.allocation.counts.retries / self.micro_batches

    @property
    def failures(self) -> float:
        """How often the allocator finds no room, per micro-batch."""
        return 0.0 if self.allocation is None else self.allocation.counts.failures / self.micro_batches

    @property
    def share_without_retries(self) -> float:
        """The step without the allocator's retries over the step, a fraction."""
        return 1.0 if self.allocation is None else 1 - self.allocation.extra_seconds / self.simulated_seconds

    @property
    def memory(self) -> dict[str, int]:
        """Peak bytes by kind, since the process began."""
        allocated = self.peak_bytes - self.framework_bytes
        reserved_bytes, active_bytes = (
            (0, 0)
            if self.allocation is None
            else (self.allocation.reserved_bytes, self.allocation.active_bytes)
        )
        reserved = max(allocated, reserved_bytes)
        return {
            "allocated": allocated if self.last_rank_bytes is None else self.last_rank_bytes,
            "active": max(allocated, active_bytes),
            "reserved": reserved,
            "device": reserved + self.framework_bytes,
        }


def predict_step(job: Job, *, is_of_last_rank: bool = False) -> StepPrediction:
    """The job's step with the time that it waits for its samples, the same as `zsim run` has for its
    experiment.
    """
    step = simulate_step(job, seconds_only=True)
    outcome = step.outcome
    framework, plan = framework_memory(job, outcome.plan).bytes, step.peak_plan
    is_at_start = startup_bytes(job, plan) == step.peak_bytes
    states = 0 if is_at_start else state_bytes(bytes_at_peak(plan))
    breakdown = seconds_by_cause(outcome)
    last, count = plan.programs[-1], step.outcome_micro_batches
    last_rank_bytes = (
        max(last.memoize(device_peaks).get("gpu", 0), last.startup_bytes) if is_of_last_rank else None
    )
    loading, training, ranks = job.experiment.data, job.training, job.parallelism.model_ranks
    seconds = step.seconds + waiting_seconds(loading, training, job.gpus_per_node, ranks, step.seconds)
    simulated = outcome.trace.step_seconds
    return StepPrediction(
        seconds, step.peak_bytes, states, framework, outcome.allocation, count, breakdown, simulated,
        last_rank_bytes, input_spread(OFFLOADING, full_offload_range(step), seconds),
    )  # fmt: skip


def _relative_error(predicted: float, measured: float | None) -> float | None:
    return predicted / measured - 1 if measured else None
