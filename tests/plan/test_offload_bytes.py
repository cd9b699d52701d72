"""Bytes per rank and step on every tier, against counting by hand, for every placement."""

from __future__ import annotations

from typing import Any

import pytest

from zsim import Experiment, simulate
from zsim.plan.make import make_plan
from zsim.plan.ops import Copy, DriveIo, HostWork, Kernels, Plan
from zsim.report.views.text.plan import plan_to_dict
from zsim.specs.experiment.resolve import resolve

CPU = {"device": "cpu"}
MODEL = {
    "model_type": "gpt2", "n_embd": 1024, "n_layer": 2, "n_head": 16, "n_positions": 128, "vocab_size": 4096,
}  # fmt: skip
NVME = {"device": "nvme", "nvme_path": "/nvme"}


def plan_of(zero: dict[str, Any], gpus: int = 4, micro_batches: int = 1, **options: Any) -> Plan:
    """One step of the small model in bf16."""
    config = {"bf16": {"enabled": True}, "zero_optimization": zero, **options.pop("config", {})}
    training = {
        "sequence_length": 128,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": micro_batches,
        **options,
    }
    experiment = Experiment(
        model=MODEL, cluster="dgx-h100", gpus=gpus, training=training,
        strategy={"kind": "deepspeed", "config": config},
    )  # fmt: skip
    return make_plan(resolve(experiment))


def copied(plan: Plan, direction: str) -> int:
    return sum(
        op.work.bytes for op in plan.ops if isinstance(op.work, Copy) and op.work.direction == direction
    )


def moved(plan: Plan, direction: str) -> int:
    return sum(
        op.work.bytes for op in plan.ops if isinstance(op.work, DriveIo) and op.work.direction == direction
    )


def cpu_bytes(plan: Plan, kind: str) -> int:
    return sum(op.work.bytes for op in plan.ops if isinstance(op.work, HostWork) and op.work.kind == kind)


# h = 1024, ffn = 4h, V = 4096, S = 128. A block: 12 h^2 + 13 h = 12,596,224; two blocks, embeddings
# (V + S) h = 4,325,376 (tied head), the last norm 2 h = 2,048: 29,519,872 in all, and every parameter is a
# multiple of 4 elements, so a quarter is
NUMEL = 29_519_872
SHARD = NUMEL // 4


def test_the_model_has_as_many_parameters_as_counted() -> None:
    assert resolve(Experiment(model=MODEL, cluster="dgx-h100", gpus=4)).model.numel == NUMEL


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_zero3_with_the_optimizer_on_the_cpu(micro_batches: int) -> None:
    """Per element of the shard and micro-batch: 2 bytes to the host and 2 back; at the end 4 to the host in
    fp32; after the step 2 bytes of new weights to the GPU. The CPU scales (8), updates (28), casts (6)."""
    plan = plan_of({"stage": 3, "offload_optimizer": CPU}, micro_batches=micro_batches)
    assert copied(plan, "d2h") == (2 * micro_batches + 4) * SHARD
    assert copied(plan, "h2d") == (2 * micro_batches + 2) * SHARD
    assert cpu_bytes(plan, "optimizer") == 28 * SHARD
    assert cpu_bytes(plan, "copy") == (8 + 6) * SHARD
    assert moved(plan, "read") == moved(plan, "write") == 0


def test_zero3_with_parameters_on_the_cpu_brings_every_shard_once_per_gather() -> None:
    """Nothing kept and nothing reused: each weight is gathered for forward and for backward, 2 bytes each;
    the tied head gathers the embedding twice more (forward and backward of the head). Persistent parameters
    (up to 0 elements here) need nothing after the step; new weights stay on the CPU."""
    zero = {
        "stage": 3, "offload_optimizer": CPU, "offload_param": CPU, "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0,
    }  # fmt: skip
    plan = plan_of(zero)
    gathers = 2 * (2 * SHARD + 2 * 4096 * 1024 // 4)
    assert copied(plan, "h2d") == gathers + 2 * SHARD  # and the gradients that come back
    assert copied(plan, "d2h") == (2 + 4) * SHARD


def test_a_ratio_keeps_the_first_sub_groups_on_the_gpu() -> None:
    """Sub-groups of one parameter each; half of them step on the GPU, so their gradients go to the host and
    back in bf16 but not on in fp32, and their weights need no copy."""
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}, "sub_group_size": 1}
    plan = plan_of(zero)
    updated = sum(
        op.work.numel for op in plan.ops if isinstance(op.work, HostWork) and op.work.kind == "optimizer"
    )
    assert 0 < updated < SHARD
    assert copied(plan, "d2h") == 2 * SHARD + 4 * updated
    assert copied(plan, "h2d") == 2 * SHARD + 2 * updated
    assert cpu_bytes(plan, "optimizer") == 28 * updated


@pytest.mark.parametrize(("ratio", "is_idle"), [(1, False), (0.5, True), (0.2, True), (0, False)])
def test_a_ratio_of_one_sub_group_is_said_to_do_nothing(ratio: float, is_idle: bool) -> None:
    """One sub-group of 10^9: int(0.5) and int(0.8) are 0, so the CPU steps all; int(1 - 0) is 1."""
    plan = plan_of({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": ratio}})
    updated = cpu_bytes(plan, "optimizer")
    assert updated == (0 if ratio == 0 else 28 * SHARD)
    assert any("offload_optimizer.ratio: no effect" in note for note in plan.notes) == is_idle


def test_a_ratio_that_moves_sub_groups_has_no_note() -> None:
    offload = {"device": "cpu", "ratio": 0.5}
    assert plan_of({"stage": 3, "offload_optimizer": offload, "sub_group_size": 1}).notes == ()


def test_the_report_says_what_the_plan_notes() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    strategy = {"config": {"bf16": {"enabled": True}, "zero_optimization": zero}}
    data: dict[str, Any] = {
        "model": MODEL,
        "cluster": "dgx-h100",
        "gpus": 4,
        "training": {"micro_batch_size": 1},
    }
    notes = simulate(Experiment(**data, strategy=strategy)).report.notes
    said = (
        "0.5 of 1 sub-group, rounded down, is none that the GPU steps; a smaller sub_group_size than 1,000,"
    )
    assert any(said in note for note in notes)


def test_the_gpus_part_of_a_ratio_is_updated_by_torchs_adamw() -> None:
    """DeepSpeed's backup optimizer makes a pass per operation, 84 bytes per element, and a cast of 6."""
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}, "sub_group_size": 1}
    plan = plan_of(zero)
    on_cpu = sum(
        op.work.numel for op in plan.ops if isinstance(op.work, HostWork) and op.work.kind == "optimizer"
    )
    moved_on_gpu = sum(
        kernel.hbm_bytes
        for op in plan.ops
        if isinstance(op.work, Kernels) and op.name.startswith("optimizer step")
        for kernel in op.work.kernels
    )
    assert moved_on_gpu == (84 + 6) * (SHARD - on_cpu)


@pytest.mark.parametrize("pipelined", [False, True])
def test_zero_infinity_reads_and_writes_states_and_gradients_once(pipelined: bool) -> None:
    """One sub-group: states are 3 x 4 bytes per element, padded to 1,024 bytes, read and written. Gradients
    of pieces of 1 MiB and more (262,144 elements) are written and read in fp32; of weights, shards of 1 MiB
    and more (524,288 elements in bf16) are written after the step.

    Pieces by shard: embedding 1,048,576; per block qkv 786,432, attention output 262,144, and two of
    1,048,576; everything else is below. In fp32 all five are on NVMe, in bf16 all but the attention output.
    """
    zero = {
        "stage": 3,
        "offload_optimizer": {
            **NVME, "pipeline_read": pipelined, "pipeline_write": pipelined, "buffer_count": 12,
        },
        "offload_param": {**NVME, "max_in_cpu": 0, "buffer_size": 2_000_000, "buffer_count": 10},
        "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0,
    }  # fmt: skip
    plan = plan_of(zero)
    states = -(-SHARD // 256) * 256
    blocks = 2 * (786_432 + 2 * 1_048_576)
    gradients = 1_048_576 + blocks + 2 * 262_144
    weights = 1_048_576 + blocks
    assert moved(plan, "write") == 12 * states + 4 * gradients + 2 * weights
    drives = [(op.phase, op.work) for op in plan.ops if isinstance(op.work, DriveIo)]
    reads = [(phase, work.bytes) for phase, work in drives if work.direction == "read"]
    of_step = sum(size for phase, size in reads if phase == "optimizer")
    assert of_step == 12 * states + 4 * gradients
    assert cpu_bytes(plan, "optimizer") == 28 * SHARD
    # every gather reads what is on NVMe: blocks twice; the embedding for itself and the head, each twice
    fetched = sum(size for phase, size in reads if phase != "optimizer")
    assert fetched == 2 * (2 * blocks + 4 * 1_048_576)


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2_without_accumulation_copy_each_gradient_once(stage: int) -> None:
    """fp32 gradients of the own slice to the host, bf16 weights back; the CPU scales (8: clipping is on from
    0.19), updates (28) and casts (6)."""
    plan = plan_of({"stage": stage, "offload_optimizer": CPU})
    assert copied(plan, "d2h") == 4 * SHARD
    assert copied(plan, "h2d") == 2 * SHARD
    assert cpu_bytes(plan, "optimizer") == 28 * SHARD
    assert cpu_bytes(plan, "copy") == (8 + 6) * SHARD


def test_zero_2_with_accumulation_makes_three_copies() -> None:
    """Three micro-batches: sums go to the host three times and come back twice, in bf16; then fp32 once."""
    plan = plan_of({"stage": 2, "offload_optimizer": CPU}, micro_batches=3)
    assert copied(plan, "d2h") == (3 * 2 + 4) * SHARD
    assert copied(plan, "h2d") == (2 * 2 + 2) * SHARD


@pytest.mark.parametrize("version", ["0.19.5", "0.19.8"])
def test_checkpoints_in_host_memory(version: str) -> None:
    """Two blocks keep 128 x 1024 bf16 inputs, 262,144 bytes each; from 0.19.6 the newest stays on the GPU."""
    model_copies = {"activation_checkpointing": {"cpu_checkpointing": True}}
    experiment = Experiment(
        model=MODEL, cluster="dgx-h100", gpus=4,
        training={"sequence_length": 128, "micro_batch_size": 1, "activation_checkpointing": "full"},
        strategy={
            "kind": "deepspeed", "version": version,
            "config": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, **model_copies},
        },
    )  # fmt: skip
    plan = make_plan(resolve(experiment))
    copies = 2 if version == "0.19.5" else 1
    assert copied(plan, "d2h") == copied(plan, "h2d") == copies * 262_144


def fsdp2_plan(micro_batches: int, implementation: str = "fused", **strategy: Any) -> Plan:
    experiment = Experiment(
        model=MODEL, cluster="dgx-h100", gpus=4,
        training={
            "sequence_length": 128, "gradient_accumulation_steps": micro_batches,
            "optimizer_implementation": implementation,
        },
        strategy={"kind": "fsdp2", "cpu_offload": True, "wrapping": "huggingface", **strategy},
    )  # fmt: skip
    return make_plan(resolve(experiment))


def test_fsdp2_brings_fp32_shards_for_each_gather_and_takes_fp32_gradients_back() -> None:
    """Blocks are gathered for forward and backward, the root (embeddings, last norm) once: 4 bytes each."""
    plan = fsdp2_plan(1)
    block, root = 12_596_224 // 4, (NUMEL - 2 * 12_596_224) // 4
    assert copied(plan, "h2d") == 4 * (2 * 2 * block + root)
    assert copied(plan, "d2h") == 4 * SHARD
    assert cpu_bytes(plan, "optimizer") == 28 * SHARD
    assert cpu_bytes(plan, "copy") == 0


@pytest.mark.parametrize("implementation", ["foreach", "for_loop"])
def test_fsdp2_on_the_cpu_passes_over_memory_as_often_as_the_optimizer_has_operations(
    implementation: str,
) -> None:
    """torch's fused AdamW moves 28 bytes a parameter, the others 84."""
    assert cpu_bytes(fsdp2_plan(1, implementation), "optimizer") == 84 * SHARD


def test_fsdp2_adds_later_gradients_on_the_cpu() -> None:
    """Two micro-batches, both reduced: the second one's gradients are added in host memory, 12 bytes each."""
    plan = fsdp2_plan(2)
    assert copied(plan, "d2h") == 2 * 4 * SHARD
    assert cpu_bytes(plan, "copy") == 12 * SHARD


PLACEMENTS: list[dict[str, Any]] = [
    {"stage": 1, "offload_optimizer": CPU},
    {"stage": 2, "offload_optimizer": CPU},
    {"stage": 3, "offload_optimizer": CPU},
    {"stage": 3, "offload_param": CPU},
    {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
    {"stage": 3, "offload_optimizer": {**CPU, "ratio": 0.4}, "offload_param": CPU, "sub_group_size": 10**6},
    {"stage": 3, "offload_optimizer": NVME, "offload_param": CPU, "sub_group_size": 10**6},
    {"stage": 3, "offload_optimizer": NVME, "offload_param": {**NVME, "max_in_cpu": 0, "buffer_count": 10},
     "stage3_max_reuse_distance": 0},
]  # fmt: skip


@pytest.mark.parametrize("zero", PLACEMENTS)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_nothing_is_left_in_any_buffer_after_a_step(zero: dict[str, Any], micro_batches: int) -> None:
    """Every change of memory on every device is undone by the end of the step."""
    plan = plan_of(
        {**zero, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
        if zero["stage"] == 3
        else zero,
        micro_batches=micro_batches,
        activation_checkpointing="full",
        config={"activation_checkpointing": {"cpu_checkpointing": True}},
    )
    left: dict[tuple[str, str], int] = {}
    for change in plan.memory:
        key = change.device, change.category
        left[key] = left.get(key, 0) + change.bytes
        assert left[key] >= 0 or change.category == "gradients", (key, change)
    assert {key: value for key, value in left.items() if value} == {}


def test_a_written_plan_names_every_kind_of_work_and_its_bytes() -> None:
    zero = {"stage": 3, "offload_optimizer": NVME, "offload_param": CPU}
    rows = plan_to_dict(plan_of(zero))["ops"]
    by_kind: dict[str, int] = {}
    for row in rows:
        by_kind[row["kind"]] = by_kind.get(row["kind"], 0) + row.get("bytes", 0)
    assert {"h2d", "d2h", "cpu", "nvme_read", "nvme_write"} <= set(by_kind)
    assert by_kind["cpu"] == (28 + 8 + 6) * SHARD
