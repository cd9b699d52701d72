"""The questions that a framework answers while an experiment is resolved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from zsim.specs.strategy.table import StrategyConfig, StrategyTable

Table = TypeVar("Table", bound=StrategyTable)
Config = TypeVar("Config", bound=StrategyConfig)

MODEL_PARALLEL_KEYS = frozenset(
    f"parallelism.{name}"
    for name in (
        "tensor", "sequence_parallel", "async_tensor", "gather_per_product", "context", "order",
        "expert", "expert_tensor", "dispatcher", "capacity_factor", "expert_imbalance",
    )
)  # fmt: skip
"""Keys of tensor, context and expert parallelism."""
PIPELINE_KEYS = frozenset(
    f"parallelism.{name}"
    for name in (
        "pipeline", "schedule", "virtual_stages", "first_stage_less_layers", "last_stage_less_layers",
        "layers_per_stage", "passes",
    )
)  # fmt: skip
"""Keys of pipelines."""


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
    other_names: Mapping[str, str] = {}
    """What people call it and its settings, in small letters and digits alone, with the keys that say it."""
    unread_keys: frozenset[str] = frozenset()
    """Dotted keys of an experiment beside `[strategy]` that it refuses, or tables of which it refuses all
    keys.
    """
