"""nanotron's data parallelism, without ZeRO in DDP's buckets and with ZeRO-1 behind backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.plan.steps import plan_step
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.plan.ops import Collective, Kernels, Plan
from zsim.plan.workload.workload import make_workload

NUMEL, TENSORS, RANKS = 15_520, 15, 8
WHOLE = MegatronConfig(
    distributed_optimizer=False, overlap_grad_reduce=True, overlap_param_gather=False, param_dtype="bf16",
    grad_dtype="fp32", average_in_collective=True, bucket_size=3000, optimizer_instances=1,
    is_contiguous=True, fuses_accumulation=False, checks_nan=False, is_nanotron=True,
)  # fmt: skip
SHARDED = replace(WHOLE, distributed_optimizer=True, overlap_grad_reduce=False, bucket_size=None)


def toy_plan(
    toys: Any, strategy: MegatronConfig, ranks: int = RANKS, is_tied: bool = False, **keys: Any
) -> Plan:
    """Of 15,520 elements in 15 tensors: embedding 1600, 4 blocks of 3072, norm 32, head 1600."""
    settings = toys.training(**{"optimizer": "adamw", "gradient_clipping": 1.0, **keys})
    return plan_step(make_workload(toys.transformer(is_tied=is_tied), settings), strategy, ranks)


def sent(plan: Plan) -> list[tuple[str, str, int]]:
    """(kind, stream, bytes) of the collectives of more than a number, in order."""
    found = [(op.work, op.stream) for op in plan.ops if isinstance(op.work, Collective)]
    return [(work.kind, stream, work.bytes) for work, stream in found if work.bytes > 4]


def launches(plan: Plan, name: str) -> list[int]:
    return [op.launches for op in plan.ops if op.name == name and isinstance(op.work, Kernels)]


def tensors(plan: Plan) -> int:
    [count] = set(launches(plan, "add gradients"))
    return count


def test_zero_1_all_reduces_all_sums_at_once_and_gathers_all_parameters_at_once(toys: Any) -> None:
    """4 bytes an element behind backward, 2 behind the update: both on the stream that computes."""
    plan = toy_plan(toys, SHARDED)
    assert sent(plan) == [("all_reduce", "compute", 4 * NUMEL), ("all_gather", "compute", 2 * NUMEL)]
    names = [op.name for op in plan.ops]
    last = max(number for number, op in enumerate(plan.ops) if op.phase == "backward" and op.work)
    assert names.index("all_reduce bucket 0") > names.index("add gradients")
    assert names.index("all_reduce bucket 0") >= last
    assert names.index("all_gather parameters") > names.index("optimizer step")


def test_zero_1_copies_a_piece_of_each_parameter_for_each_rank(toys: Any) -> None:
    plan = toy_plan(toys, SHARDED)
    count = tensors(plan)
    assert launches(plan, "copy pieces back") == [RANKS * count]
    assert launches(plan, "copy out of the gathered") == [RANKS]
    [cut] = [op for op in plan.ops if op.overhead == "nanotron_piece"]
    assert cut.events == RANKS * count
    levels = toys.host_levels(plan)["buffers"]
    assert max(levels) - min(levels) == 2 * 2 * NUMEL + 2 * NUMEL // RANKS


def test_gradients_of_a_micro_batch_live_until_its_backward_ends(toys: Any) -> None:
    """2 bytes an element beside the 4 of the sums, in every micro-batch."""
    plan = toy_plan(toys, SHARDED, gradient_accumulation_steps=3)
    assert len(launches(plan, "add gradients")) == 3
    levels = toys.host_levels(plan)["gradients"]
    assert max(levels) - min(levels) == 2 * NUMEL
    resident = sum(one.bytes for one in plan.resident if one.category == "gradients")
    assert resident == 4 * NUMEL


def test_a_shared_embedding_has_one_gradient(toys: Any) -> None:
    plan = toy_plan(toys, SHARDED, is_tied=True)
    numel = NUMEL - 1600
    assert sent(plan)[0] == ("all_reduce", "compute", 4 * numel)
    levels = toys.host_levels(plan)["gradients"]
    assert max(levels) - min(levels) == 2 * numel
    assert len([op for op in plan.ops if op.name.startswith("add tied gradient")]) == 1


def test_ddp_reduces_its_buckets_beside_the_last_backward(toys: Any) -> None:
    """Only the last of two micro-batches; DDP's own copies of all gradients stay."""
    plan = toy_plan(toys, WHOLE, gradient_accumulation_steps=2)
    kinds = sent(plan)
    assert {(kind, stream) for kind, stream, _ in kinds} == {("all_reduce", "data parallel")}
    assert sum(size for _, _, size in kinds) == 4 * NUMEL
    assert len(kinds) == len(launches(plan, "add bucket")) > 3
    assert len(launches(plan, "add gradients")) == 1  # of the first micro-batch
    assert len(launches(plan, "copy buckets back")) == 1
    assert sum(one.bytes for one in plan.resident if one.category == "buffers") == 2 * NUMEL


@pytest.mark.parametrize("strategy", [WHOLE, SHARDED])
def test_one_rank_adds_and_sends_nothing(toys: Any, strategy: MegatronConfig) -> None:
    plan = toy_plan(toys, strategy, ranks=1)
    assert sent(plan) == []
    assert len(launches(plan, "add gradients")) == 1


def test_the_norm_is_taken_of_all_gradients_and_no_one_looks_at_it(toys: Any) -> None:
    """Every rank has all sums, with ZeRO-1 too; clipping multiplies them whatever the norm is."""
    plan = toy_plan(toys, SHARDED)
    last = [op for op in plan.ops if op.phase == "optimizer"]
    assert [op.name for op in last][:2] == ["gradient norm", "clip gradients"]
    assert not any(op.host_waits for op in last)
    works = [op.work for op in last[:2]]
    assert all(isinstance(work, Kernels) for work in works)
    assert [sum(k.hbm_bytes for k in work.kernels) for work in works if isinstance(work, Kernels)] == [
        pytest.approx(4 * NUMEL, rel=0.01),
        8 * NUMEL,
    ]


def test_a_stage_of_the_loss_alone_updates_nothing_and_still_takes_part_in_the_norm(toys: Any) -> None:
    """nanotron's split by cost can leave the last rank without parameters."""
    parts = toys.transformer()
    empty = replace(parts, before=(), blocks=(), after=parts.after[-1:])
    assert empty.numel == 0
    plan = plan_step(make_workload(empty, toys.training(optimizer="adamw")), SHARDED, RANKS)
    assert sent(plan) == []
    assert not any(
        kernel.hbm_bytes
        for op in plan.ops
        if op.phase == "optimizer"
        for kernel in (op.work.kernels if isinstance(op.work, Kernels) else ())
    )
