"""The reference engine's plan: order, volume and bytes of every stage (its own runs: traces/gloo)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.plan.steps import plan_step
from zsim.errors import InputError
from zsim.frameworks.reference.settings import ReferenceConfig
from zsim.plan.memory.tensors import bytes_before_update, plan_peaks
from zsim.plan.ops import Collective, Plan
from zsim.plan.workload.workload import make_workload
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

BLOCK, ROOT = 8 * 6, 10 * 3  # elements
NAMES = {BLOCK: "block", ROOT: "root"}


def plan(toys: Any, ranks: int = 2, training: Any = None, **changes: Any) -> Plan:
    """Three blocks of 48 elements, a root of 30."""
    strategy = replace(ReferenceConfig(stage=3, param_dtype="fp32", reduce_dtype="fp32"), **changes)
    model = toys.linear_blocks([(8, 6)] * 3, root=ROOT)
    training = training or toys.training()
    return plan_step(make_workload(model, training), strategy, ranks)


def order(made: Plan) -> str:
    short = {"all_gather": "G", "reduce_scatter": "S", "all_reduce": "R"}
    works = [op.work for op in made.ops if isinstance(op.work, Collective)]
    return " ".join(f"{short[work.kind]}{NAMES[work.bytes // 4][0]}" for work in works)


def test_every_stage_makes_its_calls_in_order(toys: Any) -> None:
    """r: root, b: block. Stage 3 keeps the root and the last block, and gathers one unit ahead."""
    assert order(plan(toys, stage=0)) == "Rb Rb Rb Rr"
    assert order(plan(toys, stage=1)) == "Sb Sb Sb Sr Gr Gb Gb Gb"
    assert order(plan(toys, stage=2)) == "Sb Sb Sb Sr Gr Gb Gb Gb"
    assert order(plan(toys, stage=3)) == "Gr Gb Gb Gb Gb Sb Gb Sb Sb Sr"


def test_without_gathering_ahead_a_unit_is_gathered_when_it_is_needed(toys: Any) -> None:
    """Backward then reduces the third block before it gathers the second."""
    assert order(plan(toys, prefetch=0)) == "Gr Gb Gb Gb Sb Gb Sb Gb Sb Sr"


def test_resharding_everything_gathers_everything_twice(toys: Any) -> None:
    """The paper's count, section 7.2.2: 2 for parameters, 1 for gradients."""
    made = plan(toys, keep_gathered=False)
    works = [op.work for op in made.ops if isinstance(op.work, Collective)]
    volume = sum(work.bytes for work in works)
    assert volume == 3 * 4 * (3 * BLOCK + ROOT)


def test_stage_1_reduces_after_the_last_micro_batch_and_stage_2_after_each(toys: Any) -> None:
    two = toys.training(gradient_accumulation_steps=2)
    assert order(plan(toys, training=two, stage=1)).count("S") == 4
    assert order(plan(toys, training=two, stage=2)).count("S") == 8


def test_a_bucket_joins_units(toys: Any) -> None:
    """Two blocks of 192 bytes fill a bucket of 300; the third goes with the root at the end."""
    made = plan(toys, stage=2, bucket_bytes=300)
    sizes = [op.work.bytes for op in made.ops if isinstance(op.work, Collective)]
    assert sizes[:2] == [4 * 2 * BLOCK, 4 * (BLOCK + ROOT)]


@pytest.mark.parametrize(
    ("stage", "dtype", "expected"),
    [
        # 174 elements on 4 ranks, padded to 176: 4 shards of 44. fp32 parameters are their own masters.
        (0, "fp32", {"parameters": 4 * 176, "gradients": 4 * 176, "optimizer_states": 8 * 176}),
        (1, "fp32", {"parameters": 4 * 176, "gradients": 4 * 176, "optimizer_states": 8 * 44}),
        (2, "fp32", {"parameters": 4 * 176, "gradients": 4 * 44, "optimizer_states": 8 * 44}),
        (3, "fp32", {"parameters": 4 * 44, "gradients": 4 * 44, "optimizer_states": 8 * 44}),
        (3, "bf16", {"parameters": 2 * 44, "gradients": 4 * 44, "optimizer_states": 12 * 44}),
    ],
)
def test_states_are_the_papers(toys: Any, stage: int, dtype: str, expected: dict[str, int]) -> None:
    """The root's 30 elements are padded to 32, the blocks' 48 divide."""
    adamw = toys.training(optimizer="adamw")
    held = bytes_before_update(plan(toys, 4, adamw, stage=stage, param_dtype=dtype))
    assert {category: held[category] for category in expected} == expected


def test_memory_comes_back_to_its_start(toys: Any) -> None:
    """Also with buckets, accumulation and an all-to-all's second buffer."""
    two = toys.training(gradient_accumulation_steps=2)
    for stage in (0, 1, 2, 3):
        for bucket in (0, 300):
            made = plan(toys, training=two, stage=stage, bucket_bytes=bucket, emulates_reduce_scatter=True)
            left: dict[str, int] = {}
            for change in made.memory:
                left[change.category] = left.get(change.category, 0) + change.bytes
            assert not any(left.values()), (stage, bucket, left)
            assert min(plan_peaks(made).values()) >= 0


def test_every_byte_is_given_back_by_its_owner(toys: Any) -> None:
    """Units by name, the root's two segments as one; a bucket's parts are freed when they are joined."""
    two = toys.training(gradient_accumulation_steps=2, optimizer="adamw")
    for stage in (0, 1, 2, 3):
        for bucket in (0, 300):
            made = plan(toys, training=two, stage=stage, bucket_bytes=bucket, reduce_dtype="bf16")
            left: dict[tuple[str, str], int] = {}
            for change in made.memory:
                key = (change.category, change.owner)
                left[key] = left.get(key, 0) + change.bytes
            assert not any(left.values()), (stage, bucket, left)


def test_joined_gradients_do_not_stay_beside_the_bucket(toys: Any) -> None:
    """Stage 2, all units in one bucket: what is left of the unit's own when it is reduced is nothing."""
    made = plan(toys, stage=2, bucket_bytes=10**6)
    reduced = next(number for number, op in enumerate(made.ops) if op.name.startswith("reduce_scatter"))
    held: dict[str, int] = {}
    for change in made.memory:
        if change.op <= reduced and change.category == "buffers":
            held[change.owner] = held.get(change.owner, 0) + change.bytes
    assert {owner for owner, size in held.items() if size} == {
        "blocks.2+blocks.1+blocks.0+root" if any("blocks.2" in name for name in held) else max(held, key=len)
    }


def test_one_rank_reduces_nothing(toys: Any) -> None:
    made = plan(toys, 1, stage=0)
    assert not any("all_reduce" in op.name for op in made.ops)


def test_an_update_needs_two_temporaries_and_fp32_gradients(toys: Any) -> None:
    """144 + 30 elements on one rank; the largest unit's, 48: 2 x 4 x 48, with 16-bit gradients 3 x 4 x 48."""
    adamw = toys.training(optimizer="adamw")
    for dtype, expected in (("fp32", 8 * BLOCK), ("bf16", 12 * BLOCK)):
        made = plan(toys, 1, adamw, stage=1, reduce_dtype=dtype)
        start = next(number for number, op in enumerate(made.ops) if op.phase == "optimizer")
        sizes = [c.bytes for c in made.memory if c.op >= start and c.category == "buffers"]
        assert max(sizes) == expected


def test_another_optimizer_and_fp8_are_refused() -> None:
    job: dict[str, Any] = {"model": "gpt2", "cluster": "dgx-h100", "gpus": 8}
    with pytest.raises(InputError, match=r"training\.optimizer: found 'sgd', expected 'adamw'"):
        resolve(Experiment(**job, training={"optimizer": "sgd"}, strategy={"kind": "reference"}))
    with pytest.raises(InputError, match="param_dtype"):
        Experiment(**job, strategy={"kind": "reference", "param_dtype": "fp8"})


def test_gloo_has_no_reduce_scatter_and_the_engine_brings_its_own() -> None:
    """An all-to-all and a sum send half of the all-reduce that gloo would run, and need a second buffer."""
    jobs = {
        cluster: resolve(
            Experiment(model="llama-3.2-1b", cluster=cluster, gpus=2, strategy={"kind": "reference"})
        )
        for cluster in ("cpu-gloo", "dgx-h100")
    }
    sums = {
        name: job.strategy.emulates_reduce_scatter
        for name, job in jobs.items()
        if isinstance(job.strategy, ReferenceConfig)
    }
    assert sums == {"cpu-gloo": True, "dgx-h100": False}
    assert jobs["cpu-gloo"].cluster.collectives.reduce_scatter == "native"
