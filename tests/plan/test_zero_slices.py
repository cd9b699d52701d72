"""Python loops of DeepSpeed that grow with the number of ranks: slices of buckets and of gathered tensors."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import zsim
from tests.expect import of_kind
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective, Op, Plan
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve

PARAMETERS = 16 * 9 + 1 + 1  # Llama-3.2-1B: 7 weights and 2 norms a block, the last norm, the embedding
NORMS = 16 * 2 + 1
SINGLE = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
SEVERAL = {"stage3_max_reuse_distance": 0}
ONE_BUCKET = {"reduce_bucket_size": 2_000_000_000}


def job_of(zero: dict[str, Any], gpus: int = 16, *, version: str = "0.19.8", **training: Any) -> Job:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **zero}}
    experiment = zsim.Experiment(
        model="llama-3.2-1b",
        cluster="dgx-a100-80gb",
        gpus=gpus,
        training={"sequence_length": 1024, "micro_batch_size": 1, **training},
        strategy={"kind": "deepspeed", "config": config, "version": version},
    )
    return resolve(experiment)


def plan_of(zero: dict[str, Any], gpus: int = 16, **options: Any) -> Plan:
    return make_plan(job_of(zero, gpus, **options))


def events(plan: Plan, overhead: str, name: str = "") -> int:
    return sum(op.events for op in plan.ops if op.overhead == overhead and op.name.startswith(name))


def named(plan: Plan, name: str) -> list[Op]:
    return [op for op in plan.ops if op.name == name]


def gathers_of_several(plan: Plan) -> list[tuple[Op, int]]:
    """Coalesced gathers of weights, and of how many parameters each is."""
    return [
        (op, 1 + int(op.name.split()[-2]))
        for op in plan.ops
        if op.name.startswith("all_gather ") and op.name.endswith(" more") and "scales" not in op.name
    ]


def waited_for(plan: Plan, op: Op) -> set[str]:
    return {plan.ops[number].stream for number in op.host_waits}


# -- stage 3 ---------------------------------------------------------------------------------------------


def test_stage_3_slices_every_gradient_into_the_parts_of_all_ranks() -> None:
    for gpus in (8, 16):
        assert events(plan_of(SINGLE, gpus), "deepspeed_part") == PARAMETERS * gpus
    twice = plan_of(SINGLE, gradient_accumulation_steps=2)
    assert events(twice, "deepspeed_part") == 2 * PARAMETERS * 16
    assert events(plan_of(SINGLE), "deepspeed_gathered_part") == 0


def test_gathers_of_several_parameters_are_sliced_once_before_and_once_per_parameter_after() -> None:
    plan = plan_of(SEVERAL)
    counts = [count for _, count in gathers_of_several(plan)]
    assert counts
    assert events(plan, "deepspeed_part") == 16 * (len(counts) + PARAMETERS)
    assert events(plan, "deepspeed_gathered_part") == 16 * sum(counts)
    sequential = plan_of({**SEVERAL, "stage3_allgather_sequential": True})
    assert events(sequential, "deepspeed_gathered_part") == 0


def test_quantised_weights_are_sliced_when_they_have_arrived() -> None:
    plan = plan_of({**SEVERAL, "zero_quantized_weights": True})
    counts = [count for _, count in gathers_of_several(plan)]
    assert counts
    assert events(plan, "deepspeed_gathered_part") == 16 * sum(counts)


def test_gathers_inside_the_node_are_sliced_for_its_gpus() -> None:
    plan = plan_of({**SEVERAL, "zero_hpz_partition_size": 8})
    sizes = [
        (plan.groups[of_kind(op.work, Collective).group].size, count)
        for op, count in gathers_of_several(plan)
    ]
    assert {size for size, _ in sizes} == {8, 16}
    assert events(plan, "deepspeed_gathered_part") == sum(size * count for size, count in sizes)


def test_quantised_gradients_leave_the_norms_to_be_sliced() -> None:
    plan = plan_of({**SINGLE, "zero_quantized_gradients": True})
    assert events(plan, "deepspeed_part") == 16 * NORMS


def test_mics_slices_gradients_for_its_group_and_no_gathers() -> None:
    plan = plan_of({**SEVERAL, "mics_shard_size": 8}, version="0.19.2")
    assert events(plan, "deepspeed_part") == 8 * PARAMETERS
    assert events(plan, "deepspeed_gathered_part") == 0


def test_torch_joins_128_parts_in_one_kernel() -> None:
    """On 256 ranks each parameter of a coalesced gather is 256 parts; so is each gradient of a bucket."""
    plan = plan_of(SEVERAL, 256)
    counts = [count for _, count in gathers_of_several(plan)]
    cuts = [op.launches for op in plan.ops if op.name.startswith("cut ")]
    assert cuts == [2 * count for count in counts]
    joined = [(op.events, op.launches) for op in named(plan, "flatten bucket")]
    assert all(events > 256 and events % 256 == 0 for events, _ in joined)
    assert all(launches == events // 128 for events, launches in joined)


# -- stages 1 and 2 --------------------------------------------------------------------------------------


def test_stage_1_slices_a_bucket_where_owners_change() -> None:
    """Reduced as registered, all of the model is as many slices as ranks."""
    for gpus in (16, 256):
        plan = plan_of({"stage": 1, **ONE_BUCKET}, gpus)
        assert events(plan, "deepspeed_slice") == gpus
        assert [op.launches for op in named(plan, "flatten bucket")] == [-(-gpus // 128)]


def test_stage_2_slices_in_the_order_of_gradients() -> None:
    """Owners in the order in which gradients come; a slice is a run of one owner."""
    job = job_of({"stage": 2, **ONE_BUCKET})
    plan = make_plan(job)
    numels = {name: parameter.numel for name, parameter in job.model.named_parameters()}
    starts = dict(zip(numels, np.cumsum([0, *numels.values()]), strict=False))
    shard = -(-sum(numels.values()) // 32) * 2
    owners: list[int] = []
    for op in plan.ops:
        if op.overhead == "deepspeed_gradient_hook":
            name = f"{op.module}.weight"
            owners += range(starts[name] // shard, (starts[name] + numels[name] - 1) // shard + 1)
    assert events(plan, "deepspeed_slice") == 1 + np.count_nonzero(np.diff(owners))


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_reduced_whole_is_not_sliced(stage: int) -> None:
    plan = plan_of({"stage": stage, **ONE_BUCKET, "reduce_scatter": False})
    assert events(plan, "deepspeed_slice") == 0
    assert not named(plan, "flatten bucket")
    assert not named(plan, "copy own slice")


def test_one_slice_is_not_copied() -> None:
    """Most buckets of 2e7 elements lie in one rank's 1.5e8. The embedding lies in several, but each of those
    slices is larger than a bucket and reduced by itself."""
    plan = plan_of({"stage": 1, "reduce_bucket_size": 20_000_000}, 8)
    sliced = [op.events for op in named(plan, "slice bucket")]
    assert sliced.count(1) > len(sliced) / 2
    assert len(named(plan, "flatten bucket")) == len(sliced) - sliced.count(1) - 1


def test_reducing_to_owners_waits_for_the_gpu_before_every_call() -> None:
    """allreduce_and_copy synchronizes where overlap_comm is on; slices joined again are reduced without."""
    zero = {"stage": 2, "reduce_bucket_size": 100_000_000, "overlap_comm": True}
    plan = plan_of({**zero, "use_multi_rank_bucket_allreduce": False})
    calls = named(plan, "rank of owner")
    assert len(calls) == len(named(plan, "reduce")) > 16
    assert all(waited_for(plan, op) == {"compute", "reduce"} for op in calls)
    assert events(plan, "rank_passed") == len(calls) * 16 // 2
    for change in ({"use_multi_rank_bucket_allreduce": False, "overlap_comm": False}, {}):
        other = plan_of({**zero, **change})
        assert all(op.stream == "host" and op.phase == "backward" for op in other.ops if op.host_waits[:-2])
        assert not any(op.host_waits for op in named(other, "rank of owner") + named(other, "all_reduce"))


def test_loose_gradients_are_all_reduced_together_and_copied_back() -> None:
    """buffered_reduce_fallback, whatever `use_multi_rank_bucket_allreduce` says."""
    zero = {"stage": 2, "contiguous_gradients": False, "use_multi_rank_bucket_allreduce": False}
    plan = plan_of({**zero, "overlap_comm": True})
    assert not named(plan, "reduce")
    back = named(plan, "copy gradients back")
    assert sum(op.launches for op in back) == events(plan, "deepspeed_slice") == PARAMETERS
    assert len(named(plan, "flatten bucket")) == len(back) - 1  # the embedding is a bucket by itself
    following = [op for before, op in pairwise(plan.ops) if before.name == "slice bucket"]
    assert waited_for(plan, following[0]) == {"compute"}  # nothing is reduced yet
    assert all(waited_for(plan, op) == {"compute", "reduce"} for op in following[1:])


def test_before_0_12_4_every_slice_is_a_reduce_and_nobody_waits() -> None:
    zero = {"stage": 2, "reduce_bucket_size": 100_000_000, "overlap_comm": True}
    plan = plan_of(zero, version="0.12.2")
    assert len(named(plan, "reduce")) == events(plan, "deepspeed_slice")
    assert len(named(plan, "reduce")) > len(
        named(plan_of({**zero, "use_multi_rank_bucket_allreduce": False}), "reduce")
    )
    assert not any(op.host_waits for op in named(plan, "rank of owner"))
    assert not named(plan, "flatten bucket")


def test_before_0_12_4_the_step_gathers_into_lists() -> None:
    """Two turns of a loop per rank and piece, and a copy each."""
    zero = {"stage": 2, "allgather_bucket_size": 400_000_000}
    plan = plan_of(zero, version="0.12.2")
    pieces = len(named(plan, "all_gather parameters"))
    assert pieces == 3
    assert events(plan, "deepspeed_part") == pieces * 16 * 2
    assert [op.launches for op in named(plan, "copy parameters out")] == [16] * pieces
    assert not named(plan_of(zero), "copy parameters out")


# -- FSDP1 -----------------------------------------------------------------------------------------------


def test_fsdp1_chunks_each_flat_gradient() -> None:
    experiment = zsim.Experiment(
        model="llama-3.2-1b", cluster="dgx-a100-80gb", gpus=16,
        training={"sequence_length": 1024}, strategy={"kind": "fsdp1"},
    )  # fmt: skip
    plan = make_plan(resolve(experiment))
    assert events(plan, "fsdp1_chunk") == 16 * (16 + 1)
