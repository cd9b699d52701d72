"""Predict measured runs, on several processes if there are many."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

from zsim.engine.allocation import Allocation
from zsim.engine.micro_batches import simulate_step
from zsim.errors import InputError, NotSimulatedError
from zsim.explain.pipeline import seconds_by_cause
from zsim.explain.sampled_micro_batches import full_offload_range
from zsim.plan.memory.capacity import framework_memory, usable_bytes
from zsim.plan.memory.tensors import device_peaks
from zsim.report.job_features import job_features
from zsim.specs.experiment.data.loading import waiting_seconds
from zsim.specs.experiment.job import Job
from zsim.study.measured.results import RowResult
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
    load = step.peak_bytes / usable_bytes(job.cluster)
    return replace(
        measured,
        status="ok",
        predicted_seconds=step.seconds,
        relative_error=_relative_error(step.seconds, measured.measured_seconds),
        predicted_memory_bytes=memory[kind],
        memory_relative_error=_relative_error(memory[kind], measured.measured_memory_bytes),
        predicted_fits=step.peak_bytes <= usable_bytes(job.cluster),
        predicted_retries=step.retries if has_room else None,
        predicted_failures=step.failures if has_room else None,
        predicted_load=load,
        verdict=_verdict(measured.source, validation.features, load, step),
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


def _verdict(source: str, features: Features, load: float, step: StepPrediction) -> Verdict:
    """Whether the run fits, judged by published memory of other sources."""
    is_short = load <= 1 and bool(step.retries or step.failures)
    return verdict_of(
        load,
        features.framework,
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
    framework = framework_memory(job, outcome.plan).bytes
    breakdown = seconds_by_cause(outcome)
    last, count = step.peak_plan.programs[-1], step.outcome_micro_batches
    last_rank_bytes = (
        max(last.memoize(device_peaks).get("gpu", 0), last.startup_bytes) if is_of_last_rank else None
    )
    loading, training, ranks = job.experiment.data, job.training, job.parallelism.model_ranks
    seconds = step.seconds + waiting_seconds(loading, training, job.gpus_per_node, ranks, step.seconds)
    simulated = outcome.trace.step_seconds
    return StepPrediction(
        seconds, step.peak_bytes, framework, outcome.allocation, count, breakdown, simulated, last_rank_bytes,
        input_spread(OFFLOADING, full_offload_range(step), seconds),
    )  # fmt: skip


def _relative_error(predicted: float, measured: float | None) -> float | None:
    return predicted / measured - 1 if measured else None
