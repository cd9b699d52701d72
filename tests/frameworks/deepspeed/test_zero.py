"""DeepSpeed's stages: buckets, buffers, fetches, sub-groups, and where the host waits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import zsim
from tests.frameworks.deepspeed import zeropp_jobs
from zsim.plan.make import make_plan
from zsim.plan.memory.capacity import peak_bytes
from zsim.plan.memory.tensors import tensor_changes
from zsim.plan.ops import Collective, Plan
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve

MIB = 2**20


def job_of(zero: dict[str, Any], model: str = "gpt2-xl", gpus: int = 4, **training: Any) -> Job:
    config: dict[str, Any] = {"zero_optimization": zero, "fp16": {"enabled": True}}
    table = {"sequence_length": 1024, "micro_batch_size": 4, **training}
    return resolve(
        zsim.Experiment(model=model, cluster="dgx-2", gpus=gpus, training=table, strategy={"config": config})
    )


def plan_of(zero: dict[str, Any], model: str = "gpt2-xl", gpus: int = 4, **training: Any) -> Plan:
    return make_plan(job_of(zero, model, gpus, **training))


def collectives(plan: Plan, kind: str) -> list[Collective]:
    return [op.work for op in plan.ops if isinstance(op.work, Collective) and op.work.kind == kind]


def peak(**zero: Any) -> float:
    """Peak in MiB of stage 2 with contiguous gradients, overlap and buckets of 5e8, but for `zero`."""
    base = {"stage": 2, "contiguous_gradients": True, "overlap_comm": True, "reduce_bucket_size": 500_000_000}
    job = job_of({**base, **zero})
    return peak_bytes(job, make_plan(job)) / MIB


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"overlap_comm": False}, 20198 - 21152),
        ({"reduce_bucket_size": 100_000_000}, 19625 - 21152),
        ({"reduce_bucket_size": 10_000_000}, 19284 - 21152),
        ({"contiguous_gradients": False}, 19247 - 21152),
    ],
)
def test_bucket_buffers_cost_what_was_measured(change: dict[str, Any], expected: float) -> None:
    """DeepSpeed issue 1302: peaks of stage 2 in MiB, 21152 with two buffers of 5e8 fp16 elements (953.7 MiB
    each); the differences are the buffers alone, to 4 MiB."""
    assert peak(**change) - peak() == pytest.approx(expected, abs=4)


def of_release(version: str, offload: dict[str, str] | None = None, stage: int = 2) -> Plan:
    """GPT-2 XL on 4 GPUs."""
    table = {"sequence_length": 1024, "micro_batch_size": 4}
    zero = {"stage": stage} | ({"offload_optimizer": offload} if offload else {})
    config = {"zero_optimization": zero, "fp16": {"enabled": True}}
    job = resolve(
        zsim.Experiment(
            model="gpt2-xl",
            cluster="dgx-2",
            gpus=4,
            training=table,
            strategy={"config": config, "version": version},
        )
    )
    return make_plan(job)


@pytest.mark.parametrize(
    ("version", "lazy", "flattened"),
    [("0.13.1", 0, 0), ("0.13.2", 2, 0), ("0.18.6", 2, 0), ("0.18.7", 2, 580), ("0.19.8", 2, 580)],
)
def test_states_and_flat_parameters_are_made_as_the_release_makes_them(
    version: str, lazy: int, flattened: int
) -> None:
    """Adam's two states before the first step or in it; 580 parameters of GPT-2 XL, put together on the CPU
    or on the GPU. Masters are cast from a copy, and get a gradient of zeros that nothing keeps."""
    resident, shard = of_release(version).resident, 1_557_611_200 // 4
    assert sum(len(memory.lazy_tensors) for memory in resident) == lazy
    assert len(resident[0].leftovers) == flattened
    assert [size for memory in resident[1:] for size in memory.leftovers] == [2 * shard, 4 * shard]
    states = sum(memory.bytes for memory in resident if memory.category == "optimizer_states")
    assert states == 12 * shard


@pytest.mark.parametrize(("version", "copies"), [("0.18.2", 0), ("0.18.3", 1)])
def test_masters_that_leave_the_gpu_are_cast_there_since_0_18_3(version: str, copies: int) -> None:
    plan = of_release(version, {"device": "cpu"})
    left = [size for memory in plan.resident[1:] for size in memory.leftovers]
    assert left == [2 * 1_557_611_200 // 4] * copies


@pytest.mark.parametrize(
    ("version", "stage", "flags"),
    [("0.17.0", 1, 1), ("0.17.1", 1, 0), ("0.17.1", 2, 1), ("0.17.6", 1, 0), ("0.18.0", 1, 1)],
)
def test_stage_1_keeps_its_overflow_flag_to_itself_in_0_17(version: str, stage: int, flags: int) -> None:
    """DeepSpeed `has_overflow`: without partitioned gradients no reduction from #6976 to #7580. The host
    reads the flag all the same."""
    names = [op.name for op in of_release(version, stage=stage).ops]
    assert names.count("all_reduce overflow") == flags
    assert names.count("read overflow") == 1


def test_a_bucket_is_reduced_before_the_gradient_that_would_overflow_it() -> None:
    """GPT-2 XL has 1,557,611,200 elements; the embedding of 80,411,200 comes last. Every bucket of 5e8 is
    filled as far as whole gradients go, and all of them together are the model."""
    sizes = [work.bytes // 2 for work in collectives(plan_of({"stage": 2}), "all_reduce") if work.bytes > 4]
    assert sum(sizes) == 1_557_611_200
    assert all(size <= 500_000_000 for size in sizes)
    assert all(size > 500_000_000 - 80_411_200 for size in sizes[:-1])


def test_a_gradient_larger_than_the_bucket_is_reduced_alone() -> None:
    """The largest weights of GPT-2 XL are 1600 x 6400 = 10,240,000, twice a block, and the embedding. Of two
    of them more than a bucket belongs to one rank and the rest to the next, and they are cut there: rank 0
    ends at 389,402,800, 10,186,800 into block 9's last weight; of the other the first part is 10,205,600."""
    sizes = Counter(
        work.bytes // 2
        for work in collectives(plan_of({"stage": 2, "reduce_bucket_size": 10_000_000}), "all_reduce")
    )
    assert sizes[10_240_000] == 96 - 2
    assert sizes[10_186_800] == sizes[53_200] == sizes[10_205_600] == sizes[34_400] == 1
    assert sizes[80_411_200] == 1


def test_stages_1_and_2_end_with_one_gather_of_the_padded_parameters() -> None:
    """Flat groups are padded to 2 elements per rank: 1,557,611,200 is a multiple of 2 x 4."""
    for stage in (1, 2):
        assert [w.bytes for w in collectives(plan_of({"stage": stage}), "all_gather")] == [2 * 1_557_611_200]
    padded = plan_of({"stage": 1}, gpus=3)  # a multiple of 6 above it
    assert collectives(padded, "all_gather")[0].bytes == 2 * 1_557_611_202


def test_stage_3_gathers_module_by_module_and_keeps_small_parameters() -> None:
    """With nothing fetched ahead and nothing kept for reuse, every weight above 1e5 elements is gathered
    once forward and once backward, norms and biases only after the step, each by itself, and the host waits
    for the last (`_allgather_params_coalesced`; so do the recorded runs in traces/gloo/deepspeed3-*)."""
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    plan = plan_of(zero, "llama-3.2-1b", attention="math")
    gathers = collectives(plan, "all_gather")
    norms = 2 * 16 + 1
    fetches, persistent = gathers[:-norms], gathers[-norms:]
    assert [work.bytes for work in persistent] == [2 * 2048] * norms
    waited_for = plan.ops[-1].host_waits[0]
    assert plan.ops[waited_for].work == persistent[-1]
    weights_per_block, head_and_embedding = 7, 2
    assert len(fetches) == 2 * (16 * weights_per_block + head_and_embedding)


def test_stage_3_fetches_ahead_up_to_the_prefetch_bucket() -> None:
    """A budget of 5e7 elements gathers several of the small weights in one call, the last may overshoot."""
    zero = {"stage": 3, "stage3_max_reuse_distance": 0}
    few = plan_of({**zero, "stage3_prefetch_bucket_size": 0}, "llama-3.2-1b", attention="math")
    ahead = plan_of({**zero, "stage3_prefetch_bucket_size": 50_000_000}, "llama-3.2-1b", attention="math")
    assert len(collectives(ahead, "all_gather")) < len(collectives(few, "all_gather"))
    largest_weight = 2048 * 8192
    shared = [work.bytes // 2 for work in collectives(ahead, "all_gather")[1:-1]]
    embedding = 128256 * 2048
    assert max(size for size in shared if size < embedding) < 50_000_000 + largest_weight


def test_the_host_never_runs_more_than_three_fetches_ahead_of_the_gather_stream() -> None:
    """At most two fetch events may be outstanding when the next is waited for."""
    plan = plan_of({"stage": 3, "overlap_comm": True}, "llama-3.2-1b", attention="math")
    assert any(op.host_waits for op in plan.ops if op.phase == "forward")


def test_without_overlap_nothing_but_stage_3_gathers_leaves_the_compute_stream() -> None:
    for stage in (1, 2, 3):
        plan = plan_of({"stage": stage, "overlap_comm": False})
        others = {op.name.split()[0] for op in plan.ops if op.work is not None and op.stream != "compute"}
        assert others == ({"all_gather"} if stage == 3 else set())


@pytest.mark.parametrize("overlap", [True, False])
def test_a_module_waits_for_its_own_gathers_and_for_none_issued_ahead(overlap: bool) -> None:
    """Kernels of a product wait for the last gather of its weight, while later gathers are already issued."""
    plan = plan_of({"stage": 3, "overlap_comm": overlap, "stage3_prefetch_bucket_size": 1_000_000})
    gathers = {n: op.name for n, op in enumerate(plan.ops) if op.stream == "all_gather"}
    waited = {
        op.module: max(gathers.keys() & set(op.after))
        for op in plan.ops
        if op.phase == "forward" and op.stream == "compute" and gathers.keys() & set(op.after)
    }
    name = "transformer.h.20.attn.c_attn"
    first = next(n for n, op in enumerate(plan.ops) if op.module == name and op.stream == "compute")
    assert gathers[waited[name]].startswith(f"all_gather {name}.weight")
    assert any(waited[name] < number < first for number in gathers)


def test_the_step_runs_in_sub_groups() -> None:
    """1.56e9 / 4 ranks = 389e6 local elements in tiles of at least 1e8: 4."""
    plan = plan_of({"stage": 3, "sub_group_size": 100_000_000})
    names = [op.name for op in plan.ops if op.name.startswith("optimizer step")]
    assert len(names) == 4


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("overlap", [True, False])
def test_memory_returns_to_where_it_began(stage: int, steps: int, overlap: bool) -> None:
    """What a step allocates it frees, category by category."""
    plan = plan_of({"stage": stage, "overlap_comm": overlap}, gradient_accumulation_steps=steps)
    left: Counter[str] = Counter()
    for change in plan.memory:
        left[change.category] += change.bytes
    assert {category: count for category, count in left.items() if count} == {}


def test_one_gpu_needs_no_collective() -> None:
    for stage in (0, 1, 2, 3):
        plan = plan_of({"stage": stage}, gpus=1)
        assert not any(isinstance(op.work, Collective) for op in plan.ops)


def fetches(**zero: Any) -> int:
    """All-gathers of one step of Llama-3.2-1B with nothing ahead, nothing kept; without the last, which
    gather the 33 norms, which persist."""
    base = {"stage": 3, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    return len(collectives(plan_of({**base, **zero}, "llama-3.2-1b", attention="math"), "all_gather")) - 33


def test_a_granularity_threshold_fetches_blocks_whole() -> None:
    """A block has 60,821,504 elements in 9 modules with parameters, and is, with its attention and its MLP,
    12 modules: 5.07e6 each. At a threshold of 5.1e6 each of 16 blocks is one unit, gathered forward and
    backward, next to embedding and head; the model around them has more than 1e9 elements and is none."""
    assert fetches(stage3_module_granularity_threshold=5_100_000) == 2 * (16 + 2)
    assert fetches(stage3_module_granularity_threshold=0) == 2 * (16 * 7 + 2)


def test_a_leaf_module_is_released_behind_its_last_backward_though_it_begins_frozen() -> None:
    """The first block of GPT-2 XL, whose first norm has no backward: what a step gathers it frees
    (`make_plan` checks that)."""
    zero = {"stage": 3, "leaf_module": {"names": ["transformer.h.0"]}}
    frozen = ["transformer.wte", "transformer.wpe", "transformer.h.0.ln_1"]
    plan = plan_of(zero, frozen=frozen)
    assert sum(op.name == "release transformer.h.0" for op in plan.ops) == 2


def test_leaf_modules_named_by_their_end_are_fetched_whole() -> None:
    """`mlp` is three weights and one fetch then: 4 + 1 per block."""
    assert fetches(leaf_module={"name_suffixes": ["mlp"]}) == 2 * (16 * 5 + 2)


def test_sanity_checks_broadcast_before_every_reduction() -> None:
    """How many gradients there are, 8 bytes, then their numbers: GPT-2 XL has 580 parameters."""
    plan = plan_of({"stage": 3, "enable_sanity_checks": True})
    sizes = [work.bytes for work in collectives(plan, "broadcast")]
    assert sizes[::2] == [8] * len(collectives(plan, "reduce_scatter"))
    assert sum(sizes[1::2]) == 8 * 580
    assert not collectives(plan_of({"stage": 3}), "broadcast")


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        ("gpt2-xl", 48 * 12 * 1600 * 1600 + 50257 * 1600),
        ("llama-3.2-1b", 16 * (2 * 2048 * (2048 + 512) + 3 * 2048 * 8192) + 128256 * 2048),
    ],
)
def test_without_memory_efficient_linear_weights_stay_until_their_backward(model: str, weights: int) -> None:
    """Autograd then holds every gathered weight of a linear layer, 2 bytes per element: the blocks' (biases
    are persistent and norms no linear layers), also those of k, v and up, which share an input, and the tied
    head's."""
    zero = {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    held, lean = (
        job_of({**zero, "memory_efficient_linear": flag}, model, micro_batch_size=8) for flag in (False, True)
    )
    more = peak_bytes(held, make_plan(held)) - peak_bytes(lean, make_plan(lean))
    assert more == 2 * weights


def test_fetching_by_all_reduce_sends_the_same_tensors_where_they_are_several() -> None:
    """A parameter that is fetched alone is gathered all the same (`_all_gather_sequential`)."""
    plan = plan_of({"stage": 3, "stage3_use_all_reduce_for_fetch_params": True})
    kinds = [op.work.kind for op in plan.ops if isinstance(op.work, Collective) and op.stream == "all_gather"]
    usual = [op for op in plan_of({"stage": 3}).ops if op.stream == "all_gather" and "gather" in op.name]
    assert kinds == ["all_reduce" if " more" in op.name else "all_gather" for op in usual]
    reduced, alone = kinds.count("all_reduce"), kinds.count("all_gather")
    assert min(reduced, alone) > 50


def test_the_norm_of_stage_3_is_reduced_once_per_sub_group() -> None:
    """389e6 local elements in sub-groups of 1e8 are four; squares are summed in fp64."""
    plan = plan_of({"stage": 3, "sub_group_size": 100_000_000})
    assert [w.bytes for w in collectives(plan, "all_reduce") if w.dtype == "fp64"] == [8] * 4


def test_stage_1_reduces_in_the_order_of_registration() -> None:
    """Not as gradients come, last first: the first bucket of 3e8 elements has the embedding and the first
    block's attention and gate; its norms are registered behind the MLP."""
    zero = {"stage": 1, "reduce_bucket_size": 300_000_000}
    first = collectives(plan_of(zero, "llama-3.2-1b", attention="math"), "all_reduce")[0]
    embedding, attention = 128256 * 2048, 2 * 2048 * (2048 + 512)
    assert first.bytes == 2 * (embedding + attention + 2048 * 8192)


def test_no_norm_means_no_reduction_and_no_wait() -> None:
    config: dict[str, Any] = {
        "zero_optimization": {"stage": 1, "compute_grad_norm": False},
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "gradient_clipping": 0.0,
        "train_micro_batch_size_per_gpu": 1,
    }
    job = resolve(zsim.Experiment(model="gpt2", cluster="dgx-h100", gpus=8, strategy={"config": config}))
    names = [op.name for op in make_plan(job).ops if op.phase == "optimizer"]
    assert names == ["cast gradients", "optimizer step", "all_gather parameters"]


@pytest.mark.parametrize(
    ("stage", "version", "looks", "waits"),
    [
        (0, "0.19.8", 148, 148),
        (1, "0.10.3", 55, 55),
        (1, "0.13.3", 55, 0),
        (1, "0.19.8", 55, 0),
        (3, "0.19.8", 1, 0),
    ],
)
def test_the_host_waits_for_the_sum_of_every_gradient(
    stage: int, version: str, looks: int, waits: int
) -> None:
    """GPT-2 in fp16 on four GPUs has 148 gradients, of which 55 overlap with a middle rank's part: 4.4 blocks
    of 12, cut at both ends. Stage 3 looks at all at once (#5115 of 0.13.3)."""
    config = {
        "zero_optimization": {"stage": stage},
        "fp16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
    }
    strategy = {"config": config, "version": version}
    job = resolve(zsim.Experiment(model="gpt2", cluster="dgx-2", gpus=4, strategy=strategy))
    names = Counter(op.name for op in make_plan(job).ops)
    assert (names["look for infinities"], names["read sum of gradient"]) == (looks, waits)


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": 3},
        {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 10_000_000},
    ],
)
def test_gradients_are_memory_of_the_stream_that_computes_them(changes: dict[str, Any]) -> None:
    """Autograd makes them on the compute stream. The copy into the bucket or the reduction, which comes next,
    runs on another stream, whose blocks no kernel of backward could use again."""
    plan = plan_of({"contiguous_gradients": True, **changes})
    copies = {number for number, op in enumerate(plan.ops) if op.name.startswith("bucket transformer.h")}
    stream_of, streams = dict[int, str](), list[str]()
    for change in tensor_changes(plan.program):
        if change.bytes:
            stream_of[change.tensor] = change.stream
        elif change.until in copies or change.op - 1 in copies:  # what is read is freed
            streams.append(stream_of[change.tensor])
    assert len(streams) >= len(copies) > 48
    assert set(streams) == {"compute"}


@pytest.mark.parametrize(
    ("zero", "version", "expected"),
    [
        ({}, "0.19.8", "fetch"),
        ({"overlap_comm": False}, "0.19.8", "compute"),
        ({"zero_hpz_partition_size": 8}, "0.19.8", "fetch"),
        ({"zero_quantized_weights": True}, "0.19.8", "fetch"),
        ({"mics_shard_size": 8}, "0.19.2", "fetch"),
    ],
)
def test_gathered_parameters_are_memory_of_the_stream_for_fetches(
    zero: dict[str, Any], version: str, expected: str
) -> None:
    """`__all_gather_params_` calls `all_gather_coalesced`, which makes the outputs, inside `with
    stream(self.__allgather_stream)`: with `overlap_comm` off that is the default stream, whose blocks kernels
    use again. The collective itself, which comes next, runs on the process group's stream."""
    program = zeropp_jobs.plan_of(zero, version=version).program
    gathers = {
        number
        for number, op in enumerate(program.ops)
        if isinstance(op.work, Collective) and op.work.kind == "all_gather" and op.phase == "forward"
    }
    changes = [change for change in tensor_changes(program) if change.bytes]
    assert {change.stream for change in changes if change.op in gathers} == {expected}
    assert "all_gather" not in {change.stream for change in changes}
