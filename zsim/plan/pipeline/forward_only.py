"""A pass without backward: the forwards of all micro-batches, through a pipeline if there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.plan.actions import Action, MessageCall, Step
from zsim.plan.builder import PlanBuilder
from zsim.plan.pipeline.lowering import ranks_of
from zsim.plan.pipeline.messages import Messenger
from zsim.plan.pipeline.runtime import PipelineRuntime
from zsim.plan.stage import Stage


class ForwardOnly(PipelineRuntime):
    """The runtime of a pass without backward, under any framework.

    Groups of as many micro-batches as there are ranks go through one stage of a rank after the other, as
    Megatron's and torch's interleaved schedules begin. An input is waited for where it is needed. An output
    is sent at once, and nobody keeps it.
    """

    def steps(self, micro_batches: int) -> list[list[Step]]:
        ranks = ranks_of(self.parallelism, micro_batches)
        return [_steps_of_rank(ranks, rank, micro_batches) for rank in range(self.parallelism.pipeline)]

    def steps_without_pipeline(self, micro_batches: int) -> list[Step]:
        return [Action("F", 0, number) for number in range(micro_batches)]

    def messenger(
        self, builder: PlanBuilder, stages: Mapping[int, Stage], ranks: Sequence[int], rank: int
    ) -> Messenger:
        return Messenger(builder, stages, ranks, rank, empties_outputs=True)


def _steps_of_rank(ranks: Sequence[int], rank: int, micro_batches: int) -> list[Step]:
    size = max(ranks) + 1
    own_stages = [stage for stage, owner in enumerate(ranks) if owner == rank]
    return [
        step
        for first in range(0, micro_batches, size)
        for stage in own_stages
        for micro_batch in range(first, min(first + size, micro_batches))
        for step in _forward_steps(ranks, stage, micro_batch)
    ]


def _forward_steps(ranks: Sequence[int], stage: int, micro_batch: int) -> list[Step]:
    """A forward between the messages that bring its input and take its output."""
    steps: list[Step] = []
    if stage > 0 and ranks[stage - 1] != ranks[stage]:
        message = Action("RECV_F", stage, micro_batch)
        steps.append(MessageCall((message,), is_batched=False, waits="use"))
    steps.append(Action("F", stage, micro_batch))
    if stage < len(ranks) - 1 and ranks[stage + 1] != ranks[stage]:
        message = Action("SEND_F", stage, micro_batch)
        steps.append(MessageCall((message,), is_batched=False, waits="stream"))
    return steps
