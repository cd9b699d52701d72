"""Which bytes are one tensor: frees are paired with what they give back."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.plan.builder import COMPUTE, PlanBuilder, move_kernels
from zsim.plan.make import make_plan
from zsim.plan.memory.tensors import TensorChange, tensor_changes, tensor_columns
from zsim.plan.passes.repeated_step import repeat_program
from zsim.specs.experiment.resolve import resolve


def changes(builder: PlanBuilder) -> list[TensorChange]:
    return tensor_changes(builder.program(()))


def sizes(builder: PlanBuilder) -> list[tuple[int, int]]:
    """(tensor, bytes) of each change, 0 for a free."""
    return [(change.tensor, change.bytes) for change in changes(builder)]


def test_a_free_takes_the_newest_of_its_size_and_owner() -> None:
    builder = PlanBuilder([])
    for owner in ("a", "a", "b"):
        builder.allocate("buffers", 10, owner=owner)
    builder.free("buffers", 10, owner="a")
    assert sizes(builder)[-1] == (1, 0)


def test_a_free_of_a_sum_takes_all_of_its_parts() -> None:
    builder = PlanBuilder([])
    for size in (10, 20, 5):
        builder.allocate("activations", size)
    builder.free("activations", 25)
    assert sorted(sizes(builder)[-2:]) == [(1, 0), (2, 0)]


def test_what_is_freed_in_parts_was_several_tensors() -> None:
    """30 are allocated, 10 of them freed first: they were 20 and 10."""
    builder = PlanBuilder([])
    builder.allocate("buffers", 30)
    builder.free("buffers", 10)
    builder.free("buffers", 20)
    assert sizes(builder) == [(0, 20), (1, 10), (1, 0), (0, 0)]


def test_owners_that_change_alike_have_tensors_of_their_own_in_the_order_of_allocation() -> None:
    """Of 30 bytes each, 10 are freed first: a has tensors 0 and 1, other 2, and b has 3 and 4."""
    builder = PlanBuilder([])
    for owner, size in (("a", 30), ("other", 5), ("b", 30)):
        builder.allocate("buffers", size, owner=owner)
    for owner in ("b", "a"):
        builder.free("buffers", 10, owner=owner)
    assert sizes(builder) == [(0, 20), (1, 10), (2, 5), (3, 20), (4, 10), (4, 0), (1, 0)]


def test_an_allocation_of_several_tensors_says_so() -> None:
    builder = PlanBuilder([])
    builder.allocate("activations", 30, tensors=(10, 20))
    builder.free("activations", 30)
    assert sizes(builder)[:2] == [(0, 10), (1, 20)]


def test_blocks_belong_to_the_stream_of_the_work_they_are_for() -> None:
    """What is allocated before a gather is the gather's; activations are the compute stream's whatever comes
    next; a host op between does not matter."""
    builder = PlanBuilder([])
    builder.allocate("buffers", 10)
    builder.allocate("activations", 20)
    builder.host("hook")
    builder.kernels("gather", move_kernels(1, 1), stream="all_gather")
    builder.allocate("buffers", 30)
    builder.kernels("layer", move_kernels(1, 1))
    assert [change.stream for change in changes(builder)] == ["all_gather", "compute", "compute"]


STRATEGIES: list[dict[str, Any]] = [
    {"kind": "ddp"},
    {"kind": "fsdp2"},
    {"kind": "fsdp2", "replicate": 2, "cpu_offload": True},
    {"kind": "fsdp1", "limit_all_gathers": False},
    {"kind": "deepspeed", "stage": 2},
    {"kind": "deepspeed", "stage": 3},
    {"kind": "deepspeed", "config": {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}},
    {"kind": "deepspeed", "config": {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": True},
    }},
    {"kind": "reference", "stage": 3},
]  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("checkpointing", ["none", "selective", "selective-op", "full"])
def test_every_tensor_of_a_step_is_given_back_and_no_byte_is_lost(
    strategy: dict[str, Any], checkpointing: str
) -> None:
    """The tensors' levels are the plan's, change by change, and none is alive at the end."""
    training = {
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "activation_checkpointing": checkpointing,
    }
    job = resolve(
        zsim.Experiment(model="gpt2", cluster="dgx-a100-80gb", nodes=2, training=training, strategy=strategy)
    )
    plan = make_plan(job)
    live: dict[int, int] = {}
    for change in tensor_changes(plan.program):
        if change.bytes:
            live[change.tensor] = change.bytes
        else:
            del live[change.tensor]
    assert not live
    assert sum(change.bytes for change in plan.memory if change.device == "gpu") == 0
    taken = sum(change.bytes for change in plan.memory if change.device == "gpu" and change.bytes > 0)
    assert sum(change.bytes for change in tensor_changes(plan.program)) == taken
    assert tensor_columns(plan.program, 2).rows() == tensor_changes(repeat_program(plan.program))


def test_two_steps_change_as_their_program_does() -> None:
    """What is freed at the end of a step, or not whole, and what is allocated there for the next."""
    builder = PlanBuilder([])
    for stream, count in (("gather", 5), (COMPUTE, 7)):
        builder.allocate("buffers", count, owner=stream)
        builder.kernels("use", move_kernels(1, 1), stream=stream)
        builder.free_when_done("buffers", count, 0, owner=stream)
    freed = builder.program(())
    builder.allocate("buffers", 3, owner="next")
    builder.free("buffers", 2, owner="next")
    kept = builder.program(())
    builder.free("buffers", 1, owner="next")
    for program in (freed, kept, builder.program(())):
        both = repeat_program(program)
        assert tensor_columns(program, 2).rows() == tensor_changes(both)
    streams = [change.stream for change in tensor_columns(builder.program(()), 2).rows() if change.bytes == 2]
    assert streams == ["gather", COMPUTE]


def test_parts_of_one_owner_are_freed_apart() -> None:
    builder = PlanBuilder([])
    for part in ("gradients", "input"):
        builder.allocate("buffers", 10, owner="a", part=part)
    builder.free("buffers", 10, owner="a", part="gradients")
    assert sizes(builder)[-1] == (0, 0)


def test_fsdp2_gathers_into_one_tensor_and_copies_out_into_one_for_each_parameter() -> None:
    """Of a block of Llama-2 7B in bf16, on 8 GPUs: casts of 9 shards, the whole, 9 parameters; later 9
    gradients, and in fp32 the reduce-scatter's input. What one frees the others keep."""
    job = resolve(
        zsim.Experiment(
            model="llama-2-7b",
            cluster="dgx-h100",
            gpus=8,
            training={"sequence_length": 512, "micro_batch_size": 1},
            strategy={"kind": "fsdp2"},
        )
    )
    plan = make_plan(job)
    block = 2 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    weights = sorted([2 * 4096**2] * 4 + [2 * 4096 * 11008] * 3 + [2 * 4096] * 2)
    made: dict[str, list[int]] = {}
    for change in plan.memory:
        if change.owner == "model.layers.7" and change.bytes > 0:
            made.setdefault(change.part, []).extend(change.tensors or (change.bytes,))
    assert made["gathered"] == [block, block]  # forward and backward
    assert sorted(made["parameters"]) == sorted(weights * 2)
    assert sorted(made["casts"]) == sorted([size // 8 for size in weights] * 2)
    assert sorted(made["gradients"]) == weights
    assert made["reduce-scatter's input"] == [2 * block]


def test_foreach_makes_its_square_roots_tensor_by_tensor() -> None:
    job = resolve(
        zsim.Experiment(
            model="gpt2",
            cluster="dgx-h100",
            gpus=1,
            training={
                "sequence_length": 128,
                "micro_batch_size": 1,
                "optimizer_implementation": "foreach",
            },
            strategy={"kind": "ddp"},
        )
    )
    plan = make_plan(job)
    roots = next(change for change in plan.memory if change.owner == "optimizer step" and change.bytes > 0)
    states = next(memory for memory in plan.resident if memory.lazy_tensors)
    assert sorted(roots.tensors) == sorted(states.lazy_tensors[::2])
