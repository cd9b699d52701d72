"""The settings in a training file of another program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from zsim.dataclass import dataclass
from zsim.specs.experiment.programs import Program


@dataclass
class TrainingFile:
    """The settings in a file, as dotted keys of an experiment.

    `program` reads it. `says`: settings in the file; `assumes`: defaults of its program, which the experiment
    may replace silently. `shard_degree` and `global_batch_size` are resolved once the number of GPUs is
    known, `by_layers` (number of layers -> settings) once the model is. `micro_batches_per_pass`: of a
    pipeline that runs as a whole for each accumulation step. `notes`: keys without effect on a step, or that
    zsim leaves out.
    """

    name: str
    says: dict[str, Any] = field(default_factory=dict)
    assumes: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    shard_degree: int | None = None
    global_batch_size: int | None = None
    program: Program | None = None
    micro_batches_per_pass: int | None = None
    by_layers: Callable[[int], Mapping[str, Any]] | None = None

    def note(self, text: str) -> None:
        self.notes.append(f"{self.name}: {text}")
