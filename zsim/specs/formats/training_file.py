"""The settings in a training file of another program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainingFile:
    """The settings in a training file of another program, as dotted keys of an experiment."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that the file gives."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of its program, which the experiment may replace silently."""
    cluster_changes: dict[str, Any] = field(default_factory=dict)
    """Changes of the experiment's cluster, as dotted keys of it, which variables of the environment make."""
    notes: list[str] = field(default_factory=list)
    """Keys without effect on a step, or that zsim leaves out."""
    shard_degree: int | None = None
    """Ranks that shard the model states. It is resolved once the number of GPUs is known."""
    global_batch_size: int | None = None
    """Sequences of a step. It is resolved once the number of GPUs is known."""
    weight_types: tuple[str, str, bool] | None = None
    """The type of products, that in which weights are loaded ("" for the products'), and whether adapters are
    trained. None where the program does not say.
    """
    has_pairs: bool = False
    """Whether a row of its batches is two sequences."""
    epochs: float | None = None
    """How often a data set is trained on, where its size is known. None if steps say how far a run goes."""
    rollout_gpus: int = 0
    """GPUs that generate and do not train, of those that it has."""
    program: str | None = None
    """The name of the program that reads the file."""
    micro_batches_per_pass: int | None = None
    """Micro-batches of a pipeline that runs from start to end for each accumulation step."""
    resolve_stages: Callable[[int], Mapping[str, Any]] | None = None
    """Maps the number of layers to settings. It is called once the model is known."""
    resolve_rollout: Callable[[int], None] | None = None
    """Adds the rollout that belongs to a number of GPUs that train, of a program whose batches are by the
    GPU. The GPUs that a launcher or the file says train all, and those of engines are beside them.
    """
    missing: dict[str, str] = field(default_factory=dict)
    """Settings whose values cannot be had here, with the reason. The experiment must say them."""

    def note(self, text: str, *, is_first: bool = False) -> None:
        """Add a note, before the others if it says that another job may be meant."""
        self.notes.insert(0 if is_first else len(self.notes), f"{self.name}: {text}")
