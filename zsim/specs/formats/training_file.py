"""What the training file of another program asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zsim.specs.experiment.programs import Program


@dataclass
class TrainingFile:
    """What a file asks for, as dotted keys of an experiment.

    `program` reads it. `says` stands in the file, `assumes` is its program's default: the experiment may say
    otherwise without a word. `shard_degree` and `global_batch_size` wait for the number of GPUs. `notes` are
    the keys that do nothing to a step, or that zsim leaves out.
    """

    name: str
    says: dict[str, Any] = field(default_factory=dict)
    assumes: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    shard_degree: int | None = None
    global_batch_size: int | None = None
    program: Program | None = None

    def note(self, text: str) -> None:
        self.notes.append(f"{self.name}: {text}")
