"""A decision of the search, and the choices that it has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.programs import Program
from zsim.specs.experiment.tables import Experiment

MICRO_BATCH, ACCUMULATION = "training.micro_batch_size", "training.gradient_accumulation_steps"
CHECKPOINTING, EVERY = "training.activation_checkpointing", "training.checkpoint_every"
BLOCKS = "training.block_checkpointing"
RECOMPUTED = tuple(f"training.recompute_{key}" for key in ("modules", "method", "layers"))
LOSS = "training.cross_entropy"
PRECISION, RECIPE = "training.precision", "training.fp8_recipe"


@dataclass(frozen=True)
class AxisChoice:
    """One value of an axis: dotted overrides, and its label in tables."""

    label: str
    overrides: Mapping[str, Any]
    is_coarse: bool = True
    """Whether a coarse search, which takes the first configuration that fits, looks at it too."""


@dataclass(frozen=True)
class Base:
    """One kind of strategy on one cluster."""

    data: Mapping[str, Any]
    """File-shaped, with its batch sizes in [training]."""
    job: Job
    sequences: int
    """Sequences per replica and step, micro-batch x accumulation steps. Searches keep this number."""

    @property
    def kind(self) -> str:
        return self.job.kind

    @property
    def program(self) -> Program | None:
        """The program whose configuration file the experiment comes from, or None for an experiment in zsim's
        format.
        """
        program: Program | None = self.data.get("program")
        return program

    @property
    def world_size(self) -> int:
        return self.job.world_size

    @property
    def batch_sequences(self) -> int:
        """Sequences of all replicas in a step."""
        return self.sequences * self.job.data_parallel_size

    @cached_property
    def key(self) -> str:
        """The content of `data` as text."""
        return json.dumps(self.data, sort_keys=True, default=str)

    @cached_property
    def largest_shard_numel(self) -> int:
        """Elements of the largest parameter's shard, which NVMe buffers must hold."""
        largest = max(parameter.numel for _, parameter in self.job.model.named_parameters())
        return -(-largest // self.world_size)

    def experiment(self, overrides: Mapping[str, Any]) -> Experiment:
        """The experiment with `overrides`. Raises InputError where they contradict the rest."""
        return build_experiment(dict(self.data), overrides, origin="tune")


Chosen = Mapping[str, Any]
Choices = Callable[[Base, Chosen], Iterable[AxisChoice]]


@dataclass(frozen=True)
class TunedAxis:
    """One decision."""

    name: str
    choices: Choices
    """The choices, which depend on those made on earlier axes. An empty list means that there is nothing to
    decide.
    """
    changes_kernels: bool = False
    """Whether its choices run other kernels, so that a step may end below the bound of the one before."""


def key_choices(key: str, name: str, *values: Any) -> Choices:
    """Choices of the same `values` of a key for every base."""

    def choices(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
        return [AxisChoice(f"{name} {format_choice(value)}", {key: value}) for value in values]

    return choices


def key_axis(name: str, key: str, *values: Any) -> TunedAxis:
    """An axis of one key with these values."""
    return TunedAxis(name, key_choices(key, name, *values))


def format_choice(value: Any) -> str:
    """A value of a choice, as its label has it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int | float) and value >= 10**4:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return str(value)
