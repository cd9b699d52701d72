"""Micro-batches as repeats: the plan that hooks declare is the plan that is walked action by action."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.frameworks.megatron.nanotron import NanotronSchedule
from zsim.frameworks.megatron.schedule import MegatronSchedule
from zsim.plan.make import make_plan
from zsim.plan.ops import Plan
from zsim.specs.experiment.resolve import resolve

SCHEDULES = (MegatronSchedule, NanotronSchedule)


def plan_of(training: dict[str, Any], parallelism: dict[str, Any], model: str = "llama-3-8b") -> Plan:
    experiment = zsim.Experiment(
        model=model,
        cluster="dgx-h100",
        gpus=32,
        training={"sequence_length": 1024, "gradient_accumulation_steps": 8, **training},
        strategy={
            "kind": "megatron", "distributed_optimizer": True, "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
        parallelism=parallelism,
    )  # fmt: skip
    return make_plan(resolve(experiment))


@pytest.mark.parametrize(
    "parallelism",
    [{}, {"pipeline": 4}, {"pipeline": 4, "virtual_stages": 2}, {"tensor": 2, "sequence_parallel": True}],
    ids=["data", "pipeline", "interleaved", "tensor"],
)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_repeats_are_what_a_walk_issues(
    monkeypatch: pytest.MonkeyPatch, parallelism: dict[str, Any], checkpointing: str
) -> None:
    training = {"activation_checkpointing": checkpointing}
    plan = plan_of(training, parallelism)
    assert any(program.repeats for program in plan.programs)
    for schedule in SCHEDULES:
        monkeypatch.setattr(schedule, "action_state", lambda self: None)
    walked = plan_of(training, parallelism)
    assert not any(program.repeats for program in walked.programs)
    for program, walked_program in zip(plan.programs, walked.programs, strict=True):
        assert program.ops == walked_program.ops
        assert list(program.memory) == list(walked_program.memory)
        assert program.actions == walked_program.actions


def test_all_but_the_ends_of_a_step_is_repeated() -> None:
    """Of eight forwards the first waits for gathers, and the second is the source of the others. Of eight
    backwards the first is the source of six, and the last reduces."""
    (program,) = plan_of({}, {}).programs
    assert [repeat.micro_batch for repeat in program.repeats] == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7]
    assert {repeat.source_micro_batch for repeat in program.repeats} == {0, 1}


def test_a_repeat_shares_the_work_of_its_source() -> None:
    (program,) = plan_of({}, {}).programs
    for repeat in program.repeats:
        source = program.ops[repeat.source_op : repeat.source_op + repeat.num_ops]
        ops = program.ops[repeat.op : repeat.op + repeat.num_ops]
        assert all(op.work is source_op.work for op, source_op in zip(ops, source, strict=True))
