"""Predict the rows of tables of published runs, and compare with the measurements."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from zsim.dataclass import dataclass
from zsim.engine.allocation import Allocation
from zsim.engine.micro_batches import simulate_step
from zsim.errors import InputError, NotSimulatedError
from zsim.explain.pipeline import seconds_by_cause
from zsim.plan.memory.capacity import framework_memory, usable_bytes
from zsim.plan.memory.peaks import device_peaks
from zsim.report.job_features import job_features
from zsim.resources import CHECKOUT
from zsim.specs.experiment.data.loading import waiting_seconds
from zsim.specs.experiment.job import Job
from zsim.study.published.cluster import network_of
from zsim.study.published.job import RowJob, row_job
from zsim.study.published.parallelism import kind_of_parallelism, model_ranks_of
from zsim.study.published.sources import complete_run
from zsim.study.published.statistics import summarise
from zsim.study.published.table import PublishedRun, read_runs
from zsim.validated.features import Features
from zsim.validated.memory import MemoryErrors, estimate_memory_errors, memory_runs
from zsim.validated.validation import Validation, validation_of
from zsim.validated.verdict import Verdict, verdict_of

_MEMORY_KINDS = {"alloc": "allocated", "active": "active", "reserved": "reserved"}  # by column and word

Tweak = Callable[[Job], Job]


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
    """"Megatron", "nanotron" ..."""
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
        """The content of `zsim check --json`."""
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


def shipped_tables() -> list[Path]:
    """The published tables of a source checkout. Raises InputError in an installed package."""
    folder = CHECKOUT / "validation" / "published"
    tables = sorted(folder.glob("*_runs.csv"))
    if not tables:
        raise InputError(
            "check: no table given, and the published runs come with the source checkout only "
            "(validation/published/); expected RUNS.csv"
        )
    return tables


def check_runs(paths: Iterable[Path], *, processes: int | None = None) -> CheckResult:
    """Predict every row of the tables.

    Raises InputError for a file that is not such a table, and for a text in a cell that should be a number.
    """
    table = read_runs(paths)
    results = predict_rows(table.runs, processes=processes)
    return CheckResult(tuple(results), tuple(table.notes))


def predict_rows(
    runs: Sequence[PublishedRun], *, processes: int | None = None, tweak: Tweak | None = None
) -> list[RowResult]:
    """`predict_row` of every run, on several processes if there are many. `tweak` changes each job first."""
    return list(iterate_predictions(runs, processes=processes, tweak=tweak))


def iterate_predictions(
    runs: Sequence[PublishedRun], *, processes: int | None = None, tweak: Tweak | None = None
) -> Iterator[RowResult]:
    """The results of `predict_rows`, each as soon as it and those before it are predicted. Once the caller
    stops iterating, no further row is begun.
    """
    predict = partial(predict_row, tweak=tweak)
    count = min(processes or os.cpu_count() or 1, 1 + len(runs) // 16)
    if count == 1:
        yield from map(predict, runs)
        return
    pool = ProcessPoolExecutor(count)
    try:
        yield from pool.map(predict, runs, chunksize=4)
    finally:
        pool.shutdown(cancel_futures=True)


def predict_row(run: PublishedRun, *, tweak: Tweak | None = None) -> RowResult:
    """zsim's prediction of one row, or the reason why the row is skipped."""
    base = RowResult(
        run.row_id,
        run.source,
        "skipped",
        measured_seconds=measured_seconds(run),
        measured_fits=_measured_fits(run),
        role=run.role,
        tier=run.text("tier"),
        parallelism=kind_of_parallelism(run),
    )
    measured = _measured_memory(run)
    kind = next(iter(measured), _memory_kind(run))
    measured_bytes = measured.get(kind)
    base = replace(base, measured_memory_bytes=measured_bytes, memory_kind=kind, measured_memory=measured)
    try:
        row = row_job(run)
        if tweak is not None:
            row = replace(row, job=tweak(row.job))
        step = _predict_or_refuse(row)
    except NotSimulatedError as error:
        return replace(base, reason=str(error))
    cluster, memory = row.job.cluster, step.memory
    validation = _validation(run, row, step)
    has_room = step.peak_bytes <= cluster.gpu.memory.capacity
    load = step.peak_bytes / usable_bytes(cluster)
    return replace(
        base,
        status="ok",
        predicted_seconds=step.seconds,
        relative_error=_relative_error(step.seconds, base.measured_seconds),
        predicted_memory_bytes=memory[kind],
        memory_relative_error=_relative_error(memory[kind], measured_bytes),
        predicted_fits=step.peak_bytes <= usable_bytes(cluster),
        predicted_retries=step.retries if has_room else None,
        predicted_failures=step.failures if has_room else None,
        predicted_load=load,
        verdict=_verdict(run, validation.features, load, step),
        assumptions=row.assumptions,
        predicted_memory=memory,
        predicted_range_seconds=validation.range_of(step.seconds),
        validation=validation,
        framework=complete_run(run).run.text("engine") or validation.features.framework,
    )


def _validation(run: PublishedRun, row: RowJob, step: StepPrediction) -> Validation:
    """How far to trust the prediction, judged by validated runs of other sources."""
    breakdown, total_seconds = step.breakdown_seconds, sum(step.breakdown_seconds.values())
    features = job_features(row.job, breakdown, total_seconds, step.retries, network_of(run))
    return validation_of(features, excluded_source=run.source).extend_to_shorter(step.share_without_retries)


def _verdict(run: PublishedRun, features: Features, load: float, step: StepPrediction) -> Verdict:
    """Whether the run fits, judged by published memory of other sources."""
    is_short = load <= 1 and bool(step.retries or step.failures)
    return verdict_of(
        load,
        features.framework,
        is_short=is_short,
        errors=_errors_of_others(run.source, features.framework, features.is_mixture),
    )


@cache
def _errors_of_others(source: str, framework: str, is_mixture: bool) -> MemoryErrors:
    other_runs = [run for run in memory_runs() if run.source != source]
    return estimate_memory_errors(framework, other_runs, is_mixture=is_mixture)


@dataclass(frozen=True)
class StepPrediction:
    """A predicted step of a row."""

    seconds: float
    peak_bytes: int
    """The bytes at the peak, in total."""
    framework_bytes: int
    """The framework's part of the peak."""
    allocation: Allocation
    """The behaviour of torch's allocator over `micro_batches`, which take `simulated_seconds`."""
    micro_batches: int
    breakdown_seconds: Mapping[str, float]
    simulated_seconds: float
    last_rank_bytes: int | None = None
    """The peak of the allocated bytes of the last pipeline rank, if they are what is published."""

    @property
    def retries(self) -> float:
        """How often the allocator runs short, per micro-batch."""
        return self.allocation.counts.retries / self.micro_batches

    @property
    def failures(self) -> float:
        """How often the allocator finds no room, per micro-batch."""
        return self.allocation.counts.failures / self.micro_batches

    @property
    def share_without_retries(self) -> float:
        """The step without the allocator's retries over the step, a fraction."""
        return 1 - self.allocation.extra_seconds / self.simulated_seconds

    @property
    def memory(self) -> dict[str, int]:
        """Peak bytes by kind, since the process began."""
        allocated = self.peak_bytes - self.framework_bytes
        reserved = max(allocated, self.allocation.reserved_bytes)
        return {
            "allocated": allocated if self.last_rank_bytes is None else self.last_rank_bytes,
            "active": max(allocated, self.allocation.active_bytes),
            "reserved": reserved,
            "device": reserved + self.framework_bytes,
        }


def _predict_or_refuse(row: RowJob) -> StepPrediction:
    """The row's step. Raises NotSimulatedError where the framework would refuse the job."""
    try:
        return predict_step(row)
    except InputError as error:
        raise NotSimulatedError(str(error)) from None


def measured_seconds(run: PublishedRun) -> float | None:
    """Seconds of one optimizer step: published, or derived from tokens or samples per second. None without
    either."""
    seconds = run.number("step_time_s")
    if seconds:
        return seconds
    gpus, length = run.count("n_gpus"), run.count("seq_len")
    micro_batch, steps = run.count("micro_batch"), run.count("grad_accum") or 1
    replicas = (gpus or 0) // model_ranks_of(run)
    total = run.count("global_batch") or replicas * (micro_batch or 0) * steps
    if not (gpus and length and total):
        return None
    per_gpu = run.number("tokens_per_s_per_gpu") or (run.number("tokens_per_s") or 0.0) / gpus
    if per_gpu:
        return total * length / gpus / per_gpu
    samples = run.number("samples_per_s")
    return total / samples if samples else None


def predict_step(row: RowJob) -> StepPrediction:
    """The row's step with the time that it waits for its samples, the same as `zsim run` has for the row's
    experiment.
    """
    step = simulate_step(row.job, seconds_only=True)
    outcome = step.outcome
    allocation = outcome.allocation
    assert allocation is not None
    framework = framework_memory(row.job, outcome.plan).bytes
    breakdown = seconds_by_cause(outcome)
    last, count = step.peak_plan.programs[-1], step.outcome_micro_batches
    last_rank_bytes = (
        max(last.memoize(device_peaks).get("gpu", 0), last.startup_bytes) if row.is_of_last_rank else None
    )
    loading, training, ranks = row.job.experiment.data, row.job.training, row.job.parallelism.model_ranks
    seconds = step.seconds + waiting_seconds(loading, training, row.job.gpus_per_node, ranks, step.seconds)
    simulated = outcome.trace.step_seconds
    return StepPrediction(
        seconds, step.peak_bytes, framework, allocation, count, breakdown, simulated, last_rank_bytes
    )


def _measured_memory(run: PublishedRun) -> dict[str, int]:
    """Bytes by kind: torch's peak allocated, active, reserved, or the device's used memory."""
    columns = dict(_MEMORY_KINDS)
    if run.text("status") != "oom" and "nvidia-smi" in run.text("mem_kind"):
        columns["other"] = "device"
    values = {kind: run.number(f"mem_{column}_gb") for column, kind in columns.items()}
    return {kind: round(value * 1e9) for kind, value in values.items() if value}


def _memory_kind(run: PublishedRun) -> str:
    """The kind of memory figure for a row that publishes none: from `mem_kind`, or from the rules on its
    source."""
    text = complete_run(run).run.text("mem_kind")
    words = {**_MEMORY_KINDS, "nvidia-smi": "device"}
    return next((kind for word, kind in words.items() if word in text), "allocated")


def _measured_fits(run: PublishedRun) -> bool | None:
    return {"oom": False, "ok": True}.get(run.text("status"))


def _relative_error(predicted: float, measured: float | None) -> float | None:
    return predicted / measured - 1 if measured else None
