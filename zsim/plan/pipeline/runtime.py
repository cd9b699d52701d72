"""The code of a framework that runs a pipeline: what it demands of the counts, its steps and its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zsim.plan.actions import Overlap, Step, no_pipeline
from zsim.plan.builder import PlanBuilder
from zsim.plan.pipeline.messages import Messenger
from zsim.plan.stage import Stage
from zsim.plan.walk import Walk
from zsim.specs.strategy.parallelism import ParallelismConfig


@dataclass(frozen=True, slots=True)
class PipelineRuntime:
    """The pipeline of a job, as its framework runs it.

    The answers here are those of a framework without pipelines, which runs one micro-batch after the other.
    """

    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)

    @property
    def synchronizes(self) -> bool:
        """Whether the host waits for the device around every computation and every exchange of messages."""
        return False

    def check(self, micro_batches: int) -> None:
        """Raises InputError for counts that the framework's schedule refuses, where `micro_batches` are those
        of a pass.
        """

    def steps(self, micro_batches: int) -> list[list[Step]]:
        """The steps of a pass of `micro_batches`, per pipeline rank, in the order in which its host issues
        them.
        """
        raise NotImplementedError

    def steps_without_pipeline(self, micro_batches: int) -> list[Step]:
        """The steps of a rank that holds the whole model."""
        (steps,) = no_pipeline(micro_batches)
        return [*steps]

    def messenger(
        self, builder: PlanBuilder, stages: Mapping[int, Stage], ranks: Sequence[int], rank: int
    ) -> Messenger:
        """The messages of the pipeline rank `rank`, which holds `stages`, where `ranks` has the rank of every
        stage.
        """
        empties_outputs = self.parallelism.style.empties_outputs
        return Messenger(builder, stages, ranks, rank, empties_outputs=empties_outputs)

    def run_pair(
        self,
        builder: PlanBuilder,
        pair: Overlap,
        walks: tuple[Walk, Walk],
        *,
        is_last: bool,
        schedule_manages_sharding: bool,
    ) -> None:
        """Issue a forward and a backward side by side, whose walks are `walks`. `is_last` and
        `schedule_manages_sharding` are those of `Hooks.begin_backward`.
        """
        raise NotImplementedError
