"""A decision of the search, and the choices that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zsim.study.tune.base import Base

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
