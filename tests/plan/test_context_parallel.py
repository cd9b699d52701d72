"""Context parallelism: one rank's messages, collectives, kernels and activations, against the formulas."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import zsim
from zsim.engine.simulate import simulate_job
from zsim.errors import InputError
from zsim.plan.make import make_plan, stages_of
from zsim.plan.ops import Collective, Kernels, Plan, PointToPoint
from zsim.plan.workload.workload import ModuleCall, make_workload
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.model.spec import Attention

HEADS, GROUPS, HEAD_DIM, LAYERS, LENGTH, BATCH = 16, 8, 64, 4, 2048, 2
LLAMA = {
    "model_type": "llama", "hidden_size": HEADS * HEAD_DIM, "intermediate_size": 2816,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS,
    "vocab_size": 32000,
}  # fmt: skip
MEGATRON = ("p2p", "all-gather", "all-to-all", "a2a+p2p")
METHODS = [("megatron", method) for method in MEGATRON]
METHODS += [("fsdp2", "all-gather"), ("fsdp2", "p2p"), ("deepspeed", "all-to-all")]
METHODS += [(kind, "all-to-all") for kind in ("fsdp2", "fsdp1", "ddp")]


def job_of(
    kind: str, method: str | None, ranks: int, *, gpus: int = 16, degrees: dict[str, int] | None = None,
    model: dict[str, Any] = LLAMA, stage: int = 3, cluster: str = "dgx-a100-80gb", **training: Any,
) -> Job:  # fmt: skip
    strategy = {"kind": kind, **({"stage": stage} if kind == "deepspeed" else {})}
    parallelism = {"context": ranks, **(degrees or {}), **({"context_method": method} if method else {})}
    given = {"sequence_length": LENGTH, "micro_batch_size": BATCH, "attention": "flash", **training}
    experiment = zsim.Experiment(
        model=model, cluster=cluster, gpus=gpus, parallelism=parallelism, strategy=strategy,
        training=given,
    )  # fmt: skip
    return resolve(experiment)


def attention_of(job: Job) -> ModuleCall:
    """The core of attention of a rank's first layer."""
    (stage,) = stages_of(job.model, job.parallelism)
    calls = make_workload(stage, job.training).segments[1].calls
    return next(call for call in calls if isinstance(call.module.op_spec, Attention))


def sent(plan: Plan, phase: str) -> Counter[tuple[str, int]]:
    """(kind, bytes) of what a rank sends over context groups in a phase, a layer."""
    found: Counter[tuple[str, int]] = Counter()
    for op in plan.programs[0].ops:
        if op.phase != phase or not isinstance(op.work, Collective | PointToPoint):
            continue
        if not op.work.group.startswith("context"):
            continue
        if isinstance(op.work, PointToPoint):
            found.update((one.direction, one.bytes) for one in op.work.messages if one.direction == "send")
        else:
            found[op.work.kind, op.work.bytes] += 1
    return Counter({key: count // LAYERS for key, count in found.items()})


def volume(plan: Plan, phase: str, ranks: int) -> float:
    """Bytes that a rank sends a layer: (n - 1)/n of the tensor of a gather, scatter or all-to-all."""
    calls = sent(plan, phase)
    return sum(
        size * count * (1 if kind == "send" else 1 - 1 / ranks) for (kind, size), count in calls.items()
    )


@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (4, 1), (4, 2), (8, 1)])
def test_a_ring_sends_keys_and_values_to_the_next_rank(ranks: int, tensor: int) -> None:
    """PARALLELISM 5.1: c - 1 messages of 2 (s/c) b (g/t) d elements; backward 1, c - 2 twice as large, 1."""
    plan = make_plan(job_of("megatron", "p2p", ranks, degrees={"tensor": tensor}))
    size = 2 * (LENGTH // ranks) * BATCH * (GROUPS // tensor) * HEAD_DIM * 2
    assert sent(plan, "forward") == {("send", size): ranks - 1}
    assert sent(plan, "backward") == Counter({("send", size): 2, ("send", 2 * size): ranks - 2}) + Counter()
    assert volume(plan, "backward", ranks) == 2 * volume(plan, "forward", ranks)


@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (4, 2), (8, 1)])
def test_exchanged_heads_send_queries_keys_values_and_outputs(ranks: int, tensor: int) -> None:
    """(c - 1)/c [(n + 2 g) + n]/t (s/c) b d elements forward, the same backward."""
    plan = make_plan(job_of("megatron", "all-to-all", ranks, degrees={"tensor": tensor}))
    heads = 2 * HEADS + 2 * GROUPS
    expected = (1 - 1 / ranks) * heads / tensor * (LENGTH / ranks) * BATCH * HEAD_DIM * 2
    assert volume(plan, "forward", ranks) == pytest.approx(expected, rel=1e-12)
    assert volume(plan, "backward", ranks) == volume(plan, "forward", ranks)


def test_gathered_keys_and_values_are_gathered_again_in_backward() -> None:
    """Two all-gathers of all tokens' K, and V; two again, and two reduce-scatters."""
    plan = make_plan(job_of("megatron", "all-gather", 4))
    full = LENGTH * BATCH * GROUPS * HEAD_DIM * 2
    assert sent(plan, "forward") == {("all_gather", full): 2}
    assert sent(plan, "backward") == {("all_gather", full): 2, ("reduce_scatter", full): 2}


def test_rings_between_nodes_after_heads_within_them() -> None:
    """a2a+p2p on 2 nodes of 8: 8 ranks exchange heads, rings of 2 pass on K and V of 1/8 of the heads and 8
    times the tokens."""
    job = job_of("megatron", "a2a+p2p", 16)
    plan = make_plan(job)
    assert job.parallelism.context_inner == 8
    assert plan.groups["context heads"].members.tolist() == [list(range(8)), list(range(8, 16))]
    assert plan.groups["context ring"].members.tolist() == [[rank, rank + 8] for rank in range(8)]
    q, kv = (LENGTH // 16 * BATCH * heads * HEAD_DIM * 2 for heads in (HEADS, GROUPS))
    assert sent(plan, "forward") == {("all_to_all", q): 2, ("all_to_all", kv): 2, ("send", 2 * kv): 1}
    assert sent(plan, "backward") == {("all_to_all", q): 2, ("all_to_all", kv): 2, ("send", 2 * kv): 2}


def test_torch_gathers_once_and_passes_gradients_on_in_fp32() -> None:
    """PARALLELISM 5.2: one all-gather of K and V in one in each direction; dK and dV go c hops in fp32."""
    plan = make_plan(job_of("fsdp2", None, 4))
    rank = LENGTH // 4 * BATCH * 2 * GROUPS * HEAD_DIM
    assert sent(plan, "forward") == {("all_gather", 4 * rank * 2): 1}
    assert sent(plan, "backward") == {("all_gather", 4 * rank * 2): 1, ("all_to_all", rank * 4): 4}
    hops = make_plan(job_of("fsdp2", "p2p", 4))
    assert sent(hops, "forward") == {("all_to_all", rank * 2): 3}
    assert sent(hops, "backward") == {("all_to_all", rank * 2): 3, ("all_to_all", rank * 4): 4}


@pytest.mark.parametrize("kind", ["deepspeed", "fsdp1", "fsdp2", "ddp"])
def test_ulysses_gathers_positions_and_repeats_heads(kind: str) -> None:
    """With 16 ranks and 8 heads of K and V each head is sent twice; 8-byte positions in every layer."""
    plan = make_plan(job_of(kind, "all-to-all", 16))
    each = LENGTH // 16 * BATCH * 16 * HEAD_DIM * 2
    positions = LENGTH * BATCH * 8
    assert sent(plan, "forward") == {("all_gather", positions): 1, ("all_to_all", each): 4}
    assert sent(plan, "backward") == {("all_to_all", each): 4}
    assert {
        op.stream for op in plan.ops if isinstance(op.work, Collective) and op.work.group == "context"
    } == {"compute"}


def test_deepspeed_shards_over_all_ranks_and_reduces_in_fp32() -> None:
    """2 replicas of 8 ranks: parameters and gradients go over all 16; 3 sequences are computed one after the
    other."""
    job = job_of("deepspeed", None, 8, gradient_accumulation_steps=3, micro_batch_size=1)
    plan = make_plan(job)
    scatters = [
        op.work for op in plan.ops if isinstance(op.work, Collective) and op.work.kind == "reduce_scatter"
    ]
    assert {(work.group, work.dtype) for work in scatters} == {("world", "fp32")}
    assert plan.groups["world"].size == 16
    assert job.data_parallel_size == 2
    calls = [op for op in plan.ops if op.name.endswith("self_attn.core positions") and op.phase == "forward"]
    assert len([op for op in calls if isinstance(op.work, Collective)]) == 3 * LAYERS


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "ddp"])
def test_torchs_engines_share_gradients_over_all_ranks_beside_ulysses(kind: str) -> None:
    """4 replicas of 4 ranks: FSDP shards over all 16, as DDP reduces over them."""
    job = job_of(kind, "all-to-all", 4, lora={"rank": 8, "dtype": "bf16"})
    groups = {op.work.group for op in make_plan(job).ops if isinstance(op.work, Collective)}
    assert groups == {"context", "world" if kind == "ddp" else "shard"}
    assert (job.data_parallel_size, make_plan(job).groups[max(groups)].size) == (4, 16)


@pytest.mark.parametrize(
    ("kind", "method", "told"),
    [
        ("fsdp1", "p2p", "Ulysses has no 'p2p'; expected 'all-to-all'"),
        ("ddp", None, "expected strategy 'fsdp2'"),
    ],
)
def test_other_methods_are_refused_beside_ulysses(kind: str, method: str | None, told: str) -> None:
    with pytest.raises(InputError, match=told):
        job_of(kind, method, 4)


@pytest.mark.parametrize(("kind", "method"), METHODS)
@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_ranks_together_do_the_work_of_one(kind: str, method: str, ranks: int) -> None:
    """The FLOPs of attention of a rank are 1/c of a whole sequence's, in both directions."""
    if method == "all-to-all" and kind == "megatron" and ranks > GROUPS:
        pytest.skip("8 heads of K and V")
    shared, whole = job_of(kind, method, ranks), job_of(kind, None, 1)
    for direction in ("forward", "backward"):
        assert ranks * flops(shared, direction) == pytest.approx(flops(whole, direction), rel=1e-12)


def flops(job: Job, direction: str) -> float:
    issued = getattr(attention_of(job).work, direction)
    parts = [issued] if isinstance(issued, Kernels) else [part.work for part in issued]
    kernels = [kernel for part in parts if isinstance(part, Kernels) for kernel in part.kernels]
    return sum(kernel.flops for kernel in kernels)


def test_a_ring_computes_what_its_rank_sees() -> None:
    """Rank 2 of 4: its own 512 tokens; with two ranks before it the first half of their keys; with the one
    behind it the second half of its queries."""
    issued = attention_of(job_of("megatron", "p2p", 4)).work.forward
    assert not isinstance(issued, Kernels)
    parts = [part.work.kernels for part in issued if isinstance(part.work, Kernels)]
    kernels = [kernel for part in parts for kernel in part if kernel.kind == "attention_forward"]
    batch = BATCH * HEADS
    assert [kernel.shape for kernel in kernels] == [
        (batch, 512, 512, 64), (batch, 512, 256, 64), (batch, 512, 256, 64), (batch, 256, 512, 64),
    ]  # fmt: skip
    pairs = 512 * 512 / 2
    assert [kernel.flops for kernel in kernels] == [2 * batch * pairs * 128] * 4


def test_hops_run_beneath_attention() -> None:
    """A hop is issued before the attention of its step, which waits for the hop before; the last step has
    none."""
    issued = attention_of(job_of("megatron", "p2p", 4)).work.forward
    assert not isinstance(issued, Kernels)
    order = [
        part.name or f"wait for {part.follows}" for part in issued if part.stream == "compute" or part.name
    ]
    waits = "wait for context"
    assert order[1:] == [
        "hop 0", "step 0", waits, "hop 1", "step 1", waits, "hop 2", "step 2", waits, "step 3", "correction",
    ]  # fmt: skip


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("kind", ["megatron", "fsdp2"])
def test_every_layer_keeps_activations_of_its_tokens(kind: str, policy: str) -> None:
    """Two ranks keep half each of what one keeps."""
    kept = []
    for ranks in (1, 2, 4):
        job = job_of(kind, None, ranks, activation_checkpointing=policy)
        degrees = {"pipeline": 1} if ranks > 1 else {}
        assert job.parallelism.pipeline == degrees.get("pipeline", 1)
        (stage,) = stages_of(job.model, job.parallelism)
        segment = make_workload(stage, job.training).segments[1]
        saved = sum(call.work.saved_bytes for call in segment.calls)
        kept.append(segment.checkpoint_bytes if policy == "full" else saved)
    assert kept[1] == 2 * kept[2]
    if kind == "fsdp2":  # Megatron's model of one rank has no fused projections
        assert kept[0] == 2 * kept[1]


def test_a_ring_holds_keys_and_values_of_every_step() -> None:
    """Forward: c buffers of K and V; two whole outputs, two halves, and the merged one; as many
    log-sum-exps."""
    extra = attention_of(job_of("megatron", "p2p", 4)).work.tensors.forward
    tokens = LENGTH // 4 * BATCH
    kv, out, lse = tokens * 2 * GROUPS * HEAD_DIM * 2, tokens * HEADS * HEAD_DIM * 2, tokens * HEADS * 4
    assert Counter(extra) == Counter([*[kv] * 4, *[out, lse] * 3, out // 2, lse // 2, out])


def test_selective_recomputation_sends_keys_and_values_again() -> None:
    plan = make_plan(job_of("megatron", "p2p", 4, activation_checkpointing="selective"))
    assert sent(plan, "recompute") == sent(plan, "forward")


def test_one_rank_is_no_context_parallelism() -> None:
    alone, absent = job_of("fsdp2", None, 1), job_of("fsdp2", None, 1, degrees={})
    assert stages_of(alone.model, alone.parallelism)[0] is alone.model
    assert make_plan(alone).ops == make_plan(absent).ops


@pytest.mark.parametrize(
    ("kind", "ranks", "degrees", "gpus"),
    [
        ("megatron", 2, {"tensor": 4, "pipeline": 4}, 64),
        ("fsdp2", 4, {"tensor": 2, "pipeline": 2}, 32),
        ("megatron", 3, {}, 24),
        ("fsdp2", 2, {"tensor": 2}, 8),
    ],
)
def test_folded_equals_unfolded_with_other_parallelisms(
    kind: str, ranks: int, degrees: dict[str, int], gpus: int
) -> None:
    job = job_of(
        kind, None, ranks, gpus=gpus, degrees=degrees, sequence_length=6144, gradient_accumulation_steps=4
    )
    folded, unfolded = simulate_job(job), simulate_job(job, unfold=True)
    assert folded.trace.step_seconds == pytest.approx(unfolded.trace.step_seconds, rel=1e-9)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_of_zero_shares_sequences(stage: int) -> None:
    job = job_of("deepspeed", None, 4, stage=stage)
    assert sent(make_plan(job), "forward")["all_to_all", LENGTH // 4 * BATCH * GROUPS * HEAD_DIM * 2] == 2


def test_fp8_products_sum_over_a_ranks_tokens() -> None:
    with pytest.raises(
        InputError, match=r"64 divides .16 on each of 4 ranks.*nearest sequence_length is 2,048"
    ):
        job_of(
            "megatron", None, 4, cluster="dgx-h100", precision="fp8", sequence_length=2040, micro_batch_size=1
        )


@pytest.mark.parametrize(
    ("kind", "method", "degrees"),
    [
        (kind, method, degrees)
        for kind, method in METHODS
        for degrees in ({}, {"tensor": 2}, {"pipeline": 2})
        if not degrees or kind in ("megatron", "fsdp2")
    ],
)
def test_folded_equals_unfolded(kind: str, method: str, degrees: dict[str, int]) -> None:
    job = job_of(kind, method, 4, degrees=degrees, gradient_accumulation_steps=2)
    folded, unfolded = simulate_job(job), simulate_job(job, unfold=True)
    assert folded.trace.step_seconds == pytest.approx(unfolded.trace.step_seconds, rel=1e-9)


def test_a_million_tokens() -> None:
    """2^20 tokens of one sequence on 64 ranks."""
    model = {**LLAMA, "max_position_embeddings": 2**20}
    job = job_of("megatron", None, 64, gpus=64, model=model, sequence_length=2**20, micro_batch_size=1)
    assert attention_of(job).work.saved_bytes == 2**14 * ((HEADS + 2 * GROUPS) * HEAD_DIM * 2 + HEADS * 4)
    assert simulate_job(job).trace.step_seconds > 0


@pytest.mark.parametrize(
    ("kind", "method", "ranks", "told"),
    [
        ("deepspeed", "all-to-all", 12, "16 heads of 'model'; the nearest that do are 8"),
        ("megatron", "all-to-all", 16, "8 key/value heads of .*; the nearest that do are 8"),
        ("megatron", "all-to-all", 3, "16 heads of 'model'; the nearest that do are 2"),
    ],
)
def test_heads_that_the_ranks_cannot_exchange_are_refused(
    kind: str, method: str, ranks: int, told: str
) -> None:
    with pytest.raises(InputError, match=told):
        job_of(kind, method, ranks, gpus=48, sequence_length=48 * 1024)


def test_written_out_attention_is_refused() -> None:
    with pytest.raises(InputError, match="expected 'flash'"):
        job_of("megatron", None, 2, attention="math")


MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 512}


def test_windows_are_refused_where_the_framework_refuses_them() -> None:
    with pytest.raises(InputError, match="expected 'all-gather' or 'all-to-all'"):
        job_of("megatron", "p2p", 2, model=MISTRAL)
    with pytest.raises(InputError, match=r"expected 'all-gather'$"):
        job_of("fsdp2", "p2p", 2, model=MISTRAL)
    with pytest.raises(InputError, match=r"blocks of 128 tokens.*nearest that it takes is 2,048"):
        job_of("fsdp2", None, 4, model=MISTRAL, sequence_length=2000)
    windowed, causal = job_of("megatron", "all-to-all", 2, model=MISTRAL), job_of("megatron", "all-to-all", 2)
    assert flops(windowed, "forward") < flops(causal, "forward")


def seen_pairs(ranks: int, rank: int, window: int) -> int:
    """Query-key pairs of a rank, counted token by token: its chunks i and 2c - 1 - i, a query and the window
    that ends with it."""
    chunk = LENGTH // (2 * ranks)
    starts = (rank * chunk, (2 * ranks - 1 - rank) * chunk)
    return sum(min(token + 1, window) for start in starts for token in range(start, start + chunk))


@pytest.mark.parametrize("kind", ["megatron", "fsdp2"])
@pytest.mark.parametrize("window", [100, 512, 1100, 1800])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_window_costs_what_the_fullest_rank_computes(kind: str, window: int, ranks: int) -> None:
    """The pairs of the rank that has most of them, the last; FLOPs count w s - w^2/2 for w s - w (w - 1)/2 of
    a whole window."""
    job = job_of(kind, "all-gather", ranks, model={**MISTRAL, "sliding_window": window})
    counted = [seen_pairs(ranks, rank, window) for rank in range(ranks)]
    assert counted.index(max(counted)) == ranks - 1 or max(counted) == counted[-1]
    each = 2 * BATCH * HEADS * 2 * HEAD_DIM
    assert flops(job, "forward") / each == pytest.approx(max(counted), abs=LENGTH / ranks / 2 + 1)
    assert flops(job, "backward") == pytest.approx(2.5 * flops(job, "forward"), rel=1e-12)


def kernel_shapes(job: Job, direction: str) -> list[tuple[int, ...]]:
    issued = getattr(attention_of(job).work, direction)
    parts = [part.work.kernels for part in issued if isinstance(part.work, Kernels)]
    return [kernel.shape for part in parts for kernel in part if kernel.kind.startswith("attention")]


def test_transformer_engine_slices_the_keys_of_a_window() -> None:
    """4 ranks, chunks of 256: the last rank has chunks 3 and 4, which end at 1,024 and 1,280. With 100 tokens
    each reads its own 256 keys and 99 before them; with 900 all 1,024, and 256 + 899; all keys are gathered
    whatever the window."""
    shapes = {}
    for window in (100, 900):
        job = job_of("megatron", "all-gather", 4, model={**MISTRAL, "sliding_window": window})
        shapes[window] = [shape[1:3] for shape in kernel_shapes(job, "forward")]
        assert kernel_shapes(job, "backward") == kernel_shapes(job, "forward")
        plan, whole = make_plan(job), make_plan(job_of("megatron", "all-gather", 4))
        assert sent(plan, "forward") == sent(whole, "forward")
        assert sent(plan, "backward") == sent(whole, "backward")
    assert shapes == {100: [(256, 355)] * 2, 900: [(256, 1024), (256, 1155)]}


def test_a_window_s_gradients_of_keys_are_as_long_as_its_keys() -> None:
    """dK and dV of both calls: 2 x 355 tokens for 4 x 512 + 256 of the middle rank without a window."""
    job = job_of("megatron", "all-gather", 4, model={**MISTRAL, "sliding_window": 100})
    token = BATCH * 2 * GROUPS * HEAD_DIM * 2
    assert attention_of(job).work.tensors.backward[-1] == 710 * token
    assert attention_of(job_of("megatron", "all-gather", 4)).work.tensors.backward[-1] == 2304 * token


def test_torch_gathers_for_flex_attention_and_keeps_what_it_gathered() -> None:
    """One kernel of the rank's 512 queries; a layer's K and V of all tokens are kept."""
    job = job_of("fsdp2", None, 4, model=MISTRAL)
    full = LENGTH * BATCH * GROUPS * HEAD_DIM * 2
    assert sent(make_plan(job), "forward") == {("all_gather", full): 2}
    assert sent(make_plan(job), "backward") == {("reduce_scatter", full): 2}
    assert [shape[1] for shape in kernel_shapes(job, "forward")] == [512]
    tokens = LENGTH // 4 * BATCH
    assert attention_of(job).work.saved_bytes == 2 * full + tokens * HEADS * (HEAD_DIM * 2 + 4)


def test_kernels_know_the_window_and_the_report_whose_rate_flex_attention_has() -> None:
    job = job_of("fsdp2", None, 4, model={**MISTRAL, "sliding_window": 300})
    issued: Any = attention_of(job).work.forward
    kernels = [kernel for part in issued if isinstance(part.work, Kernels) for kernel in part.work.kernels]
    assert [one.window for one in kernels if one.kind == "attention_forward"] == [300]
    (note,) = [one for one in job.notes if "FlexAttention" in one]
    assert "no curve was measured on a100-sxm-80gb" in note
    assert not [one for one in job_of("fsdp2", None, 4).notes if "FlexAttention" in one]
    assert not [one for one in job_of("megatron", "all-gather", 4, model=MISTRAL).notes if "Flex" in one]


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    long = {**MISTRAL, "sliding_window": LENGTH}
    for kind, method in (("fsdp2", "all-gather"), ("fsdp2", "p2p"), ("megatron", "all-gather")):
        windowed, causal = job_of(kind, method, 4, model=long), job_of(kind, method, 4)
        assert make_plan(windowed).ops == make_plan(causal).ops


@pytest.mark.parametrize("kind", ["megatron", "fsdp2"])
def test_folded_equals_unfolded_with_windows(kind: str) -> None:
    job = job_of(kind, "all-gather", 4, model=MISTRAL)
    folded, unfolded = simulate_job(job), simulate_job(job, unfold=True)
    assert folded.trace.step_seconds == pytest.approx(unfolded.trace.step_seconds, rel=1e-9)
