"""`[run]` of an experiment: training from the first step to the last token, over days.

[run]
tokens = "15T"                      # or steps, or days
seeds = 100
[run.checkpoint]                    # [run.storage], [run.failures], [run.recovery], [run.evaluation]
[[run.phases]]
tokens = "2T"
sequence_length = 8192

`[run.local]` of an experiment: replicas that train independently and synchronize every so many steps.

[run.local]
method = "diloco"                   # diloco | local-sgd
replicas = 8
every = 40                          # inner steps from one synchronization to the next

`[run.storage]` of an experiment: what takes the checkpoints, and how fast.

[run.storage]
preset = "tectonic"                          # or the numbers themselves, or both
write_bandwidth_per_node = "2 GB/s"
write_bandwidth = "240 GB/s"                 # of all nodes together
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from zsim.errors import NotSimulatedError
from zsim.specs.experiment.run.checkpoint import CheckpointTable, steps_or_time
from zsim.specs.experiment.run.failures import FailuresTable, RecoveryTable, apply_preset
from zsim.specs.lazy_model import FiniteTable, Fraction, StrictTable, Table
from zsim.units import BytesPerSecond, Duration, Length, Tokens

_FILE = "storage.toml"
_BANDWIDTHS = ("write_bandwidth_per_writer", "write_bandwidth_per_node", "write_bandwidth")


class StorageTable(Table):
    """`[run.storage]`: what takes the saves, and how fast."""

    preset: str | None = Field(
        default=None,
        description="published store, changed by the other keys; left out: the other keys; without "
        'the table "writers"',
    )
    write_bandwidth_per_writer: BytesPerSecond | None = Field(
        default=None,
        description="of one thread of a rank, from tensor to store; left out: no limit",
    )
    write_bandwidth_per_node: BytesPerSecond | None = Field(
        default=None, description="of one node; left out: no limit"
    )
    write_bandwidth: BytesPerSecond | None = Field(
        default=None, description="of all nodes together; left out: no limit"
    )
    read_bandwidth_per_reader: BytesPerSecond | None = Field(
        default=None, description="of one thread of a rank; left out: as writing"
    )
    read_bandwidth_per_node: BytesPerSecond | None = Field(
        default=None, description="of one node; left out: as writing"
    )
    read_bandwidth: BytesPerSecond | None = Field(
        default=None, description="of all nodes together; left out: as writing"
    )
    efficiency: Fraction = Field(default=1.0, description="what all nodes together reach of the stated rates")
    latency: Duration = Field(default=0.0, description="of opening a file")
    metadata_per_second: float | None = Field(
        default=None,
        gt=0,
        description="files that all ranks together can create or open in a second; left out: no limit",
    )

    @model_validator(mode="after")
    def _has_bandwidth(self) -> Self:
        for name in type(self).model_fields:
            if "bandwidth" in name and getattr(self, name) == 0:
                raise ValueError(f"{name}: found 0, expected a rate; nothing would ever be saved")
        if self.preset is None and not any(getattr(self, name) for name in _BANDWIDTHS):
            raise ValueError(f"storage without bandwidth: expected {', '.join(_BANDWIDTHS)}, or a preset")
        return self


def resolve_storage(table: StorageTable | None) -> StorageTable:
    """The table with its preset's numbers filled in.

    A missing table has the rate that one writer thread is known to reach and no other limit. Raises
    InputError for an unknown preset.
    """
    return apply_preset(table or StorageTable(preset="writers"), _FILE, "run.storage")


_Count = Annotated[int, Field(gt=0, strict=True)]


class LocalTrainingTable(StrictTable):
    """`[run.local]`.

    In method "local-sgd" parameters are averaged, and all replicas wait (Stich 2019, arXiv 1805.09767). In
    "diloco" the change since the last synchronization is averaged and given to an outer optimizer (Douillard
    et al. 2023, arXiv 2311.08105). This happens one fragment at a time, concurrently with `delay` inner steps
    (Streaming DiLoCo, arXiv 2501.18512, and torchft 73dafea local_sgd.py).
    """

    method: Literal["diloco", "local-sgd"] = Field(
        default="diloco", description="what is averaged: changes, for an outer optimizer, or parameters"
    )
    replicas: Annotated[int, Field(gt=1, strict=True)] = Field(
        description="groups of nodes that train apart, each with the experiment's strategy"
    )
    every: _Count = Field(default=40, description="inner steps in which every parameter is averaged once")
    fragments: _Count = Field(default=1, description="parts of the model that take turns (diloco)")
    delay: Annotated[int, Field(ge=0, strict=True)] = Field(
        default=0, description="inner steps that overlap a fragment's averaging (diloco)"
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.every % self.fragments:
            raise ValueError("every: expected a multiple of fragments, which take turns at equal distances")
        if self.delay >= self.every // self.fragments:
            raise ValueError("delay: expected fewer steps than from one fragment's averaging to the next")
        if self.method == "local-sgd" and (self.fragments > 1 or self.delay):
            raise ValueError("fragments and delay are of 'diloco'; 'local-sgd' averages all at once")
        return self


_Tokens = Annotated[Tokens, Field(gt=0, allow_inf_nan=False)]
MAX_SEEDS = 100_000


class PhaseTable(StrictTable):
    """`[[run.phases]]`: its tokens, and what differs from the experiment while it lasts."""

    tokens: _Tokens = Field(description="tokens of the phase")
    nodes: _Count | None = Field(
        default=None, description="nodes of the phase; left out: as the experiment says, like the keys below"
    )
    sequence_length: Length | None = Field(
        default=None, description="tokens of a sequence; left out: as the experiment says"
    )
    micro_batch_size: _Count | None = Field(
        default=None, description="sequences of a micro-batch; left out: as the experiment says"
    )
    gradient_accumulation_steps: _Count | None = Field(
        default=None, description="micro-batches of a step; left out: as the experiment says"
    )
    global_batch_size: _Count | None = Field(
        default=None, description="sequences of a step; left out: as the experiment says"
    )

    def overrides(self) -> dict[str, Any]:
        """The settings of the phase, as dotted keys of an experiment."""
        settings = self.model_dump(exclude={"tokens"}, exclude_none=True)
        return {key if key == "nodes" else f"training.{key}": value for key, value in settings.items()}


class EvaluationTable(StrictTable):
    """`[run.evaluation]`: pauses to evaluate."""

    every: int | str = Field(description="interval of evaluations, in steps or time")
    takes: Duration = Field(description="time of an evaluation; training waits")

    @field_validator("every", mode="before")
    @classmethod
    def _is_an_interval(cls, value: Any) -> Any:
        if value == "auto":
            raise ValueError("found 'auto', expected steps (1000) or a time ('6 h')")
        return steps_or_time(value)


class TrainingRunTable(FiniteTable):
    """`[run]`. `tokens`, `steps`, `days` on the clock, or phases with tokens each say how far it goes."""

    tokens: _Tokens | None = Field(
        default=None,
        description="tokens of the run; left out: `steps`, `days` or `phases`",
    )
    steps: _Count | None = Field(
        default=None,
        description="steps of the run; left out: `tokens`, `days` or `phases`",
    )
    days: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="days of the run; left out: `tokens`, `steps` or `phases`",
    )
    seeds: Annotated[int, Field(gt=0, le=MAX_SEEDS, strict=True)] = Field(
        default=100, description="runs that are drawn"
    )
    seed: Annotated[int, Field(ge=0, strict=True)] = Field(default=1, description="seed of the first run")
    checkpoint: CheckpointTable = Field(
        default=CheckpointTable.model_construct(), description="what is saved, how often, and how"
    )
    storage: StorageTable | None = Field(default=None, description="what takes the saves")
    failures: FailuresTable | None = Field(default=None, description="what fails, and how often")
    recovery: RecoveryTable = Field(
        default=RecoveryTable.model_construct(), description="from a failure back to training"
    )
    local: LocalTrainingTable | None = Field(
        default=None, description="replicas that train apart: local SGD, DiLoCo"
    )
    evaluation: EvaluationTable | None = Field(default=None, description="pauses to evaluate")
    phases: tuple[PhaseTable, ...] = Field(
        default=(), description="parts of the run that differ, each with its tokens"
    )

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        lengths = [name for name in ("tokens", "steps", "days") if getattr(self, name) is not None]
        if len(lengths) > 1:
            raise ValueError(f"{' and '.join(lengths)} both say how far; expected one of them")
        if self.phases:
            total = sum(phase.tokens for phase in self.phases)
            if self.tokens is not None and not math.isclose(self.tokens, total, rel_tol=1e-9):
                raise ValueError(f"tokens is {self.tokens:.6g}, but those of the phases sum to {total:.6g}")
            if lengths and lengths != ["tokens"]:
                raise ValueError(
                    f"{lengths[0]} and the phases' tokens both say how far; expected one of them"
                )
        return self

    @model_validator(mode="after")
    def _supports_local_training(self) -> Self:
        if self.local is not None and self.recovery.policy in ("shrink", "per-step"):
            raise NotSimulatedError(
                f"run.recovery.policy: '{self.recovery.policy}' with [run.local], where a group loses its "
                "steps since the last meeting, is not simulated; expected restart or in-process"
            )
        return self

    @property
    def total_tokens(self) -> float | None:
        """Tokens of the run, where its length is set in tokens."""
        return sum(phase.tokens for phase in self.phases) if self.phases else self.tokens
