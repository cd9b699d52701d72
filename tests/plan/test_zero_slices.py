"""Python loops of DeepSpeed that grow with the number of ranks: slices of buckets and of gathered tensors."""

from __future__ import annotations

from typing import Any

import zsim
from zsim.plan.make import make_plan
from zsim.plan.ops import Op, Plan
from zsim.specs.job import resolve

PARAMETERS = 16 * 9 + 1 + 1  # Llama-3.2-1B: 7 weights and 2 norms a block, the last norm, the embedding
SINGLE = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}


def plan_of(zero: dict[str, Any], gpus: int = 16, **training: Any) -> Plan:
    experiment = zsim.Experiment(
        model="llama-3.2-1b",
        cluster="dgx-a100-80gb",
        gpus=gpus,
        training={"sequence_length": 1024, "micro_batch_size": 1, **training},
        strategy={"config": {"bf16": {"enabled": True}, "zero_optimization": zero}},
    )
    return make_plan(resolve(experiment))


def events(plan: Plan, overhead: str, name: str = "") -> int:
    return sum(op.events for op in plan.ops if op.overhead == overhead and op.name.startswith(name))


def test_stage_3_slices_every_gradient_into_the_parts_of_all_ranks() -> None:
    for gpus in (8, 16):
        assert events(plan_of({"stage": 3, **SINGLE}, gpus), "deepspeed_part") == PARAMETERS * gpus
    twice = plan_of({"stage": 3, **SINGLE}, gradient_accumulation_steps=2)
    assert events(twice, "deepspeed_part") == 2 * PARAMETERS * 16


def test_only_gathers_of_several_parameters_are_sliced_and_each_parameter_by_itself() -> None:
    """One loop over the ranks before the call, and one per parameter after it."""
    plan = plan_of({"stage": 3, "stage3_max_reuse_distance": 0})
    several = [op.name for op in plan.ops if op.name.startswith("all_gather") and op.name.endswith(" more")]
    assert several
    expected = sum(16 * (1 + 1 + int(name.split()[-2])) for name in several)
    gradients = events(plan, "deepspeed_part", "slice bucket")
    assert events(plan, "deepspeed_part") - gradients == expected
    sequential = plan_of({"stage": 3, "stage3_max_reuse_distance": 0, "stage3_allgather_sequential": True})
    assert events(sequential, "deepspeed_part") == gradients


def test_torch_joins_128_parts_in_one_kernel() -> None:
    """9 gradients of a block on 16 ranks are 144 parts."""
    plan = plan_of({"stage": 3, **SINGLE, "reduce_bucket_size": 60_821_504})
    flattened = [op for op in plan.ops if op.name == "flatten bucket"]
    sliced = [op.events for op in plan.ops if op.name == "slice bucket"]
    joined = [count for count in sliced if count > 16]  # one gradient that divides evenly stays where it is
    assert [op.launches for op in flattened] == [-(-count // 128) for count in joined]
    assert max(op.launches for op in flattened) == 2


def test_stages_1_and_2_slice_buckets_where_owners_change() -> None:
    """Stage 1 reduces in registered order: a bucket with all of the model has as many slices as ranks. Stage
    2's gradients come last ones first, so that neighbours of one owner are seldom neighbours in the bucket.
    What is all-reduced whole is not sliced."""
    bucket = {"reduce_bucket_size": 2_000_000_000}
    assert events(plan_of({"stage": 1, **bucket}), "deepspeed_slice") == 16
    assert events(plan_of({"stage": 2, **bucket}), "deepspeed_slice") > 16
    for stage in (1, 2):
        whole = plan_of({"stage": stage, **bucket, "reduce_scatter": False})
        assert events(whole, "deepspeed_slice") == 0


def test_reducing_to_owners_waits_for_the_gpu_before_every_call() -> None:
    """allreduce_and_copy synchronizes the device where overlap_comm is on."""
    zero = {"stage": 2, "use_multi_rank_bucket_allreduce": False, "reduce_bucket_size": 100_000_000}

    def waits(plan: Plan) -> list[tuple[Op, ...]]:
        return [tuple(plan.ops[number] for number in op.host_waits) for op in plan.ops if op.name == "reduce"]

    overlapped = waits(plan_of({**zero, "overlap_comm": True}))
    assert len(overlapped) > 16
    assert all({"compute", "reduce"} <= {op.stream for op in waited} for waited in overlapped)
    assert not any(waits(plan_of({**zero, "overlap_comm": False})))
