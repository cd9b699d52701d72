"""The questions that a framework answers for reports."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Generic, TypeVar, cast

from zsim.specs.experiment.job import Job, strategy_label
from zsim.specs.strategy.registry import kinds_in_order, role_of
from zsim.specs.strategy.table import StrategyConfig

Config = TypeVar("Config", bound=StrategyConfig)


class FrameworkReport(Generic[Config]):
    """A framework in words and as plain data.

    `REPORT` in the module `report` of the framework's folder. The answers here are those of a framework
    without anything special.
    """

    title_alone: str
    """The name that it shares with others on one GPU, where it shards nothing."""
    strategy_names: tuple[str, ...]
    """The names that `strategy_name` gives, without those of other parallelisms."""
    offloading_names: tuple[str, ...] = ()
    """Those of them that also offload."""
    sharded_builder: str = ""
    """A function of the framework under which a model is built sharded, never whole."""
    sharded_builder_key: str = ""
    """The key of `[strategy]` that says that it is."""
    allocator_warning: str = ""
    """A clause on what it prints when torch's allocator runs short."""

    def strategy_name(self, job: Job, config: Config) -> str:
        """The name of what is sharded, which jobs of any size share."""
        return strategy_label(job)

    def headline(self, job: Job, config: Config) -> str:
        """The label of the strategy without numbers that depend on the number of GPUs."""
        return strategy_label(job)

    def resolved_strategy(self, job: Job, config: Config) -> dict[str, Any]:
        """Every value that the strategy's simulation used, but for its kind."""
        return {field.name: getattr(config, field.name) for field in fields(config)}

    def file_settings(self, job: Job, config: Config) -> dict[str, str] | None:
        """The settings of the framework's own file, by its keys. None for a framework without one."""
        return None

    def doubts_overlap(self, job: Job, config: Config) -> bool:
        """Whether published runs of such a job are slower than its overlap implies, [Note: overlap in
        doubt].
        """
        return False

    def faster_offloading(self, job: Job, config: Config) -> tuple[Config, str] | None:
        """The configuration with what the job leaves open about offloading as fast as users choose it, and
        what that is, as a note. None where nothing is open.
        """
        return None


def report_role(kind: str) -> FrameworkReport[Any]:
    """The framework of a kind, as reports ask for it."""
    return cast(FrameworkReport[Any], role_of(kind, "report", "REPORT"))


def allocator_warnings() -> str:
    """The messages of frameworks when torch's allocator runs short, as the end of a list."""
    warnings = (report_role(kind).allocator_warning for kind in kinds_in_order())
    return "".join(f"; {warning}" for warning in warnings if warning)
