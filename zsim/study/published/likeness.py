"""Published runs as rows of the table of validated runs: their features, settings and errors."""

from __future__ import annotations

from collections.abc import Iterable
from math import log

from zsim.study.published.job import RowJob, row_job
from zsim.study.published.predict import RowResult, measured_seconds
from zsim.study.published.table import PublishedRun
from zsim.validated.runs import Settings, ValidatedRun


def validated_runs_of(runs: Iterable[PublishedRun], results: Iterable[RowResult]) -> list[ValidatedRun]:
    """The rows of the table of validated runs: the runs whose step was published and could be predicted."""
    by_id = {result.row_id: result for result in results}
    found = []
    for run in runs:
        result, measured = by_id.get(run.row_id), measured_seconds(run)
        if result is None or result.validation is None or not result.predicted_seconds or not measured:
            continue
        error = log(measured / result.predicted_seconds)
        settings = row_settings(run, row_job(run))
        tier = run.text("tier")
        features = result.validation.features
        found.append(ValidatedRun(run.row_id, run.source, run.role, tier, features, settings, error))
    return found


def row_settings(run: PublishedRun, row: RowJob) -> Settings:
    """The settings by which the row is compared with other rows of its source."""
    training = row.job.training
    gpus, per_node = run.count("n_gpus") or 1, row.job.gpus_per_node
    return Settings(
        model=run.text("model") or f"{row.job.model.numel}",
        sequence_length=training.sequence_length,
        micro_batch_size=training.micro_batch_size,
        gradient_accumulation_steps=round(row.sequences / training.micro_batch_size, 4),
        training=f"{run.text('precision')}, {run.text('act_ckpt')}, {run.text('software')}".replace(
            "\n", " "
        ),
        network_gbps=(run.number("inter_gbps_per_gpu") or 0.0) if gpus > per_node else 0.0,
    )
