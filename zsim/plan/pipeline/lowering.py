"""The steps of every pipeline rank in a whole step, and the order of its computations."""

from __future__ import annotations

from zsim.errors import InputError
from zsim.plan.actions import Action, Order, Overlap, Step
from zsim.plan.pipeline import orders, zero_bubble
from zsim.plan.pipeline.csv_schedule import read_csv
from zsim.plan.pipeline.pipeline_checks import check_schedule
from zsim.plan.pipeline.placement import ranks_of_stages
from zsim.plan.pipeline.runtime import PipelineRuntime
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
        return zero_bubble.interleaved_zero_bubble(ranks, virtual, micro_batches)
    single = {
        "gpipe": orders.gpipe,
        "1f1b": orders.one_forward_one_backward,
        "zbv-zero-bubble": zero_bubble.zbv,
        "dualpipe-v": zero_bubble.dualpipe_v,
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
