"""Demands of settings on each other, and settings that zsim refuses by name, as data.

Errors and the tables of `docs/simulated.md` are made from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.files import preset_table
from zsim.specs.strategy.table import StrategyTable


@dataclass(frozen=True, slots=True)
class Refusal:
    """A setting that zsim refuses by name, because it changes a step in a way that is not simulated."""

    setting: str
    """As it stands in the program's file."""
    feature: str
    """What zsim lacks, in a few words."""


@dataclass(frozen=True, slots=True)
class SettingRequirement:
    """A setting of `[strategy]` that goes with some values of another one alone."""

    key: str
    needs: str
    """The other setting."""
    reason: str
    """Why, as the end of a sentence: "which its layers refuse"."""
    expected: tuple[Any, ...] = (True,)
    """Values of `needs` that it goes with. Empty for all but its default."""
    values: tuple[Any, ...] = ()
    """Values of `key` that need it. Empty for all but its default."""
    is_simulated: bool = True
    """The framework refuses what is not met. Otherwise the framework has it, and zsim does not."""

    def is_met(self, table: StrategyTable) -> bool:
        """Whether a table has what it needs, or does not need it."""
        value, needed_value = getattr(table, self.key), getattr(table, self.needs)
        is_needed = value in self.values if self.values else value != _default(table, self.key)
        if not is_needed:
            return True
        if self.expected:
            return needed_value in self.expected
        return bool(needed_value != _default(table, self.needs))

    def sentence(self, table: StrategyTable) -> str:
        """The error of a table that does not meet it."""
        needed_value = getattr(table, self.needs)
        is_missing = needed_value in (False, None)
        state = f"without {self.needs}" if is_missing else f"with {self.needs} = {shown(needed_value)}"
        return (
            f"strategy.{self.key}: found {shown(getattr(table, self.key))} {state}, {self.reason}; expected "
            f"{self.expectation}, or {self.key} {_default_text(table, self.key)}"
        )

    @property
    def expectation(self) -> str:
        """The end of a sentence that says which values of the other setting are expected."""
        if not self.expected:
            return f"{self.needs} as well"
        if self.expected == (None,):
            return f"{self.needs} left out"
        return f"{self.needs} = {' or '.join(map(shown, self.expected))}"


def check_requirements(table: StrategyTable, requirements: Iterable[SettingRequirement]) -> None:
    """Raises InputError for the first requirement that a table does not meet, and NotSimulatedError where
    zsim is what lacks it.
    """
    for requirement in requirements:
        if not requirement.is_met(table):
            kind = InputError if requirement.is_simulated else NotSimulatedError
            raise kind(requirement.sentence(table))


def shown(value: Any) -> str:
    """A value as a TOML file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "left out"
    if isinstance(value, tuple):
        return f"[{', '.join(map(shown, value))}]"
    return f"'{value}'" if isinstance(value, str) else str(value)


def _default(table: StrategyTable, key: str) -> Any:
    return type(table).model_fields[key].default


def _default_text(table: StrategyTable, key: str) -> str:
    default = _default(table, key)
    return "left out" if default in (None, ()) else f"= {shown(default)}"


def alternatives(setting: str) -> str:
    """The strategies to choose for a setting that a framework lacks, as error messages expect them."""
    return _phrases("alternatives")[setting]


def left_out(key: str) -> str:
    """The values that frameworks take where `key` is left out, as its description has them."""
    return _phrases("left out")[key]


def phrase(subject: str) -> str:
    """The part of a sentence about `subject` that names frameworks."""
    return _phrases("phrases")[subject]


def _phrases(table: str) -> Mapping[str, str]:
    phrases: Mapping[str, str] = preset_table("sentences")[table]
    return phrases
