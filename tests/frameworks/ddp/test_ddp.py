"""DDP: torch's bucket rule, and when buckets are reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.expect import of_kind
from tests.plan.steps import plan_step
from zsim.frameworks.ddp.schedule import ddp_buckets
from zsim.frameworks.ddp.settings import DdpConfig
from zsim.plan.memory.tensors import plan_peaks
from zsim.plan.ops import Collective, Kernels, Plan
from zsim.plan.shared.optimizer import UPDATE
from zsim.plan.workload.workload import make_workload

MIB = 2**20
DEFAULT_CAPS = (MIB, 25 * MIB)
PlanFor = Callable[..., Plan]


def sizes(numels: list[int], first_cap: int, cap: int) -> list[int]:
    buckets = ddp_buckets([(numel, "fp32") for numel in numels], first_cap, cap)
    return [sum(numels[i] for i in bucket) for bucket in buckets]


def resnet50() -> list[int]:
    """Elements of torchvision's ResNet-50 parameters in registration order: 25,557,032 in 161 tensors."""
    numels = [64 * 3 * 49, 64, 64]
    channels = 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(count):
            out = 4 * width
            numels += [width * channels, width, width, 9 * width * width, width, width]
            numels += [out * width, out, out]
            if number == 0:
                numels += [out * channels, out, out]
            channels = out
    return [*numels, 1000 * 2048, 1000]


# -- the rule --------------------------------------------------------------------------------------------


def test_resnet50_has_the_buckets_of_its_recorded_run() -> None:
    """The bucket all-reduces of a DDP run in HTA's sample trace (elements)."""
    numels = resnet50()
    assert (sum(numels), len(numels)) == (25_557_032, 161)
    expected = [2_049_000, 7_875_584, 6_563_840, 6_637_568, 2_431_040]
    assert sizes(numels[::-1], *DEFAULT_CAPS) == expected


def test_ten_linears_have_the_buckets_of_gloos_flight_recorder() -> None:
    """10 x Linear(1024, 1024) with bias, gradients ready last layer first, bias before weight. Recorded with
    torch 2.13 on gloo: the first bucket closes beyond 1 MiB, the second beyond 25 MiB after seven layers."""
    numels = [1024, 1024 * 1024] * 10
    assert sizes(numels, *DEFAULT_CAPS) == [1_049_600, 7_347_200, 2_099_200]


def test_an_explicit_cap_holds_for_the_first_bucket_too() -> None:
    """`bucket_cap_mb=10`, same model, same source: three layers, 12 MB, pass 10 MiB."""
    numels = [1024, 1024 * 1024] * 10
    assert sizes(numels, 10 * MIB, 10 * MIB) == [3_148_800] * 3 + [1_049_600]


def test_a_bucket_of_exactly_its_cap_is_full() -> None:
    """1 MiB is 262,144 fp32 elements; one element less does not close the bucket."""
    assert sizes([262_144, 1], *DEFAULT_CAPS) == [262_144, 1]
    assert sizes([262_143, 1, 1], *DEFAULT_CAPS) == [262_144, 1]


def test_half_precision_gradients_fill_buckets_half_as_fast() -> None:
    gradients = [(262_144, "bf16"), (262_144, "bf16"), (1, "bf16")]
    assert ddp_buckets(gradients, *DEFAULT_CAPS) == [[0, 1], [2]]


def test_gradients_of_two_types_fill_buckets_of_their_own() -> None:
    """reducer.cpp keys buckets by type and device; each has the small first cap."""
    gradients = [(262_144, "bf16"), (262_144, "fp32"), (262_144, "bf16"), (1, "fp32"), (1, "bf16")]
    assert ddp_buckets(gradients, *DEFAULT_CAPS) == [[1], [0, 2], [3], [4]]


def test_no_parameters_have_no_buckets() -> None:
    assert ddp_buckets([], *DEFAULT_CAPS) == []


@given(st.lists(st.integers(1, 10**7), max_size=60), st.integers(1, 10**7), st.integers(1, 10**8))
def test_buckets_hold_every_gradient_once_and_all_but_the_last_are_full(
    numels: list[int], first_cap: int, cap: int
) -> None:
    buckets = ddp_buckets([(numel, "fp32") for numel in numels], first_cap, cap)
    assert [position for bucket in buckets for position in bucket] == list(range(len(numels)))
    for number, bucket in enumerate(buckets[:-1]):
        limit = cap if number else first_cap
        assert sum(numels[i] for i in bucket) * 4 >= limit
        assert sum(numels[i] for i in bucket[:-1]) * 4 < limit


# -- the plan --------------------------------------------------------------------------------------------


def toy_plan(toys: Any, strategy: DdpConfig | None = None, is_tied: bool = False, **training: Any) -> Plan:
    settings = toys.training(**training)
    workload = make_workload(toys.transformer(is_tied=is_tied), settings)
    return plan_step(workload, strategy or DdpConfig(), 8)


def names(plan: Plan, *beginnings: str) -> list[str]:
    return [op.name for op in plan.ops if op.name.startswith(beginnings)]


def test_gradients_are_reduced_once_in_fp32_whatever_the_precision(plan_for: PlanFor, toys: Any) -> None:
    """Llama-2-7B: 6,738,415,616 gradients of 4 bytes."""
    works = toys.collectives_of(plan_for(strategy={"kind": "ddp"}))
    assert {(work.kind, work.dtype, work.group) for work in works} == {("all_reduce", "fp32", "world")}
    assert sum(work.bytes for work in works) == 4 * 6_738_415_616


def test_a_bucket_is_reduced_as_soon_as_its_last_gradient_is_copied(toys: Any) -> None:
    """Caps of 16,000 bytes: the head's gradient (6400) and the norm's (128) with the last block's mlp.down
    (4096) and mlp.up (4096) are 14,720; attn.o makes it 15,744, and qkv (3072) fills it."""
    plan = toy_plan(toys, DdpConfig(bucket_cap_bytes=16_000, first_bucket_cap_bytes=16_000))
    order = names(plan, "copy to bucket", "all_reduce")
    first = order.index("all_reduce bucket 0")
    assert order[first - 1] == "copy to bucket model.layers.3.attn.qkv"
    assert toys.collectives_of(plan)[0].bytes == 4 * (1600 + 32 + 3072)


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_update_within_backward_leaves_no_gradient(toys: Any, is_tied: bool) -> None:
    """One update for each tensor, in backward, of the same elements. The most gradients at a time are those
    of the largest module, the embedding or the head with 1,600 elements of 4 bytes.
    """
    settings = toys.training(optimizer="adamw", gradient_clipping=0.0)
    workload = make_workload(toys.transformer(is_tied=is_tied), settings)
    plans = [plan_step(workload, DdpConfig(optimizer_in_backward=flag), 1) for flag in (False, True)]
    updates = [[op for op in plan.ops if op.name == UPDATE] for plan in plans]
    assert (len(updates[0]), len(updates[1])) == (1, len(list(workload.model.named_parameters())))
    assert {op.phase for op in updates[1]} == {"backward"}
    peaks = [plan_peaks(plan)["gradients"] for plan in plans]
    assert peaks == [4 * workload.numel, 4 * 1600]
    moved = [
        sum(kernel.hbm_bytes for op in ops for kernel in of_kind(op.work, Kernels).kernels) for ops in updates
    ]
    assert moved[0] == pytest.approx(moved[1])


def test_a_modules_bias_is_ready_before_its_weight(toys: Any) -> None:
    """Registration order backwards. Caps of 64 bytes close a bucket after each tensor: 16 and 256
    elements."""
    model = toys.linear_blocks([(16, 16)] * 2, bias=True)
    caps = DdpConfig(bucket_cap_bytes=64, first_bucket_cap_bytes=64)
    plan = plan_step(make_workload(model, toys.training()), caps, 8)
    assert [work.bytes // 4 for work in toys.collectives_of(plan)] == [16, 256, 16, 256]
    copies = [of_kind(op.work, Kernels) for op in plan.ops if op.name.startswith("copy to bucket")]
    assert [kernels.kernels[0].hbm_bytes for kernels in copies] == [2 * 4 * 16, 2 * 4 * 256] * 2


def test_reductions_run_behind_backward_and_are_waited_for_at_its_end(toys: Any) -> None:
    """Each all-reduce starts after the copy into its bucket; the copies back wait for one bucket each."""
    plan = toy_plan(toys, DdpConfig(bucket_cap_bytes=16_000, first_bucket_cap_bytes=16_000))
    number = {op.name: position for position, op in enumerate(plan.ops)}
    reduced = [name for name in number if name.startswith("all_reduce")]
    last_backward = number["model.emb backward"]
    for bucket, name in enumerate(reduced):
        op = plan.ops[number[name]]
        assert op.stream == "all_reduce"
        assert any(plan.ops[other].name.startswith("copy to bucket") for other in op.after)
        back = plan.ops[number[f"copy from bucket {bucket}"]]
        assert number[name] in back.after
        assert number[back.name] > last_backward
    assert number[reduced[0]] < last_backward


def test_without_sync_only_the_last_micro_batch_is_reduced(toys: Any) -> None:
    one = toy_plan(toys)
    three = toy_plan(toys, gradient_accumulation_steps=3)
    each = toy_plan(toys, DdpConfig(no_sync=False), gradient_accumulation_steps=3)
    count = len(toys.collectives_of(one))
    assert len(toys.collectives_of(three)) == count
    assert len(toys.collectives_of(each)) == 3 * count
    first_reduction = next(i for i, op in enumerate(three.ops) if isinstance(op.work, Collective))
    starts = [i for i, op in enumerate(three.ops) if op.name == "loss"]
    assert first_reduction > starts[2]


def test_model_states_are_sixteen_bytes_per_parameter(plan_for: PlanFor, toys: Any) -> None:
    """fp32 parameters, gradients and two moments; the buckets are another 4, as buffers. (Without autocast
    nothing is cast.)"""
    plan = plan_for(strategy={"kind": "ddp"}, training={"precision": "fp32"})
    peaks = toys.host_peaks(plan)
    states = peaks["parameters"] + peaks["gradients"] + peaks["optimizer_states"]
    assert states == 16 * 6_738_415_616
    assert peaks["buffers"] == 4 * 6_738_415_616


def test_bucket_views_spare_the_copy_of_the_gradients(plan_for: PlanFor, toys: Any) -> None:
    """`gradient_as_bucket_view`: the buckets are the gradients, and nothing is copied back."""
    plan = plan_for(strategy={"kind": "ddp", "gradient_as_bucket_view": True})
    assert toys.host_peaks(plan)["gradients"] == 4 * 6_738_415_616
    resident = {memory.category: memory.bytes for memory in plan.resident}
    assert resident["gradients"] == 4 * 6_738_415_616
    assert "buffers" not in resident
    assert not names(plan, "copy from bucket")


def test_a_rank_alone_has_no_buckets_to_view(plan_for: PlanFor, toys: Any) -> None:
    """On 1 rank nothing is reduced: gradients are autograd's own, view or not."""
    viewed, plain = (
        plan_for(nodes=None, gpus=1, strategy={"kind": "ddp", "gradient_as_bucket_view": is_view})
        for is_view in (True, False)
    )
    assert toys.host_peaks(viewed) == toys.host_peaks(plain)
    assert toys.host_peaks(viewed)["gradients"] == 4 * 6_738_415_616
    assert viewed.ops == plain.ops


def test_autocast_casts_each_linear_weight_once_per_forward(toys: Any) -> None:
    """4 linears in each of 4 blocks and the head; norm and embedding stay fp32."""
    assert len(names(toy_plan(toys), "cast ")) == 2 * 17  # weights in forward, gradients in backward
    assert not names(toy_plan(toys, precision="fp32"), "cast ")


def test_recomputation_casts_again_and_forward_piles_the_casts_up(toys: Any) -> None:
    """The cache keeps the casts of all blocks until the end of forward (4 x 3072 x 2 bytes), and each block's
    weights are cast again for its recomputation."""
    plan = toy_plan(toys, activation_checkpointing="full")
    casts = [op for op in plan.ops if op.name.startswith("cast model.layers") and "gradient" not in op.name]
    assert [op.phase for op in casts].count("forward") == 16
    assert [op.phase for op in casts].count("recompute") == 16
    levels = toys.host_levels(plan)["buffers"]
    buckets = 4 * (4 * 3072 + 2 * 1600 + 32)
    assert max(levels) >= buckets + 2 * 4 * 3072


def test_a_tied_weight_is_reduced_when_the_embedding_has_added_its_share(toys: Any) -> None:
    """The head uses it first in backward, the embedding last: one gradient, in the last bucket."""
    plan = toy_plan(toys, DdpConfig(bucket_cap_bytes=4_000, first_bucket_cap_bytes=4_000), is_tied=True)
    assert sum(work.bytes for work in toys.collectives_of(plan)) == 4 * (4 * 3072 + 1600 + 32)
    assert names(plan, "copy to bucket")[-1] == "copy to bucket model.emb"


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("no_sync", [False, True])
def test_memory_is_back_at_its_start_after_a_step(
    toys: Any, steps: int, checkpointing: str, is_view: bool, is_tied: bool, no_sync: bool
) -> None:
    strategy = DdpConfig(gradient_as_bucket_view=is_view, no_sync=no_sync)
    plan = toy_plan(
        toys, strategy, is_tied, gradient_accumulation_steps=steps, activation_checkpointing=checkpointing
    )
    for category, levels in toys.host_levels(plan).items():
        assert levels[-1] == levels[0], category
        assert min(levels) >= 0, category
