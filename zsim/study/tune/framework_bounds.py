"""The questions that a framework answers for the lower bounds of a search."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar, cast

from zsim.plan.ops import CollectiveKind
from zsim.specs.experiment.job import Job
from zsim.specs.strategy.registry import role_of
from zsim.specs.strategy.table import StrategyConfig

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
