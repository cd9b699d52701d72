"""The steps of every pipeline rank, as each framework issues them."""

from __future__ import annotations

from typing import Literal

from zsim.errors import InputError
from zsim.frameworks.deepspeed.pipeline import train_schedule_steps
from zsim.frameworks.megatron import nanotron_pipeline as nanotron
from zsim.frameworks.megatron.pipeline import MegatronPipeline
from zsim.frameworks.megatron.pipeline import one_forward_one_backward_steps as megatron_1f1b
from zsim.frameworks.megatron.pipeline_interleaved import interleaved_steps
from zsim.frameworks.torch import pipeline_stage as torch_stage
from zsim.frameworks.torch import pipeline_stages as torch_stages
from zsim.plan.pipeline import orders, zero_bubble
from zsim.plan.pipeline.csv_schedule import read_csv
from zsim.plan.pipeline.orders import torch_group_size
from zsim.plan.pipeline.pipeline_checks import NAMES, check_counts
from zsim.plan.pipeline.placement import ranks_of_stages
from zsim.plan.pipeline.schedules import Action, Order, Overlap, Step, no_pipeline, paired_without_pipeline

PipelineStyle = Literal["torch", "megatron", "deepspeed", "nanotron"]


def steps_of(
    style: PipelineStyle,
    schedule: str,
    ranks: int,
    virtual: int,
    micro_batches: int,
    *,
    is_fsdp: bool = False,
    csv: str = "",
    passes: int = 1,
    megatron: MegatronPipeline | None = None,
) -> list[list[Step]]:
    """The program of one step, per pipeline rank, in the order in which its host issues it.

    `ranks` pipeline ranks with `virtual` stages each (`placement.py` says which), `micro_batches` per
    pipeline and `passes` whole pipelines one after the other, micro-batches numbered on. `is_fsdp`: torch's
    stages are wrapped by FSDP, which is told when to gather, free and reduce. `csv`: the text of a schedule
    in torch's CSV format, in place of `schedule`. `megatron`: its settings, its defaults where None. With
    one rank the steps are `no_pipeline`'s.

    Raises InputError for counts that the framework's schedule refuses.
    """
    settings = megatron or MegatronPipeline()
    if ranks == 1 and settings.pairs:
        return paired_without_pipeline(micro_batches * passes)
    if ranks == 1:
        return [list(actions) for actions in no_pipeline(micro_batches * passes)]
    if csv and style != "torch":
        raise InputError(
            f"parallelism.schedule_csv: {NAMES[style]} reads no schedule; expected a torch strategy"
        )
    if not csv:
        check_counts(style, schedule, ranks, virtual, micro_batches, passes, settings)
    if style == "torch":
        steps_per_rank = _torch_steps(schedule, ranks, virtual, micro_batches, csv, is_fsdp=is_fsdp)
    elif style == "megatron":
        steps_per_rank = _megatron_steps(schedule, ranks, virtual, micro_batches, settings)
    elif style == "deepspeed":
        steps_per_rank = train_schedule_steps(ranks, micro_batches)
    else:
        steps_per_rank = _nanotron_steps(schedule, ranks, micro_batches)
    return [
        [
            _shift_micro_batches(step, pass_index * micro_batches)
            for pass_index in range(passes)
            for step in steps
        ]
        for steps in steps_per_rank
    ]


def _shift_micro_batches(step: Step, first: int) -> Step:
    """The step with its micro-batches numbered from `first` on."""
    if isinstance(step, Action):
        number = step.micro_batch
        return step if number is None else step._replace(micro_batch=number + first)
    if isinstance(step, Overlap):
        assert first == 0, "Megatron has one pass"
        return step
    messages = tuple(
        message._replace(micro_batch=(message.micro_batch or 0) + first) for message in step.messages
    )
    return step._replace(messages=messages)


def orders_of(
    style: PipelineStyle,
    schedule: str,
    ranks: int,
    virtual: int,
    micro_batches: int,
    *,
    csv: str = "",
    group_size: int | None = None,
) -> list[Order]:
    """The computations of every pipeline rank, in order, without messages. The arguments are those of
    `steps_of`, with `group_size` that of MegatronPipeline. Counts are not checked.
    """
    if csv:
        return read_csv(csv, ranks, virtual, micro_batches).orders
    if schedule == "interleaved-1f1b":
        size = torch_group_size(ranks, micro_batches) if style == "torch" else group_size or ranks
        return orders.interleaved(ranks, virtual, micro_batches, size)
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


def ranks_of(schedule: str, ranks: int, virtual: int, micro_batches: int, csv: str = "") -> list[int]:
    """The pipeline rank of every stage, in model order: in a CSV schedule it is where its actions are.

    Raises InputError for a CSV schedule that does not fit.
    """
    if csv:
        return read_csv(csv, ranks, virtual, micro_batches).rank_of
    return ranks_of_stages(schedule, ranks, virtual)


def _torch_steps(
    schedule: str, ranks: int, virtual: int, micro_batches: int, csv: str, *, is_fsdp: bool
) -> list[list[Step]]:
    if csv:
        schedule_from_file = read_csv(csv, ranks, virtual, micro_batches)
        lowered = schedule_from_file.orders
        if not schedule_from_file.is_lowered:
            lowered = torch_stages.lower_orders(
                schedule_from_file.orders, schedule_from_file.rank_of, micro_batches
            )
        return torch_stages.steps_of_orders(lowered, is_fsdp=is_fsdp)
    if schedule == "gpipe":
        return torch_stage.gpipe_steps(ranks, micro_batches, is_fsdp=is_fsdp)
    if schedule == "1f1b":
        return torch_stage.one_forward_one_backward_steps(ranks, micro_batches, is_fsdp=is_fsdp)
    order = orders_of("torch", schedule, ranks, virtual, micro_batches)
    rank_of = ranks_of_stages(schedule, ranks, virtual)
    return torch_stages.steps_of_orders(
        torch_stages.lower_orders(order, rank_of, micro_batches), is_fsdp=is_fsdp
    )


def _megatron_steps(
    schedule: str, ranks: int, virtual: int, micro_batches: int, settings: MegatronPipeline
) -> list[list[Step]]:
    if schedule == "interleaved-1f1b":
        return interleaved_steps(ranks, virtual, micro_batches, settings)
    return megatron_1f1b(ranks, micro_batches, settings)


def _nanotron_steps(schedule: str, ranks: int, micro_batches: int) -> list[list[Step]]:
    if schedule == "gpipe":
        return nanotron.all_forward_all_backward_steps(ranks, micro_batches)
    return nanotron.one_forward_one_backward_steps(ranks, micro_batches)
