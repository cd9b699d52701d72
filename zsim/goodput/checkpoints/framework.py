"""The questions that a framework answers about what it saves, and how its ranks recover."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from zsim.errors import InputError, NotSimulatedError
from zsim.goodput.checkpoints.saved import SavedFiles
from zsim.goodput.checkpoints.tensors import STATES, ModelStates, collect_model_states
from zsim.specs.experiment.job import Job
from zsim.specs.strategy.registry import role_of
from zsim.specs.strategy.table import StrategyConfig

STATE_MEASURED = "expected run.checkpoint.bytes, blocking and load as measured, or run.checkpoint.mode 'none'"
"""What a run says instead of files that are not known."""

Config = TypeVar("Config", bound=StrategyConfig)


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a save is written."""

    format: str
    threads: int = 1
    """The threads of a rank that write."""
    single_file_per_rank: bool = True
    saves_16bit_model: bool = False
    """The parameters are also gathered into one file."""


class FrameworkCheckpoint(Generic[Config]):
    """The saves of a framework, and the recovery of its ranks.

    `CHECKPOINT` in the module `checkpoint` of the framework's folder. The answers here are those of a
    framework without anything special.
    """

    formats: tuple[str, ...] = ()
    """The formats that it writes, its usual one first."""
    has_local_replicas = False
    """Whether replicas that train separately (`[run.local]`) are simulated."""
    has_fixed_states = False
    """Whether it saves the same states with every optimizer."""

    def files(self, job: Job, config: Config, states: ModelStates, options: SaveOptions) -> SavedFiles:
        """The files of a save. Raises NotSimulatedError for those that are not known."""
        raise NotImplementedError

    def looks_for_cycles(self, config: Config) -> bool:
        """Whether Python looks for cycles of objects while the training process plans a save."""
        return True

    def check_elastic_load(self, config: Config, format: str | None) -> None:
        """Raise InputError where other ranks than those that saved cannot load."""

    def num_replicas(self, job: Job, config: Config) -> int:
        """Groups of ranks that hold all states each, of which one may be away while the others train."""
        return 1

    def num_shards(self, job: Job, config: Config, states: ModelStates) -> int:
        """Ranks over which every tensor is cut, of a framework with `has_local_replicas`."""
        raise NotImplementedError


def framework_checkpoint(kind: str) -> FrameworkCheckpoint[Any]:
    """The saves of the framework of a kind."""
    return cast(FrameworkCheckpoint[Any], role_of(kind, "checkpoint", "CHECKPOINT"))


# -- The files of a job's checkpoints, in the formats of its framework -------------------------------------


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
            f"expected {' or '.join(repr(name) for name in formats)}"
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
