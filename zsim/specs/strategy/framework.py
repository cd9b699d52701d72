"""The questions that a framework answers while an experiment is resolved."""

from __future__ import annotations

from typing import Generic, TypeVar

from zsim.specs.strategy.table import StrategyConfig, StrategyTable

Table = TypeVar("Table", bound=StrategyTable)
Config = TypeVar("Config", bound=StrategyConfig)


class Framework(Generic[Table, Config]):
    """A framework, as its folder in `zsim.frameworks` describes it.

    Each method is a question that resolving asks of every framework. Its answer here is that of a framework
    without anything special, and a framework's own class answers otherwise where it differs.
    """

    table: type[Table]
    """Its `[strategy]`."""
    title: str
    """The name that validated runs and sentences have for it."""
    order: int
    """Its place where frameworks are listed by how they build on each other."""
