"""Writes every file that can express a job, by what a program's writer answers about the job."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zsim.specs.experiment.job import Job
from zsim.specs.experiment.programs import roles_of
from zsim.specs.experiment.tables import Experiment
from zsim.specs.formats.program import TrainingProgram
from zsim.specs.formats.toml import experiment_toml
from zsim.specs.strategy.optimizers import optimizer_of
from zsim.specs.strategy.registry import is_strategy
from zsim.specs.strategy.training import DEFAULT_CONNECTIONS, TrainingConfig


@dataclass(frozen=True, slots=True)
class ProgramFile:
    """A program's file for a job, or the reason why it cannot express the job."""

    name: str
    text: str = ""
    reason: str | None = None
    notes: tuple[str, ...] = ()
    """What the user of the file must know or do."""
    strategy: Mapping[str, Any] = field(default_factory=dict)
    """Changes of `[strategy]` by which an experiment beside the file names it."""


class ProgramWriter:
    """Writes jobs as a program's files.

    `WRITER` in the module `write` of the program's folder. The answers here are those of a program without a
    file that zsim writes.
    """

    def write(self, job: Job) -> ProgramFile | None:
        """The file, or the reason why there is none. None for a job that is not the program's at all."""
        return None

    def script_notes(self, job: Job) -> Iterable[str]:
        """Things that the training script must do under this program, since its file cannot say them."""
        return ()

    def release_notes(self, job: Job) -> Iterable[str]:
        """Releases that the job needs and no file names."""
        return ()


@dataclass(frozen=True)
class ExportedFiles:
    """The files that express a job, and the reasons for those that cannot."""

    files: dict[str, str] = field(default_factory=dict)
    """{name: text}"""
    missing: dict[str, str] = field(default_factory=dict)
    """{name: why that file cannot express this configuration}"""
    notes: tuple[str, ...] = ()
    """What the training script must do because no file can express it."""


def export_files(job: Job) -> ExportedFiles:
    """The files that can express the job, and the reasons why the others cannot.

    They are those of the programs that zsim writes for, and experiment.toml.
    """
    writers: Sequence[tuple[TrainingProgram, ProgramWriter]] = roles_of("write", "WRITER", ProgramWriter())
    program_files = {program: file for program, writer in writers if (file := writer.write(job)) is not None}
    files: dict[str, str] = {}
    missing: dict[str, str] = {}
    strategy: dict[str, Any] = {}
    for program in sorted(program_files, key=lambda entry: (entry.is_launcher, entry.is_script)):
        file = program_files[program]
        if file.reason is None:
            files[file.name] = file.text
            strategy |= file.strategy
        else:
            missing[file.name] = file.reason
    files["experiment.toml"] = experiment_toml(_make_portable(job.experiment, strategy))
    notes = [note for _, writer in writers for note in writer.script_notes(job)]
    notes += _script_notes(job, list(program_files))
    notes += [note for _, writer in writers for note in writer.release_notes(job)]
    notes.append(f"sequences of {job.training.sequence_length:,} tokens are the data's")
    notes += [note for file in program_files.values() if file.reason is None for note in file.notes]
    return ExportedFiles(files, missing, tuple(notes))


def _make_portable(experiment: Experiment, strategy: Mapping[str, Any]) -> Experiment:
    """The experiment with absolute paths, and with changes of its strategy that name the exported files."""
    changes: dict[str, Any] = {}
    for key in ("model", "cluster"):
        value = getattr(experiment, key)
        if isinstance(value, str) and os.path.exists(value):
            changes[key] = str(Path(value).resolve())
    if strategy:
        changes["strategy"] = experiment.strategy.model_copy(update=dict(strategy))
    return experiment.model_copy(update=changes)


def _script_notes(job: Job, programs: Sequence[TrainingProgram]) -> Iterator[str]:
    """Notes on what the script must do under any of the programs, because no file can express it."""
    training, trainer = job.training, job.experiment.trainer
    if training.precision == "fp8":
        exceptions = _exceptions(programs, "training.precision")
        yield f"fp8 products are the script's (torchao, Transformer Engine){exceptions}"
    if training.liger:
        yield "Liger's kernels are the script's: use_liger_kernel"
    if allocator := _allocator_settings(training):
        yield f"in the run's environment: PYTORCH_CUDA_ALLOC_CONF={allocator}"
    if training.device_max_connections != DEFAULT_CONNECTIONS:
        connections = training.device_max_connections
        yield f"in the run's environment: CUDA_DEVICE_MAX_CONNECTIONS={connections}"
    trainer_settings = trainer.model_dump(exclude_defaults=True)
    if trainer_settings:
        yield (
            "[trainer] is the script's: "
            f"{', '.join(f'{key} {value}' for key, value in trainer_settings.items())}"
        )
    if training.autocast:
        yield f'parameters in fp32 under torch.autocast("cuda", {training.precision}) are the script\'s'
    if training.stored_dtype != "fp32":
        exceptions = _exceptions(programs, "training.stored_dtype")
        yield f"a model that is loaded and kept in {training.stored_dtype} is the script's{exceptions}"
    if job.model.trainable_numel != job.model.numel:
        yield "adapters and frozen parameters are the script's (PEFT's get_peft_model, requires_grad)"
    optimizer = optimizer_of(training.optimizer)
    if optimizer.library != "torch" and not is_strategy(optimizer.library):
        yield f"the optimizer {training.optimizer} is the script's ({optimizer.source})"
    if job.sequences is not None:
        yield f"a last micro-batch that is smaller ({job.sequences:g} sequences a step) is the script's"


def _allocator_settings(training: TrainingConfig) -> str:
    """The settings of torch's allocator, as its environment variable has them."""
    settings = {
        "expandable_segments:True": training.expandable_segments,
        f"max_split_size_mb:{training.max_split_size_mb}": training.max_split_size_mb is not None,
        f"roundup_power2_divisions:{training.roundup_power2_divisions}": training.roundup_power2_divisions
        > 1,
    }
    return ",".join(text for text, is_set in settings.items() if is_set)


def _exceptions(programs: Sequence[TrainingProgram], key: str) -> str:
    """The end of a note on a setting: the programs whose files say it."""
    titles = [program.title for program in programs if key in program.script_settings]
    return f", but {' and '.join(titles)}'s" if titles else ""
