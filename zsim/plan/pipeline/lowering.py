"""The steps of every pipeline rank, as each framework issues them."""

from __future__ import annotations

from typing import Literal

from zsim.plan.pipeline import lowering_megatron, lowering_torch
from zsim.plan.pipeline.lowering_megatron import MegatronPipeline
from zsim.plan.pipeline.schedules import Action, Step, no_pipeline

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
    if ranks == 1:
        return [list(actions) for actions in no_pipeline(micro_batches * passes)]
    settings = megatron or MegatronPipeline()
    once = _one_pass(style, schedule, ranks, virtual, micro_batches, is_fsdp, csv, settings)
    return [
        [_numbered_on(step, number * micro_batches) for number in range(passes) for step in steps]
        for steps in once
    ]


def _numbered_on(step: Step, first: int) -> Step:
    """The step with its micro-batches numbered from `first` on."""
    if isinstance(step, Action):
        number = step.micro_batch
        return step if number is None else step._replace(micro_batch=number + first)
    moved = tuple(one._replace(micro_batch=(one.micro_batch or 0) + first) for one in step.messages)
    return step._replace(messages=moved)


def _one_pass(
    style: PipelineStyle,
    schedule: str,
    ranks: int,
    virtual: int,
    micro_batches: int,
    is_fsdp: bool,
    csv: str,
    megatron: MegatronPipeline,
) -> list[list[Step]]:
    if style == "megatron":
        return lowering_megatron.one_forward_one_backward_steps(ranks, micro_batches, megatron)
    return lowering_torch.one_forward_one_backward_steps(ranks, micro_batches, is_fsdp=is_fsdp)
