"""ZeRO++: what is gathered where, in how many bytes, and what it costs in memory and waits.

Llama-3.2-1B: 1,235,814,400 elements, of which 33 norms of 2,048 persist; 112 weights in 16 blocks and the
embedding are gathered, 1,235,746,816 elements, all of them multiples of 8 x 16. The head shares the
embedding, so that a pass of forward or backward in which nothing is kept gathers 114 tensors, the embedding
twice.
"""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from tests.frameworks.deepspeed.zeropp_jobs import (
    HPZ,
    NOTHING_KEPT,
    QGZ,
    QWZ,
    calls,
    experiment_of,
    job_of,
    plan_of,
    sent,
)
from tests.plan.steps import plan_step
from zsim.cost.kernels.quantization import weight_groups
from zsim.errors import InputError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.plan.make import make_plan
from zsim.plan.memory.capacity import peak_bytes
from zsim.plan.ops import Kernels, Plan
from zsim.plan.workload.workload import make_workload
from zsim.specs.experiment.placement import PlacementTable
from zsim.specs.experiment.resolve import resolve

WEIGHTS = 1_235_746_816
EMBEDDING = 128_256 * 2_048
NORMS = 33 * 2_048
PASS = WEIGHTS + EMBEDDING


def held_parameters(plan: Plan) -> int:
    """The highest level of the rank's own parameters."""
    level = highest = sum(memory.bytes for memory in plan.resident if memory.category == "parameters")
    for change in plan.memory:
        level += change.bytes if change.category == "parameters" else 0
        highest = max(highest, level)
    return highest


def test_backward_gathers_inside_the_secondary_group() -> None:
    """Forward goes over all GPUs but for the head, whose weight has been there before."""
    plan = plan_of({**NOTHING_KEPT, **HPZ})
    world, near = ("all_gather", "world", "fp16"), ("all_gather", "hpz", "fp16")
    forward, backward = calls(plan, "forward"), calls(plan, "backward")
    assert (forward[world], forward[near]) == (113, 1)
    assert (backward[world], backward[near]) == (0, 114)
    assert sent(plan, *world) == 2 * (WEIGHTS + NORMS)
    assert sent(plan, *near) == 2 * (EMBEDDING + PASS)
    assert calls(plan, "optimizer")[world] == 33


def test_later_micro_batches_gather_inside_the_secondary_group() -> None:
    """Only the first forward after a step goes over all GPUs; then there are copies of everything."""
    plan = plan_of({**NOTHING_KEPT, **HPZ}, steps=3)
    assert sent(plan, "all_gather", "world", "fp16") == 2 * (WEIGHTS + NORMS)
    assert calls(plan)["all_gather", "hpz", "fp16"] == 1 + 2 * 114 + 3 * 114


def test_recomputation_gathers_inside_the_secondary_group_too() -> None:
    plan = plan_of({**NOTHING_KEPT, **HPZ}, activation_checkpointing="full")
    again = calls(plan, "recompute") + calls(plan, "backward")
    assert {key[1] for key in again if key[0] == "all_gather"} == {"hpz"}


@pytest.mark.parametrize(("size", "share"), [(2, 2), (8, 8), (64, 16)])
def test_secondary_shards_take_the_models_bytes_over_the_group(size: int, share: int) -> None:
    """2 bytes of every element, norms too, over the group (which the 16 GPUs bound), beside the sixteenth of
    the shards themselves."""
    total = WEIGHTS + NORMS
    plan = plan_of({**NOTHING_KEPT, "zero_hpz_partition_size": size})
    assert held_parameters(plan) == 2 * total // 16 + 2 * total // share
    assert sum(change.bytes for change in plan.memory if change.category == "parameters") == 0


def test_the_host_waits_for_every_secondary_shard() -> None:
    """Since 0.13.5 one wait for each of the 113 weights that forward releases, and for each of the 33 norms
    at the step, which releases what persists."""
    waits = {
        version: sum(
            bool(op.host_waits) and plan.ops[op.host_waits[0]].name.startswith("secondary shard")
            for op in plan.ops
        )
        for version in ("0.13.4", "0.13.5")
        for plan in [plan_of({**NOTHING_KEPT, **HPZ}, version=version)]
    }
    assert waits["0.13.4"] == 0
    assert waits["0.13.5"] == 113 + 33


def test_before_0_13_2_forward_goes_over_all_gpus_and_nothing_is_refreshed() -> None:
    """Every micro-batch's forward; the copies are there from the beginning and nobody writes them again."""
    job = job_of({**NOTHING_KEPT, **HPZ}, version="0.13.1", steps=2)
    plan = make_plan(job)
    assert {key[1] for key in calls(plan, "forward")} == {"world"}
    assert {key[1] for key in calls(plan, "backward") if key[0] == "all_gather"} == {"hpz"}
    assert not any(op.name.startswith("secondary shard") for op in plan.ops)
    assert held_parameters(plan) == 2 * (WEIGHTS + NORMS) // 16 + 2 * (WEIGHTS + NORMS) // 8
    assert "backward runs on the first weights" in job.notes[0]


def test_quantised_weights_are_gathered_in_one_byte_and_their_scales() -> None:
    """Every fetch of one weight is two calls: its elements, and 4 bytes for each group of each shard."""
    plan = plan_of({**NOTHING_KEPT, **QWZ})
    per_block = [2048 * 2048] * 2 + [512 * 2048] * 2 + [8192 * 2048] * 3
    scales = 16 * sum(16 * 4 * (weight_groups(numel // 16) or 0) for numel in per_block)
    scales += 2 * 16 * 4 * (weight_groups(EMBEDDING // 16) or 0)
    assert sent(plan, "all_gather", "world", "int8") == 2 * PASS
    assert sent(plan, "all_gather", "world", "fp32") == 2 * scales
    assert sent(plan, "all_gather", "world", "fp16") == 2 * NORMS
    assert calls(plan, "backward")["all_gather", "world", "int8"] == 114


def test_quantised_weights_come_from_the_secondary_shards_too() -> None:
    plan = plan_of({**NOTHING_KEPT, **QWZ, **HPZ})
    assert calls(plan, "backward")["all_gather", "hpz", "int8"] == 114
    assert sent(plan, "all_gather", "world", "int8") == WEIGHTS
    assert sent(plan, "all_gather", "hpz", "int8") == EMBEDDING + PASS


def test_bf16_weights_are_cast_to_fp16_and_back_since_0_19_6() -> None:
    """The kernels read and write fp16 only; each cast moves 2 + 2 bytes per element."""

    def moved(version: str) -> float:
        plan = plan_of({**NOTHING_KEPT, **QWZ}, version=version, precision="bf16")
        works = [op.work for op in plan.ops if "quantize" in op.name and isinstance(op.work, Kernels)]
        return sum(kernel.hbm_bytes for work in works for kernel in work.kernels)

    assert moved("0.19.6") - moved("0.19.5") == 2 * 4 * (PASS + PASS // 16)


def test_quantised_gathers_hold_both_tensors_while_they_turn_one_into_the_other() -> None:
    """One embedding of 262,668,288 elements: int8, scales and fp16 at the end of its gather."""
    levels: list[int] = []
    plan, level = plan_of({**NOTHING_KEPT, **QWZ, "stage3_param_persistence_threshold": 10**8}), 0
    for change in plan.memory:
        level += change.bytes if change.category == "buffers" else 0
        levels.append(level)
    scales = 16 * 4 * (weight_groups(EMBEDDING // 16) or 0)
    assert levels[:6] == [
        EMBEDDING,
        EMBEDDING + EMBEDDING // 16 + scales // 16,
        EMBEDDING + EMBEDDING // 16 + scales // 16 + scales,
        EMBEDDING + scales,
        3 * EMBEDDING + scales,
        2 * EMBEDDING,
    ]


def test_a_shard_that_is_no_multiple_of_8_is_refused_as_deepspeed_asserts() -> None:
    """2,048 x 512 over 12 x 8 GPUs."""
    with pytest.raises(InputError) as caught:
        plan_of({**NOTHING_KEPT, **QWZ}, nodes=12)
    assert str(caught.value).startswith("DeepSpeed config: zero_optimization.zero_quantized_weights: ")
    assert "on 96 GPUs, and DeepSpeed quantises multiples of 8" in str(caught.value)


def test_quantised_gradients_make_two_hops_in_half_a_byte() -> None:
    """WEIGHTS / 2 bytes inside the node, an eighth of that between nodes; as many scales as the longer side
    of each weight, an eighth of them between nodes. Norms are vectors and reduce-scattered one by one."""
    plan = plan_of(QGZ)
    scales = 16 * (2 * 2048 + 2 * 2048 + 3 * 8192) + 128_256
    assert sent(plan, "all_to_all", "local", "int4") == WEIGHTS // 2
    assert sent(plan, "all_to_all", "global", "int4") == WEIGHTS // 16
    assert sent(plan, "all_to_all", "local", "fp32") == 4 * scales
    assert sent(plan, "all_to_all", "global", "fp32") == scales // 2
    assert sent(plan, "reduce_scatter", "world", "fp16") == 2 * NORMS
    assert calls(plan)["reduce_scatter", "world", "fp16"] == 33


def test_quantised_gradients_leave_the_gathers_alone_on_their_communicator() -> None:
    """The hops have communicators of their own: no all-gather waits for a reduction."""
    plan = plan_of(QGZ)
    of_reductions = {number for number, op in enumerate(plan.ops) if op.stream == "reduce_scatter"}
    gathers = [op for op in plan.ops if op.stream == "all_gather" and op.phase == "backward"]
    hops = {number for number in of_reductions if plan.ops[number].name.startswith("all_to_all")}
    assert not any(hops & set(op.after) for op in gathers)


def test_one_node_reduces_without_hops() -> None:
    job = job_of(QGZ, nodes=1)
    assert {key[0] for key in calls(make_plan(job))} == {"all_gather", "reduce_scatter"}
    assert any("zero_quantized_gradients: no effect on one node" in note for note in job.notes)


@pytest.mark.parametrize("rows", [129, 144])
def test_tensors_that_do_not_divide_are_scattered_alone(toys: Any, rows: int) -> None:
    """129 x 16 elements are no multiple of 2 x 16; 128 x 16 and 144 x 16 are."""
    config = job_of({**QGZ, "stage3_param_persistence_threshold": 0}).strategy
    model = toys.linear_blocks([(128, 16), (rows, 16)])
    assert isinstance(config, DeepSpeedConfig)
    plan = plan_step(make_workload(model, toys.training()), config, 16)
    scattered, hopped = (129 * 16, 128 * 16) if rows == 129 else (0, 272 * 16)
    assert sent(plan, "reduce_scatter", "world", "fp16") == 2 * scattered
    assert sent(plan, "all_to_all", "local", "int4") == hopped // 2


def test_scales_that_do_not_divide_are_refused_as_torch_does() -> None:
    """GPT-2's embedding: 50,257 x 1,600 elements divide by 2 x 16, its 50,257 scales not by 8."""
    with pytest.raises(InputError, match=r"transformer.wte.weight \(50257, 1600\) has 50257 scales"):
        plan_of(QGZ, model="gpt2-xl")
    with pytest.raises(InputError, match="cannot divide among 64 nodes"):
        plan_of(QGZ, nodes=64)


def test_before_0_13_2_tensors_that_do_not_divide_fail() -> None:
    """512 x 2,048 over 2 x 24 GPUs."""
    with pytest.raises(InputError, match="which two hops over 24 GPUs cannot divide"):
        plan_of(QGZ, nodes=3, version="0.13.1")


def test_uneven_nodes_have_no_groups_for_quantised_gradients() -> None:
    """8 + 4 GPUs: `device_count()` differs from rank to rank."""
    experiment = experiment_of(QGZ, micro_batch_size=1)
    uneven = experiment.model_copy(update={"placement": PlacementTable(gpus_per_node=(8, 4))})
    with pytest.raises(
        InputError, match=r"zero_quantized_gradients: builds its groups node by node.* 4 to 8"
    ):
        resolve(uneven)


def test_locos_errors_are_kept_in_one_byte() -> None:
    """Every weight whole, and an eighth of it, with scales; 1.13 bytes per element on every GPU."""
    plain, loco = (
        job_of({**QGZ, **extra}, version="0.19.7") for extra in ({}, {"zeropp_loco_param": {"err_beta": 0.8}})
    )
    scales = 4 * (16 * (2 * 2048 + 2 * 2048 + 3 * 8192) + 128_256) * 9 // 8
    more = [
        sum(memory.bytes for memory in make_plan(job).resident if memory.category == "buffers")
        for job in (plain, loco)
    ]
    assert more[1] - more[0] == WEIGHTS * 9 // 8 + scales


ALONE_AND_TOGETHER = [HPZ, QWZ, QGZ, {**HPZ, **QWZ}, {**HPZ, **QWZ, **QGZ}]


@pytest.mark.parametrize("zero", ALONE_AND_TOGETHER, ids=["hpZ", "qwZ", "qgZ", "hpZ qwZ", "all"])
def test_folded_is_unfolded(zero: dict[str, Any]) -> None:
    experiment = experiment_of(zero, steps=2, micro_batch_size=1)
    folded, unfolded = (zsim.simulate(experiment, unfold=flag).report for flag in (False, True))
    assert folded.step_seconds == pytest.approx(unfolded.step_seconds, rel=1e-12)
    assert folded.traffic == unfolded.traffic
    assert folded.peaks == unfolded.peaks


def test_the_memory_that_a_step_takes_it_gives_back() -> None:
    for zero in ALONE_AND_TOGETHER:
        plan = plan_of(zero, steps=2)
        assert sum(change.bytes for change in plan.memory) == 0


def test_offloaded_optimizers_go_with_all_three() -> None:
    """The states leave the GPU; what is gathered and reduced stays the same."""
    zero = {**HPZ, **QWZ, **QGZ}
    with_offload = {**zero, "offload_optimizer": {"device": "cpu"}}
    assert calls(plan_of(with_offload)) == calls(plan_of(zero))
    kept, left = (resolve(experiment_of(each, micro_batch_size=1)) for each in (zero, with_offload))
    assert peak_bytes(left, make_plan(left)) < peak_bytes(kept, make_plan(kept))
