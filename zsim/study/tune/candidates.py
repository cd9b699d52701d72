"""Enumerate every combination of the axes' choices as an experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zsim.specs.experiment.tables import Experiment
from zsim.study.tune.axes import choices_of
from zsim.study.tune.axis import AxisChoice, TunedAxis
from zsim.study.tune.base import Base
from zsim.study.tune.framework import tuning_of


@dataclass(frozen=True)
class Candidate:
    """One configuration: the choice on each axis."""

    base: Base
    choices: Mapping[str, AxisChoice]
    number: int
    """The position in the space."""

    @property
    def overrides(self) -> dict[str, Any]:
        return {key: value for choice in self.choices.values() for key, value in choice.overrides.items()}

    def experiment(self) -> Experiment:
        """The candidate as an experiment. Raises InputError where the choices contradict the rest."""
        return self.base.experiment(self.overrides)

    def replace_choice(self, axis: str, choice: AxisChoice, number: int) -> Candidate:
        return Candidate(self.base, {**self.choices, axis: choice}, number)

    @property
    def label(self) -> str:
        """A label, e.g. "ZeRO-3, micro-batch 2, checkpointing full"."""
        labels = [tuning_of(self.base.kind).label, *(choice.label for choice in self.choices.values())]
        return ", ".join(label for label in labels if label)


def structure_of(kind: str) -> Sequence[TunedAxis]:
    """The decisions on where states are kept and how the batch is cut."""
    return tuning_of(kind).structure


def candidates(
    bases: Sequence[Base],
    axes_of: Callable[[str], Sequence[TunedAxis]] = structure_of,
    keep: Sequence[str] = (),
) -> list[Candidate]:
    """The whole space, with the last axis varying fastest. Axes named in `keep` stay at the base's values.

    `axes_of` says the axes of a kind of strategy.
    """
    space: list[Candidate] = []
    for base in bases:
        axes = [axis for axis in axes_of(base.kind) if axis.name not in keep]
        for choices in _combinations(base, axes, {}, {}):
            space.append(Candidate(base, choices, len(space)))
    return space


def _combinations(
    base: Base, axes: Sequence[TunedAxis], choices: dict[str, AxisChoice], chosen: dict[str, Any]
) -> Iterator[dict[str, AxisChoice]]:
    if not axes:
        yield choices
        return
    axis, *other_axes = axes
    options = choices_of(axis, base, chosen)
    if not options:
        yield from _combinations(base, other_axes, choices, chosen)
    for option in options:
        yield from _combinations(
            base, other_axes, {**choices, axis.name: option}, {**chosen, **option.overrides}
        )
