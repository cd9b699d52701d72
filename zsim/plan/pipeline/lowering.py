"""The steps of every pipeline rank in a whole step, and the order of its computations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.errors import InputError
from zsim.plan.actions import Action, MessageCall, Order, Overlap, Step
from zsim.plan.builder import PlanBuilder
from zsim.plan.pipeline import orders
from zsim.plan.pipeline.csv_schedule import read_csv
from zsim.plan.pipeline.messages import Messenger
from zsim.plan.pipeline.orders import ranks_of_stages
from zsim.plan.pipeline.pipeline_checks import check_schedule
from zsim.plan.pipeline.runtime import PipelineRuntime
from zsim.plan.stage import Stage
from zsim.specs.strategy.parallelism import ParallelismConfig


def steps_of(runtime: PipelineRuntime, micro_batches: int) -> list[list[Step]]:
    """The program of one step, per pipeline rank, in the order in which its host issues it. There are
    `micro_batches` in each pass, and passes come one after the other, with micro-batches numbered on.

    Raises InputError for counts that the framework's schedule refuses.
    """
    parallelism = runtime.parallelism
    if parallelism.pipeline == 1:
        return [runtime.steps_without_pipeline(micro_batches * parallelism.passes)]
    if not parallelism.schedule_text:
        check_schedule(parallelism)
        runtime.check(micro_batches)
    elif not parallelism.style.reads_schedule_files:
        raise InputError(
            f"parallelism.schedule_csv: {parallelism.style.schedule_title} reads no schedule; expected a "
            "torch strategy"
        )
    return [
        [
            _shift_micro_batches(step, pass_index * micro_batches)
            for pass_index in range(parallelism.passes)
            for step in steps
        ]
        for steps in runtime.steps(micro_batches)
    ]


def _shift_micro_batches(step: Step, first: int) -> Step:
    """The step with its micro-batches numbered from `first` on."""
    if isinstance(step, Action):
        number = step.micro_batch
        return step if number is None else step._replace(micro_batch=number + first)
    if isinstance(step, Overlap):
        assert first == 0, "pairs have one pass"
        return step
    messages = tuple(
        message._replace(micro_batch=(message.micro_batch or 0) + first) for message in step.messages
    )
    return step._replace(messages=messages)


def orders_of(schedule: str, ranks: int, virtual: int, micro_batches: int, group_size: int) -> list[Order]:
    """The computations of every pipeline rank, in order, without messages. Counts are not checked.

    `group_size` are the micro-batches that an interleaved schedule runs through one chunk at a time.
    """
    if schedule == "interleaved-1f1b":
        return orders.interleaved(ranks, virtual, micro_batches, group_size)
    if schedule == "looped-bfs":
        return orders.looped_bfs(ranks, virtual, micro_batches)
    if schedule == "interleaved-zero-bubble":
        return orders.interleaved_zero_bubble(ranks, virtual, micro_batches)
    single = {
        "gpipe": orders.gpipe,
        "1f1b": orders.one_forward_one_backward,
        "zbv-zero-bubble": orders.zbv,
        "dualpipe-v": orders.dualpipe_v,
    }
    return single[schedule](ranks, micro_batches)


def ranks_of(parallelism: ParallelismConfig, micro_batches: int) -> list[int]:
    """The pipeline rank of every stage, in model order: in a CSV schedule it is where its actions are.

    Raises InputError for a CSV schedule that does not fit `micro_batches` of a pass.
    """
    ranks, virtual = parallelism.pipeline, parallelism.virtual_stages
    if parallelism.schedule_text:
        return read_csv(parallelism.schedule_text, ranks, virtual, micro_batches).rank_of
    return ranks_of_stages(parallelism.schedule, ranks, virtual)


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
