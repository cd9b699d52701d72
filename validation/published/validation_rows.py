"""Published runs as rows of the table of validated runs: their features, settings and errors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import log

from validation.published.job import RowJob, row_job
from validation.published.predict import measured_seconds
from validation.published.table import PublishedRun
from zsim.report.job_features import degrees_of
from zsim.specs.experiment.job import Job
from zsim.study.measured.prediction import RowResult
from zsim.validated.runs import Settings, ValidatedRun

_FEW_STEPS = re.compile(r"\b(few|[1-5]) steps\b")


def validated_runs_of(runs: Iterable[PublishedRun], results: Iterable[RowResult]) -> list[ValidatedRun]:
    """The rows of the table of validated runs: the runs whose step was published and could be predicted."""
    by_id = {result.row_id: result for result in results}
    pairs = ((run, by_id[run.row_id]) for run in runs if run.row_id in by_id)
    return [
        validated_run for run, result in pairs if (validated_run := validated_run_of(run, result)) is not None
    ]


def validated_run_of(run: PublishedRun, result: RowResult) -> ValidatedRun | None:
    """The run as a row of the table, or None if its step was not published or could not be predicted. None
    too if its flags say that only a few steps were timed, the slow first ones among them.
    """
    measured = measured_seconds(run)
    if result.validation is None or not result.predicted_seconds or not measured:
        return None
    if _FEW_STEPS.search(run.text("flags")):
        return None
    error = log(measured / result.predicted_seconds)
    settings = row_settings(run, row_job(run))
    features = result.validation.features
    return ValidatedRun(
        run.row_id, run.source, run.role, run.text("tier"), features, settings, error, None,
        *result.validation.input_ends,
    )  # fmt: skip


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
        degrees=_degrees(row.job),
    )


def _degrees(job: Job) -> str:
    """The degrees of the parallelisms other than data parallelism: "TP 8, PP 4 x 2, EP 8". It is "" without
    any.
    """
    virtual = job.parallelism.virtual_stages
    stages = {"PP": f" x {virtual}"} if virtual > 1 else {}
    return ", ".join(f"{name} {degree}{stages.get(name, '')}" for name, degree in degrees_of(job).items())
