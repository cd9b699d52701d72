"""The files of a job's checkpoints, in the formats of its framework."""

from __future__ import annotations

from zsim.errors import InputError, NotSimulatedError
from zsim.goodput.checkpoints.framework import STATE_MEASURED, SaveOptions, framework_checkpoint
from zsim.goodput.checkpoints.saved import SavedFiles
from zsim.goodput.checkpoints.tensors import STATES, collect_model_states
from zsim.specs.experiment.job import Job


def format_of(job: Job, requested: str | None = None) -> str:
    """The requested format, or the framework's default. Raises InputError for one that the framework cannot
    write.
    """
    formats = framework_checkpoint(job.kind).formats
    if requested is None:
        return formats[0]
    if requested not in formats:
        raise InputError(
            f"run.checkpoint.format: found '{requested}', which strategy '{job.kind}' does not write; "
            "expected "
            f"{' or '.join(repr(name) for name in formats)}"
        )
    return requested


def saved_files(
    job: Job,
    format: str | None = None,
    *,
    threads: int = 1,
    single_file_per_rank: bool = True,
    saves_16bit_model: bool = False,
) -> SavedFiles:
    """The files of a save of the job. Raises InputError for a format or options that the framework lacks,
    NotSimulatedError for files that are not known."""
    framework = framework_checkpoint(job.kind)
    if job.training.optimizer not in STATES and not framework.has_fixed_states:
        raise NotSimulatedError(
            f"run.checkpoint: what is saved of '{job.training.optimizer}' is not known, only of "
            f"{', '.join(STATES)}; {STATE_MEASURED}"
        )
    kind, model_states = format_of(job, format), collect_model_states(job)
    if threads > 1 and kind != "dcp":
        raise InputError(
            f"run.checkpoint.threads: found {threads} with format '{kind}', whose ranks write with one "
            "thread each; expected 1, or format 'dcp'"
        )
    options = SaveOptions(kind, threads, single_file_per_rank, saves_16bit_model)
    return framework.files(job, job.strategy, model_states, options)
