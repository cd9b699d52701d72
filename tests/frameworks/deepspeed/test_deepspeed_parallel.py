"""DeepSpeed beside tensor and pipeline parallelism: the end of PipelineEngine's step, its messages and
buffers, ZeRO over the data-parallel ranks of a part of the model, AutoTP."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import zsim
from zsim.engine.simulate import simulate_job
from zsim.errors import NotSimulatedError
from zsim.plan.make import make_plan, stages_of
from zsim.plan.ops import Collective, Copy, Plan, PointToPoint, Program
from zsim.plan.workload.workload import make_workload
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve

HIDDEN, LENGTH, VOCABULARY = 256, 128, 2048
LLAMA = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}  # fmt: skip
TIED = {**LLAMA, "tie_word_embeddings": True}
MESSAGE = LENGTH * HIDDEN * 2  # bytes of an activation in bf16
FP16: dict[str, Any] = {"bf16": {"enabled": False}, "fp16": {"enabled": True}}


def job_of(
    stage: int,
    parallelism: dict[str, Any],
    *,
    gpus: int = 8,
    micro_batches: int = 4,
    model: Any = None,
    zero: Any = None,
    version: str = "0.19.8",
    cluster: str = "dgx-a100-80gb",
    **config: Any,
) -> Job:
    strategy = {
        "kind": "deepspeed", "version": version, "config_name": "ds.json",
        "config": {
            "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": micro_batches,
            "zero_optimization": {"stage": stage, **(zero or {})}, **config,
        },
    }  # fmt: skip
    return resolve(
        zsim.Experiment(
            model=model or LLAMA, cluster=cluster, gpus=gpus, parallelism=parallelism,
            strategy=strategy, training={"sequence_length": LENGTH},
        )
    )  # fmt: skip


def calls(program: Program, *groups: str) -> list[tuple[str, str, int]]:
    """(kind, group, bytes) of the collectives and messages of some groups (all if none is named)."""
    return [
        (op.work.kind, op.work.group, op.work.bytes)
        for op in program.ops
        if isinstance(op.work, Collective | PointToPoint) and (not groups or op.work.group in groups)
    ]


def end_of_step(program: Program) -> list[tuple[str, str]]:
    """(kind, group) of what follows the last backward."""
    last = max(number for number, op in enumerate(program.ops) if op.name.endswith("backward"))
    return [(op.work.kind, op.work.group) for op in program.ops[last:] if isinstance(op.work, Collective)]


def local_numels(job: Job) -> list[int]:
    return [stage.numel for stage in stages_of(job.model, job.parallelism)]


# ---- the end of PipelineEngine's step ----------------------------------------------------------------------

REDUCED, NORM = ("all_reduce", "data"), [("all_reduce", "data"), ("all_reduce", "model")]
TIED_SUM, LOSSES = ("all_reduce", "embedding"), ("broadcast", "pipeline")


@pytest.mark.parametrize(
    ("stage", "config", "expected"),
    [
        (0, FP16, [REDUCED, ("all_reduce", "model"), ("all_reduce", "model")]),
        (0, {}, [REDUCED, ("all_reduce", "model"), ("all_reduce", "model")]),
        (1, FP16, [REDUCED, *NORM, *NORM, ("all_gather", "data")]),
        (1, {}, [REDUCED, *NORM, *NORM, ("all_gather", "data")]),
        (
            1,
            {"data_types": {"grad_accum_dtype": "fp32"}},  # BF16_Optimizer: no overflow, norm of the model
            [REDUCED, ("all_reduce", "model"), ("all_gather", "data")],
        ),
        (0, {"bf16": {"enabled": False}}, [REDUCED, ("all_reduce", "model"), REDUCED]),
    ],
)
def test_the_step_ends_with_tied_weights_gradients_and_the_norm_over_the_model(
    stage: int, config: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    """ReduceTiedGrads, ReduceGrads, OptimizerStep (overflow, then norm), and `_aggregate_total_loss`: a mean
    over the data-parallel ranks of the last stage, broadcast to the others."""
    job = job_of(stage, {"pipeline": 2, "tensor": 2}, model=TIED, gradient_clipping=1.0, **config)
    first, last = make_plan(job).programs
    assert end_of_step(first) == [TIED_SUM, *expected, LOSSES]
    assert end_of_step(last) == [TIED_SUM, *expected, ("all_reduce", "data"), LOSSES]


def test_a_tied_weight_is_summed_whole_between_its_stages() -> None:
    job = job_of(1, {"pipeline": 4, "tensor": 2}, model=TIED, gpus=16)
    programs = make_plan(job).programs
    size = VOCABULARY // 2 * HIDDEN * 2
    found = [calls(program, "embedding") for program in programs]
    assert found == [[("all_reduce", "embedding", size)], [], [], [("all_reduce", "embedding", size)]]
    in_fp32 = job_of(1, {"pipeline": 2}, model=TIED, data_types={"grad_accum_dtype": "fp32"})
    assert calls(make_plan(in_fp32).programs[0], "embedding")[0][2] == VOCABULARY * HIDDEN * 4


def test_without_a_pipeline_of_several_replicas_nothing_is_averaged() -> None:
    """8 GPUs, 4 stages x 2 tensor-parallel ranks: the loss is handed on, nothing is reduced over data."""
    plan = make_plan(job_of(1, {"pipeline": 4, "tensor": 2}))
    assert {group for program in plan.programs for _, group, _ in calls(program)} == {
        "tensor", "model", "pipeline", "pipeline 0-1", "pipeline 1-2", "pipeline 2-3",
    }  # fmt: skip


def test_gradients_of_a_pipeline_are_reduced_in_buckets_of_elements() -> None:
    """ZeRO-1: reduce_ipg_grads before a bucket would overflow; ZeRO-0: tensors until they exceed 5e8."""
    zero = {"reduce_bucket_size": 1_000_000}
    job = job_of(1, {"pipeline": 2}, zero=zero)
    numel = local_numels(job)[0]
    reduced = [size for kind, _, size in calls(make_plan(job).programs[0], "data") if kind == "all_reduce"]
    buckets = [size for size in reduced if size > 4]
    assert sum(buckets) == 2 * numel
    assert len(buckets) > 1
    assert max(buckets) <= 2_000_000
    whole = calls(make_plan(job_of(0, {"pipeline": 2})).programs[0], "data")
    assert [size for kind, _, size in whole if kind == "all_reduce"] == [2 * numel]


# ---- bytes -------------------------------------------------------------------------------------------------


def data_bytes(plan: Plan, kind: str) -> list[int]:
    """Bytes over data-parallel ranks without scalars, of each program."""
    return [
        sum(size for found, _, size in calls(program, "data", "world") if found == kind and size > 8)
        for program in plan.programs
    ]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "parallelism", [{"tensor": 2}, {"tensor": 4}, {"pipeline": 2}, {"pipeline": 2, "tensor": 2}]
)
def test_data_parallel_bytes_are_those_of_the_local_parameters(
    stage: int, parallelism: dict[str, Any]
) -> None:
    """Stages 0 and 1 reduce 2 P, stages 2 and 3 in every micro-batch; 1 and 2 gather 2 P (padded to two
    elements per rank). P: parameters on the rank, whatever t and p."""
    if stage > 1 and "pipeline" in parallelism:
        return
    micro_batches = 3
    job = job_of(stage, parallelism, gpus=16, micro_batches=micro_batches)
    plan, numels = make_plan(job), local_numels(job)
    replicas = job.data_parallel_size
    if stage < 3:
        times = micro_batches if stage == 2 else 1
        assert data_bytes(plan, "all_reduce") == [2 * numel * times for numel in numels]
        gathered = [2 * -(-numel // (2 * replicas)) * 2 * replicas for numel in numels]
        assert data_bytes(plan, "all_gather") == (gathered if stage else [0] * len(numels))
    else:
        assert data_bytes(plan, "reduce_scatter") == [2 * numel * micro_batches for numel in numels]


def test_zero_3_fetches_the_shards_of_tensor_parallel_parts() -> None:
    """Twice a micro-batch (forward, backward), every layer in 1/t; parameters that all ranks have whole
    persist and are gathered once behind the step."""
    gathered = []
    for tensor in (1, 2, 4):
        job = job_of(3, {"tensor": tensor}, micro_batches=1, zero={"stage3_param_persistence_threshold": 0})
        gathered.append(data_bytes(make_plan(job), "all_gather")[0])
        norms = (2 * 4 + 1) * HIDDEN
        cut = job.model.numel - norms
        assert gathered[-1] <= 2 * 2 * (cut // tensor + norms)
    assert gathered[0] > gathered[1] > gathered[2]


@pytest.mark.parametrize(
    "zero",
    [
        {"zero_hpz_partition_size": 2},
        {"zero_quantized_weights": True},
        {"zero_hpz_partition_size": 2, "zero_quantized_weights": True},
    ],
)
def test_zero_plus_plus_is_among_data_parallel_ranks(zero: dict[str, Any]) -> None:
    """16 GPUs, tensor 2: hpZ's groups are neighbours among the data-parallel ranks, 2 apart."""
    plan = make_plan(job_of(3, {"tensor": 2}, gpus=16, zero=zero))
    if "zero_hpz_partition_size" in zero:
        assert plan.groups["hpz"].members.tolist()[:3] == [[0, 2], [1, 3], [4, 6]]
    assert {row for group in (plan.groups["data"],) for row in group.members[0].tolist()} == set(
        range(0, 16, 2)
    )


def test_mics_shards_among_data_parallel_ranks() -> None:
    plan = make_plan(job_of(3, {"tensor": 2}, gpus=16, version="0.19.2", zero={"mics_shard_size": 4}))
    assert plan.groups["shard"].members.tolist()[0] == [0, 2, 4, 6]
    assert plan.groups["replicate"].members.tolist()[0] == [0, 8]


# ---- messages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "activation", "gradient", "gathers"),
    [
        ({}, 4, 4, [2, 3, 1]),
        ({"pipe_partitioned": True, "grad_partitioned": False}, 4, 1, [1, 2, 1]),
        ({"pipe_partitioned": False, "grad_partitioned": False}, 1, 1, [0, 0, 0]),
    ],
)
def test_each_tensor_parallel_rank_sends_its_part(
    settings: dict[str, bool], activation: int, gradient: int, gathers: list[int]
) -> None:
    """Three stages: inputs are gathered by all but the first, outputs and gradients by all but the last;
    parts travel behind t + 7 numbers of their shape."""
    model = {**LLAMA, "num_hidden_layers": 6}
    degrees = {"pipeline": 3, "tensor": 4}
    job = job_of(1, degrees, gpus=24, micro_batches=1, model=model, pipeline=settings)
    plan = make_plan(job)
    middle = plan.programs[1]
    sizes = [size for _, _, size in calls(middle, "pipeline 0-1", "pipeline 1-2")]
    shape = 8 * (4 + 7)
    one, back = MESSAGE // activation, MESSAGE // gradient
    to_go, to_return = (
        ([shape, one] if activation > 1 else [one]),
        ([shape, back] if gradient > 1 else [back]),
    )
    assert sizes == [*to_go, *to_go, *to_return, *to_return]
    found = [
        sum(kind == "all_gather" and size == MESSAGE for kind, _, size in calls(program, "tensor"))
        for program in plan.programs
    ]
    assert found == gathers


def test_pipeline_buffers_are_held_as_long_as_deepspeed_holds_them() -> None:
    """The first of four stages keeps up to four outputs beside the activations, in quarters with four
    tensor-parallel ranks; everything is given back."""
    for tensor in (1, 4):
        plan = make_plan(job_of(1, {"pipeline": 4, "tensor": tensor}, gpus=4 * tensor, micro_batches=8))
        for rank, program in enumerate(plan.programs):
            held: Counter[str] = Counter()
            most: Counter[str] = Counter()
            for change in program.memory:
                held[change.owner] += change.bytes
                most[change.owner] = max(most[change.owner], held[change.owner])
            in_flight = min(4 - rank, 8)
            outputs, inputs = most[f"output of stage {rank}"], most[f"input of stage {rank}"]
            whole = MESSAGE if tensor > 1 else 0  # while one is restored for its backward
            assert outputs == (in_flight * MESSAGE // tensor + whole if rank < 3 else 0)
            if tensor == 1:
                assert inputs == (in_flight * MESSAGE if rank else 0)
            assert not any(size for owner, size in held.items() if "stage" in owner)
            received = [memory.bytes for memory in program.resident if memory.bytes == MESSAGE // tensor]
            assert len(received) == (1 if rank in (0, 3) else 2)


# ---- AutoTP ------------------------------------------------------------------------------------------------


def tensor_calls_per_layer(job: Job) -> Counter[str]:
    found: Counter[str] = Counter()
    for layers, sign in ((2, 1), (1, -1)):
        changed = {**LLAMA, "num_hidden_layers": layers}
        one = resolve(job.experiment.model_copy(update={"model": changed}))
        for op in make_plan(one).ops:
            if isinstance(op.work, Collective) and op.work.group == "tensor":
                found[f"{op.work.kind} {op.phase} {op.stream}"] += sign * op.work.bytes
    return +found


@pytest.mark.parametrize("overlaps", [False, True])
def test_autotp_reduces_two_outputs_and_five_gradients_per_layer(overlaps: bool) -> None:
    """LinearAllreduce in line; ColumnParallel once per Linear (q, k, v, gate, up), with tp_overlap_comm
    beneath the weight's product."""
    autotp = {"autotp_size": 4, "tp_overlap_comm": overlaps}
    job = job_of(1, {}, micro_batches=1, tensor_parallel=autotp)
    backward = "tensor" if overlaps else "compute"
    assert tensor_calls_per_layer(job) == {
        "all_reduce forward compute": 2 * MESSAGE, f"all_reduce backward {backward}": 5 * MESSAGE,
    }  # fmt: skip


def test_autotp_has_whole_embeddings_and_gathers_logits() -> None:
    job = job_of(1, {}, micro_batches=1, tensor_parallel={"autotp_size": 4})
    (model,) = stages_of(job.model, job.parallelism)
    assert model.before[0].numel == VOCABULARY * HIDDEN
    found = calls(make_plan(job).program, "tensor")
    assert ("all_gather", "tensor", LENGTH * VOCABULARY * 2) in found
    cut = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * 512
    assert model.numel == 4 * (cut // 4 + 2 * HIDDEN) + HIDDEN + VOCABULARY * HIDDEN * 5 // 4


def test_autotp_sums_the_gradients_of_norms_of_heads_in_every_micro_batch() -> None:
    """Qwen 3: register_replicated_grad_hooks, one all-reduce per parameter when autograd computes it."""
    qwen = {**LLAMA, "model_type": "qwen3", "head_dim": 32}
    plan = make_plan(job_of(1, {}, model=qwen, micro_batches=3, tensor_parallel={"autotp_size": 2}))
    norms = [size for _, _, size in calls(plan.program, "tensor") if size == 32 * 2]
    assert len(norms) == 2 * 4 * 3


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_autotp_shards_over_the_ranks_that_are_t_apart(stage: int) -> None:
    plan = make_plan(job_of(stage, {}, tensor_parallel={"autotp_size": 4}))
    assert plan.groups["data"].members.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert plan.groups["tensor"].members.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


# ---- offload -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "parallelism"), [(1, {"pipeline": 2}), (1, {"pipeline": 2, "tensor": 2}), (2, {"tensor": 2})]
)
def test_offloaded_optimizers_copy_the_local_part(stage: int, parallelism: dict[str, Any]) -> None:
    """fp32 gradients to the host, 2-byte weights back: 6 bytes per element of the rank's shard (two elements
    of alignment)."""
    zero = {"offload_optimizer": {"device": "cpu"}}
    job = job_of(stage, parallelism, gpus=8, micro_batches=1, zero=zero)
    for program, numel in zip(make_plan(job).programs, local_numels(job), strict=True):
        shard = numel / job.data_parallel_size
        copied = Counter[str]()
        for op in program.ops:
            if isinstance(op.work, Copy):
                copied[op.work.direction] += op.work.bytes
        assert copied["h2d"] == pytest.approx(2 * shard, abs=64)
        assert copied["d2h"] == pytest.approx(4 * shard, abs=64)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_offloaded_parameters_are_those_of_the_tensor_parallel_rank(device: str) -> None:
    zero = {
        "offload_param": {"device": device, "nvme_path": "/nvme"},
        "offload_optimizer": {"device": device, "nvme_path": "/nvme"},
    }
    held = []
    for tensor in (1, 2):
        job = job_of(3, {"tensor": tensor}, gpus=4 * tensor, zero=zero)
        program = make_plan(job).program
        held.append(sum(m.bytes for m in program.resident if m.category == "optimizer_states"))
        assert held[-1] == pytest.approx(12 * local_numels(job)[0] / 4, rel=0.05)
    assert held[1] < 0.6 * held[0]


# ---- activations, folding, refusals ------------------------------------------------------------------------


def test_megatron_deepspeed_keeps_korthikantis_activations() -> None:
    """arXiv 2205.05198, equation 2: s b h (10 + 24/t + 5 a s / (h t)) bytes per layer."""
    heads, tensor = 8, 4
    gpt = {
        "model_type": "gpt2", "n_embd": HIDDEN, "n_layer": 4, "n_head": heads, "n_positions": LENGTH,
        "vocab_size": VOCABULARY, "resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1,
    }  # fmt: skip
    job = job_of(1, {"tensor": tensor, "pipeline": 2}, model=gpt, **FP16)
    changed = job.experiment.training.model_copy(update={"attention": "math"})
    job = resolve(job.experiment.model_copy(update={"training": changed}))
    block = make_workload(stages_of(job.model, job.parallelism)[0], job.training).segments[1]
    saved = sum(call.work.saved_bytes for call in block.calls)
    assert saved / (LENGTH * HIDDEN) == 10 + 24 / tensor + 5 * heads * LENGTH / (HIDDEN * tensor)


@pytest.mark.parametrize(
    ("stage", "parallelism", "gpus", "config"),
    [
        (1, {"pipeline": 4, "tensor": 2}, 16, {}),
        (0, {"pipeline": 2, "tensor": 4}, 32, {}),
        (1, {"pipeline": 2}, 16, {"data_types": {"grad_accum_dtype": "fp32"}}),
        (3, {"tensor": 4}, 16, {}),
        (2, {}, 16, {"tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True}}),
        (1, {"pipeline": 2, "tensor": 2}, 16, {"zero": {"offload_optimizer": {"device": "cpu"}}}),
        (1, {"pipeline": 4, "tensor": 4}, 64, {}),
    ],
)
def test_folded_equals_unfolded(
    stage: int, parallelism: dict[str, Any], gpus: int, config: dict[str, Any]
) -> None:
    job = job_of(stage, parallelism, gpus=gpus, **config)
    folded, unfolded = (simulate_job(job, unfold=unfold) for unfold in (False, True))
    assert folded.trace.step_seconds == pytest.approx(unfolded.trace.step_seconds, rel=1e-9)


def test_a_pipeline_turns_overlap_comm_off_as_deepspeed_does() -> None:
    job = job_of(1, {"pipeline": 2}, zero={"overlap_comm": True})
    assert any("overlap_comm: DeepSpeed turns it off under a pipeline" in note for note in job.notes)
    plain = job_of(1, {"pipeline": 2})
    assert make_plan(job).programs == make_plan(plain).programs


@pytest.mark.parametrize(
    ("parallelism", "config", "message"),
    [
        (
            {"pipeline": 2, "tensor": 2},
            {"pipeline": {"pipe_partitioned": False}},
            "pipeline.grad_partitioned: found true without pipe_partitioned.*both true or both false",
        ),
        ({"tensor": 2, "async_tensor": True}, {}, "parallelism.async_tensor: Megatron-DeepSpeed.*false"),
        ({"pipeline": 8}, {}, "found 8 stages for 4 layers; expected at most 4"),
        (
            {"pipeline": 2},
            {"pipeline": {"activation_checkpoint_interval": 2}},
            "interval: zsim does not simulate one checkpoint around 2 layers yet; expected 1",
        ),
    ],
)
def test_what_deepspeed_does_not_run_is_refused(
    parallelism: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    with pytest.raises((zsim.InputError, NotSimulatedError), match=message):
        job_of(1, parallelism, **config)


@pytest.mark.parametrize("use_reentrant", [None, False])
def test_an_interval_of_one_checkpoints_every_layer(use_reentrant: bool | None) -> None:
    """`activation_checkpoint_interval`; PipelineEngine's checkpoints are reentrant unless told otherwise. It
    has no effect without a pipeline."""
    settings = {"activation_checkpoint_interval": 1, "use_reentrant": use_reentrant}
    training = job_of(1, {"pipeline": 2}, pipeline=settings).training
    assert training.activation_checkpointing == "full"
    is_reentrant = use_reentrant is None
    found = training.checkpoint_is_reentrant, training.checkpoint_stops_early
    assert found == (is_reentrant, not is_reentrant)
    assert job_of(1, {}, pipeline=settings).training.activation_checkpointing == "none"
