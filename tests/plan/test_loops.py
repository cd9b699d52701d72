"""Micro-batches as repeats: the plan that hooks declare is the plan that is walked action by action."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.frameworks.ddp.schedule import DdpSchedule
from zsim.frameworks.deepspeed.stage12.schedule import Zero12Schedule
from zsim.frameworks.fsdp2.schedule import Fsdp2Schedule
from zsim.frameworks.megatron.nanotron import NanotronSchedule
from zsim.frameworks.megatron.schedule import MegatronSchedule
from zsim.plan.make import make_plan
from zsim.plan.ops import Plan
from zsim.specs.experiment.resolve import resolve

SCHEDULES = (MegatronSchedule, NanotronSchedule, DdpSchedule, Fsdp2Schedule, Zero12Schedule)
MEGATRON = {
    "kind": "megatron", "distributed_optimizer": True, "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}  # fmt: skip

DEEP_COMPILE = {
    "compile": {"deepcompile": True}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
}  # fmt: skip


def plan_of(
    training: dict[str, Any], parallelism: dict[str, Any], strategy: dict[str, Any] = MEGATRON
) -> Plan:
    experiment = zsim.Experiment(
        model="llama-3-8b",
        cluster="dgx-h100",
        gpus=32,
        training={"sequence_length": 1024, "gradient_accumulation_steps": 8, **training},
        strategy=strategy,
        parallelism=parallelism,
    )
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
    assert_repeats_equal_walks(
        monkeypatch, {"activation_checkpointing": checkpointing}, parallelism, MEGATRON
    )


@pytest.mark.parametrize(
    "strategy",
    [
        {"kind": "ddp"},
        {"kind": "ddp", "no_sync": False},
        {"kind": "ddp", "gradient_as_bucket_view": True},
        {"kind": "fsdp2"},
        {"kind": "fsdp2", "no_sync": True},
        {"kind": "fsdp2", "replicate": 4, "wrapping": "huggingface"},
        {"kind": "fsdp2", "replicate": 4, "defer_all_reduce": True},
        {"kind": "fsdp2", "reshard_after_forward": False, "reduce_dtype": "bf16"},
        {"kind": "deepspeed", "stage": 1},
        {"kind": "deepspeed", "stage": 2},
        {"kind": "deepspeed", "config": DEEP_COMPILE | {"zero_optimization": {"stage": 1}}},
        {"kind": "deepspeed", "config": DEEP_COMPILE | {"zero_optimization": {"stage": 2}}},
    ],
    ids=lambda strategy: "-".join(str(value) for value in strategy.values()),
)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_repeats_of_data_parallelism_are_what_a_walk_issues(
    monkeypatch: pytest.MonkeyPatch, strategy: dict[str, Any], checkpointing: str
) -> None:
    assert_repeats_equal_walks(monkeypatch, {"activation_checkpointing": checkpointing}, {}, strategy)


def test_repeats_under_torchs_pipelines_are_what_a_walk_issues(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_repeats_equal_walks(monkeypatch, {}, {"pipeline": 4, "schedule": "1f1b"}, {"kind": "ddp"})


def test_checkpoints_in_host_memory_are_walked() -> None:
    """What is copied out of a forward is remembered until its backward."""
    plan = plan_of({"activation_checkpointing": "full", "checkpoint_offload": "pinned"}, {}, {"kind": "ddp"})
    assert not plan.program.repeats


def assert_repeats_equal_walks(
    monkeypatch: pytest.MonkeyPatch,
    training: dict[str, Any],
    parallelism: dict[str, Any],
    strategy: dict[str, Any],
) -> None:
    plan = plan_of(training, parallelism, strategy)
    assert any(program.repeats for program in plan.programs)
    for schedule in SCHEDULES:
        monkeypatch.setattr(schedule, "action_state", lambda self, micro_batch: None)
    walked = plan_of(training, parallelism, strategy)
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
