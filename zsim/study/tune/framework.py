"""The questions a framework answers while its best settings are searched: decisions, and their choices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

from zsim.plan.ops import CollectiveKind
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.programs import Program
from zsim.specs.experiment.tables import Experiment
from zsim.specs.strategy.registry import role_of, values_of
from zsim.specs.strategy.table import StrategyConfig, StrategyTable

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


Table = TypeVar("Table", bound=StrategyTable)


class FrameworkTuning(Generic[Table]):
    """A framework's part in a search.

    `TUNING` in the module `tune` of the framework's folder. The answers here are those of a framework without
    anything special.
    """

    label: str
    """The beginning of its configurations' names."""
    structure: tuple[TunedAxis, ...]
    """The decisions on where states are kept and how the batch is cut, in order."""
    details: tuple[TunedAxis, ...] = ()
    """Sizes and switches that improve a good structure slightly."""
    numerics: tuple[TunedAxis, ...] = ()
    """Decisions that change the numbers that training computes. They are tried on the best of the others, and
    shown beside it.
    """
    quantised: tuple[TunedAxis, ...] = ()
    """Such decisions that are tried only on request."""
    start: Mapping[str, Any] = MappingProxyType({})
    """The keys of `[strategy]` with which a search among several frameworks begins."""
    schedules: Sequence[str] = ()
    """The pipeline schedules that it has. Without any its degrees are not searched."""
    is_usual = False
    """Whether it is looked at where neither an experiment nor the user names a strategy."""

    def open_settings(self, table: Table, job: Job, data: dict[str, Any]) -> dict[str, Any]:
        """The file-shaped `data` of an experiment with everything left open that a search may set."""
        return data

    def spellings(self, name: str) -> Sequence[str]:
        """The names under which a table may have the key `name`."""
        return (name,)

    def resolved_value(self, job: Job, key: str) -> Any:
        """The value of a dotted key of `[strategy]` in a job, where the experiment leaves it open."""
        return getattr(job.strategy, key.rpartition(".")[2], None)

    def comparable(self, key: str, value: Any) -> Any:
        """The value of a dotted key in a form that equals that of other ways to write it."""
        return value

    def written_key(self, table: Table, key: str) -> str:
        """The key under which an experiment with that table writes what a search has under `key`."""
        return key

    def sizes(self, table: Table, config: Any) -> dict[str, tuple[str, float, bool]]:
        """The sizes that a study of sensitivity varies, by name: (dotted key, value, whether it is a whole
        number).
        """
        return {}

    def shards_less(self, base: Base, changes: Mapping[str, Any]) -> bool:
        """Whether the changes shard fewer states than the base."""
        return False


def tuning_of(kind: str) -> FrameworkTuning[Any]:
    """The part of the framework of a kind in a search."""
    return cast(FrameworkTuning[Any], role_of(kind, "tune", "TUNING"))


def usual_kinds() -> list[str]:
    """The frameworks that a search looks at where none is asked for."""
    return [kind for kind in values_of("tune.kind") if tuning_of(kind).is_usual]


def degree_kinds() -> tuple[str, ...]:
    """The frameworks whose degrees of model parallelism are searched."""
    return tuple(kind for kind in values_of("tune.parallelism") if tuning_of(kind).schedules)


# -- The questions that a framework answers for the lower bounds of a search -------------------------------


Config = TypeVar("Config", bound=StrategyConfig)


class FrameworkBounds(Generic[Config]):
    """Lower bounds that every step of a framework keeps to.

    `BOUNDS` in the module `bounds` of the framework's folder. The answers here are those of a framework
    without anything special, or of one of which nothing is known.
    """

    counts_stages = False
    """Whether a search of degrees bounds jobs without model parallelism by their one stage too."""
    waits_for_messages = False
    """Whether the host of 1F1B waits for the device at every message."""
    calls_modules_eagerly = True
    """Whether a module that is not compiled costs what torch's own does."""

    def checkpoint_share(self, job: Job, config: Config) -> float:
        """The fraction of its activation checkpoints that a rank keeps on its GPU."""
        return 1.0

    def updates_on_host(self, config: Config) -> bool:
        """Whether the CPU updates every state while the GPUs wait."""
        return False

    def exposed_collectives(
        self, job: Job, config: Config, numel: int, numel_of_last: int
    ) -> Iterable[tuple[CollectiveKind, int, str]]:
        """The collectives, with their elements and types, that nothing overlaps on a pipeline rank with
        `numel` parameters, of which `numel_of_last` are of the stage whose backward is the last.
        """
        return ()

    def block_overhead(self, config: Config) -> str | None:
        """The event that a pass through a block costs the host."""
        return None

    def bytes_per_parameter(self, job: Job, config: Config, moments: int) -> float:
        """Bytes that a rank holds for each parameter of its stages, at least, with so many moments."""
        return 0.0


def bounds_of(kind: str) -> FrameworkBounds[Any]:
    """The bounds of the framework of a kind."""
    default: FrameworkBounds[Any] = FrameworkBounds()
    return cast(FrameworkBounds[Any], role_of(kind, "bounds", "BOUNDS", default))
