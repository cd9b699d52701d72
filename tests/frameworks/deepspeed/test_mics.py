"""MiCS: shards inside groups, replicas of groups, gathers in one stage or two.

Llama-3.2-1B: 1,235,814,400 elements, 33 norms of 2,048 that persist; DeepSpeed 0.19.2.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import zsim
from tests.expect import of_kind
from tests.frameworks.deepspeed.zeropp_jobs import (
    HPZ,
    NOTHING_KEPT,
    calls,
    experiment_of,
    job_of,
    plan_of,
    sent,
)
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.table import DeepSpeedTable
from zsim.plan.make import make_plan
from zsim.plan.ops import Copy, Plan
from zsim.specs.experiment.resolve import resolve

TOTAL = 1_235_814_400
NORMS = 33 * 2_048
WEIGHTS = TOTAL - NORMS
CPU = {"device": "cpu"}
PASS = WEIGHTS + 128_256 * 2_048  # the head gathers the embedding once more


def mics(size: int, **zero: Any) -> dict[str, Any]:
    return {**NOTHING_KEPT, "mics_shard_size": size, **zero}


def plan_with(size: int, *, nodes: int = 2, steps: int = 1, **zero: Any) -> Plan:
    return plan_of(mics(size, **zero), nodes=nodes, steps=steps, version="0.19.2")


def test_states_are_sharded_inside_the_group() -> None:
    """On 32 GPUs in groups of 8: 2 + 2 + 12 bytes per element over 8, not over 32."""
    resident = {memory.category: 0 for memory in plan_with(8, nodes=4).resident}
    for memory in plan_with(8, nodes=4).resident:
        resident[memory.category] += memory.bytes
    assert resident["parameters"] == resident["gradients"] == 2 * TOTAL // 8
    assert resident["optimizer_states"] == 12 * TOTAL // 8


def test_everything_but_the_all_reduce_stays_inside_the_group() -> None:
    plan = plan_with(8, nodes=4)
    assert {key[:2] for key in calls(plan)} == {
        ("all_gather", "shard"), ("reduce_scatter", "shard"), ("all_reduce", "replicate"),
    }  # fmt: skip
    assert sent(plan, "all_gather", "shard", "fp16") == 2 * (2 * PASS + NORMS)
    assert sent(plan, "reduce_scatter", "shard", "fp16") == 2 * TOTAL
    assert sent(plan, "all_reduce", "replicate", "fp16") == 2 * TOTAL // 8


def test_the_norm_is_taken_over_the_group() -> None:
    """dp_process_group is the shard group."""
    scalars = [op.work for op in plan_with(8).ops if op.name.startswith("all_reduce gradient norm")]
    assert [getattr(work, "group", None) for work in scalars] == ["shard"]


def test_replicas_are_reduced_at_the_boundary_only() -> None:
    """Two-hop gradients: reduce-scatters of every micro-batch, all-reduces of the last."""
    plan = plan_with(8, steps=3)
    assert sent(plan, "reduce_scatter", "shard", "fp16") == 3 * 2 * TOTAL
    assert sent(plan, "all_reduce", "replicate", "fp16") == 2 * TOTAL // 8
    last = max(number for number, op in enumerate(plan.ops) if op.phase == "forward")
    reduced = [number for number, op in enumerate(plan.ops) if op.name == "all_reduce shards"]
    assert min(reduced) > last


def test_hierarchical_gathers_cross_nodes_with_this_gpus_pieces_only() -> None:
    """Groups of 16 on two nodes of 8: an eighth of every tensor between nodes, then all of it inside."""
    plan = plan_with(16, mics_hierarchical_params_gather=True)
    assert sent(plan, "all_gather", "shard inter", "fp16") == 2 * 2 * PASS // 8
    assert sent(plan, "all_gather", "shard intra", "fp16") == 2 * 2 * PASS
    assert sent(plan, "all_gather", "shard", "fp16") == 2 * NORMS
    assert plan.groups["shard inter"].ranks_of(3) == [3, 11]
    assert plan.groups["shard intra"].ranks_of(11) == list(range(8, 16))


def test_one_group_of_all_gpus_has_no_replicas() -> None:
    plan = plan_with(16)
    assert ("all_reduce", "replicate", "fp16") not in calls(plan)
    assert sent(plan, "reduce_scatter", "shard", "fp16") == 2 * TOTAL


def test_groups_of_one_are_data_parallel_with_buckets() -> None:
    plan = plan_with(1)
    assert {key[:2] for key in calls(plan)} == {("all_reduce", "replicate")}
    assert sent(plan, "all_reduce", "replicate", "fp16") == 2 * TOTAL


def test_gathered_parameters_need_no_second_copy() -> None:
    """Every parameter is gathered into its place; ZeRO-3 cuts a shared tensor into parameters."""
    zero = {"stage3_max_reuse_distance": 0, "mics_shard_size": 16}
    names = [op.name for op in plan_of(zero, version="0.19.2").ops]
    assert any(" more" in name for name in names)
    assert not any(name.startswith("cut ") for name in names)


def test_what_mics_does_not_pass_on_does_nothing() -> None:
    """MiCS_Optimizer gets neither the groups of qgZ nor qwZ's flag; hpZ's copies are written, never read."""
    ignored = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    job = job_of(mics(8, **ignored, **HPZ), version="0.19.2")
    plan = make_plan(job)
    assert calls(plan) == calls(plan_with(8))
    written = sum(
        change.bytes for change in plan.memory if change.category == "parameters" and change.bytes > 0
    )
    assert written == 2 * TOTAL // 8
    assert any("no effect with mics_shard_size" in note for note in job.notes)
    assert any("written and never read" in note for note in job.notes)


@pytest.mark.parametrize("zero", [mics(4), mics(8), mics(16, mics_hierarchical_params_gather=True)])
def test_folded_is_unfolded(zero: dict[str, Any]) -> None:
    experiment = experiment_of(zero, version="0.19.2", steps=2, micro_batch_size=1, nodes=4)
    folded, unfolded = (zsim.simulate(experiment, unfold=flag).report for flag in (False, True))
    assert folded.step_seconds == pytest.approx(unfolded.step_seconds, rel=1e-12)
    assert folded.traffic == unfolded.traffic
    assert folded.peaks == unfolded.peaks


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        (
            mics(8, mics_hierarchical_params_gather=True),
            "mics_shard_size 8 does not span two nodes of 8 GPUs",
        ),
        (mics(8, offload_param=CPU), "MiCS gathers shards where they lie"),
        (mics(8, offload_optimizer=CPU), "adds up gradients of 2 replicas in GPU memory only"),
        (mics(12), "found 12, expected a divisor of the 16 GPUs"),
    ],
)
def test_what_mics_asserts_is_refused(zero: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job_of(zero, version="0.19.2")


ONE_GROUP = mics(16, mics_hierarchical_params_gather=True)


def copied(plan: Plan, direction: str, beginning: str = "") -> int:
    """Bytes over PCIe by ops whose names begin so."""
    works = [op.work for op in plan.ops if op.name.startswith(beginning)]
    return sum(w.bytes for w in works if isinstance(w, Copy) and w.direction == direction)


def optimizer_states(plan: Plan) -> list[tuple[str, int]]:
    states = [memory for memory in plan.resident if memory.category == "optimizer_states" and memory.bytes]
    return [(memory.device, memory.bytes) for memory in states]


def test_one_group_of_all_gpus_may_offload_its_optimizer() -> None:
    """`allreduce_mics_shard_grads` returns before it looks where gradients are; the calls are those without
    offloading. Sums of gradients go to the host and back, but all states stay on the GPU: MiCS_Optimizer is
    not told the ratio, and takes 0."""
    plan, kept = plan_with(16, offload_optimizer=CPU), plan_with(16)
    assert calls(plan) == calls(kept)
    assert optimizer_states(plan) == [("gpu", 12 * TOTAL // 16)]
    assert copied(plan, "d2h", "gradients") == copied(plan, "h2d", "gradients") == 2 * TOTAL // 16
    assert copied(plan, "d2h", "fp32 gradients") == 0
    assert any("does not pass the ratio on" in note for note in plan.notes)


def test_before_there_was_a_ratio_the_states_left_the_gpu() -> None:
    """0.12.2: a 16th of 12 bytes in host memory, and fp32 gradients go there at the boundary."""
    plan = plan_of(mics(16, offload_optimizer=CPU), version="0.12.2")
    assert optimizer_states(plan) == [("host", 12 * TOTAL // 16)]
    assert copied(plan, "d2h", "fp32 gradients") == 4 * TOTAL // 16


def test_states_on_nvme_that_the_gpu_updates_are_not_simulated() -> None:
    nvme = {"device": "nvme", "nvme_path": "/nvme"}
    with pytest.raises(
        NotSimulatedError, match="MiCS, whose optimizer takes the ratio to be 0, with states on"
    ):
        plan_with(16, offload_optimizer=nvme)


@pytest.mark.parametrize("device", [CPU, {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 10**9}])
def test_hierarchical_gathers_copy_shards_to_the_gpu_first(device: dict[str, Any]) -> None:
    """_hierarchical_all_gather_params: `.to(self.local_device)` of every shard, in forward and backward; and
    what persists after the step."""
    plan = plan_of({**ONE_GROUP, "offload_param": device}, version="0.19.2")
    assert calls(plan) == calls(plan_of(ONE_GROUP, version="0.19.2"))
    assert copied(plan, "h2d", "shard of") == 2 * 2 * PASS // 16
    assert copied(plan, "h2d", "shards of persistent") == 2 * NORMS // 16
    assert copied(plan, "d2h", "weights") == 2 * TOTAL // 16


def test_checkpoints_may_wait_in_host_memory() -> None:
    """They are the engine's affair, whatever the optimizer: 16 blocks' inputs go and come."""
    experiment = experiment_of(mics(8), version="0.19.2", micro_batch_size=1, activation_checkpointing="full")
    given = of_kind(of_kind(experiment.strategy, DeepSpeedTable).config, dict)
    config = {**given, "activation_checkpointing": {"cpu_checkpointing": True}}
    changed = experiment.model_copy(
        update={"strategy": experiment.strategy.model_copy(update={"config": config})}
    )
    plan = make_plan(resolve(changed))
    assert copied(plan, "d2h") == copied(plan, "h2d") == 16 * 1024 * 2048 * 2


@pytest.mark.parametrize(
    "zero",
    [
        {**ONE_GROUP, "offload_param": CPU},
        mics(16, offload_optimizer=CPU),
        {**ONE_GROUP, **HPZ, "offload_param": CPU},
    ],
)
def test_what_is_offloaded_balances(zero: dict[str, Any]) -> None:
    """Every tensor that a step makes on a device is given back in it, but one step's gradients' homes."""
    for steps in (1, 3):
        held: Counter[tuple[str, str]] = Counter()
        for change in plan_of(zero, version="0.19.2", steps=steps).memory:
            held[change.category, change.device] += change.bytes
        assert not any(held.values())


def test_releases_that_reduce_wrongly_are_named() -> None:
    assert any("by mistake" in note for note in job_of(mics(8), version="0.19.3").notes)
    assert not any("by mistake" in note for note in job_of(mics(8), version="0.19.2").notes)


def test_mics_is_not_in_the_newest_release() -> None:
    with pytest.raises(InputError, match=r"removed from DeepSpeed in 0.19.7.* version '0.19.6'"):
        job_of(mics(8))
