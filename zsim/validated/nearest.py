"""The validated runs that a job is nearest to, for a reader. No number is made from this order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, expm1, log2

from zsim.validated.features import Features
from zsim.validated.runs import ValidatedRun, validated_runs

_MAX_RUNS = 6
# Distance of a feature that differs, in doublings of the number of GPUs. Chosen so that a list reads well.
_OTHER_STRATEGY, _OTHER_GPU, _OTHER_FABRIC, _LENGTH = 3.0, 2.0, 1.0, 0.5


@dataclass(frozen=True, slots=True)
class NearRun:
    """A validated run near a job."""

    run: ValidatedRun
    cell: int
    """The number of the closest cell that the run shares with the job (`Features.cells`)."""
    more: int = 0
    """Runs of the same source that share that cell and are not shown."""

    @property
    def error(self) -> float:
        """Predicted over measured, less one: below 0 where zsim was too fast."""
        return expm1(-self.run.error)

    @property
    def measured_over_predicted(self) -> float:
        """In the measure of intervals: above 1 where zsim was too fast."""
        return exp(self.run.error)


def nearest_runs(
    job: Features,
    sequence_length: float | None = None,
    runs: Sequence[ValidatedRun] | None = None,
    *,
    per_source: int = 2,
) -> tuple[NearRun, ...]:
    """The runs nearest to the job, at most `per_source` of each source.

    They are ordered by the closest shared cell, and in it by strategy, GPU, fabric, and the ratios of GPUs,
    parameters and sequence length.
    """
    runs = validated_runs() if runs is None else runs
    ordered = sorted(
        ((_closest_shared_cell(run.features, job), _distance(run, job, sequence_length), run.row_id), run)
        for run in runs
    )
    runs_per_source = Counter((key[0], run.source) for key, run in ordered)
    chosen: list[tuple[int, ValidatedRun]] = []
    for (cell, _, _), run in ordered:
        if len(chosen) == _MAX_RUNS:
            break
        if sum(each.source == run.source for _, each in chosen) < per_source:
            chosen.append((cell, run))
    shown = Counter((cell, run.source) for cell, run in chosen)
    return tuple(
        NearRun(run, cell, runs_per_source[cell, run.source] - shown[cell, run.source])
        for cell, run in chosen
    )


def _closest_shared_cell(run: Features, job: Features) -> int:
    pairs = zip(run.cells, job.cells, strict=True)
    return next(number for number, (run_cell, job_cell) in enumerate(pairs) if run_cell == job_cell)


def _distance(run: ValidatedRun, job: Features, sequence_length: float | None) -> float:
    features = run.features
    distance = _OTHER_STRATEGY * (features.strategy != job.strategy) + _OTHER_GPU * (features.gpu != job.gpu)
    distance += _OTHER_FABRIC * (features.fabric != job.fabric)
    for count, job_count in ((features.gpus, job.gpus), (features.parameters, job.parameters)):
        distance += abs(log2(max(count, 1) / max(job_count, 1)))
    if sequence_length:
        distance += _LENGTH * abs(log2(max(run.settings.sequence_length, 1) / sequence_length))
    return distance
