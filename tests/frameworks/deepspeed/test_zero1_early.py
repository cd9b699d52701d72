"""DeepSpeed's first stage 1: copies, calls and waits of 0.3.8 `runtime/zero/stage1.py`."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.errors import InputError
from zsim.plan.checks import check_plan
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective, Kernels, Plan
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve

N = 124_439_808  # GPT-2's parameters, which four ranks share equally
TENSORS = 148  # 12 blocks of 12, two embeddings, a norm's two
GPUS = 4


def job_of(
    *, steps: int = 1, early: bool = True, precision: str = "fp16", version: str = "0.10.3", **zero: Any
) -> Job:
    config = {precision: {"enabled": True}, "zero_optimization": {"stage": 1, **zero}}
    table = {"sequence_length": 256, "micro_batch_size": 1, "gradient_accumulation_steps": steps}
    strategy = {"kind": "deepspeed", "version": version, "config": config, "scatters_after_backward": early}
    cluster = "dgx-a100-40gb"
    experiment = zsim.Experiment(model="gpt2", cluster=cluster, gpus=GPUS, training=table, strategy=strategy)
    return resolve(experiment)


def plan_of(**changes: Any) -> Plan:
    return make_plan(job_of(**changes))


def calls(found: Plan, kind: str) -> list[int]:
    works = [op.work for op in found.ops if isinstance(op.work, Collective)]
    return [work.bytes for work in works if work.kind == kind and work.bytes > 8]


@pytest.mark.parametrize("steps", [1, 3])
def test_all_gradients_are_scattered_once_after_the_last_backward(steps: int) -> None:
    """2 bytes an element each way, in one interval of up to 5e8 elements. Nothing is all-reduced but the
    flag and the norm."""
    found = plan_of(steps=steps)
    assert calls(found, "reduce_scatter") == [2 * N]
    assert calls(found, "all_gather") == [2 * N]
    assert calls(found, "all_reduce") == []
    names = [op.name for op in found.ops]
    assert names.index("copy gradients into parts") < names.index("reduce_scatter")
    assert not [name for name in names[names.index("reduce_scatter") :] if name.startswith("h.")]
    check_plan(found)


def test_an_interval_less_is_taken_where_it_pads_less() -> None:
    """Three intervals of 5e7 pad 25,560,192 elements, two only N / 8 = 15,554,976, by which they become
    longer: 65,554,976, of which each of four ranks has 16,388,744.
    """
    found = plan_of(reduce_bucket_size=50_000_000)
    assert calls(found, "reduce_scatter") == [131_109_952] * 2
    assert calls(found, "all_gather") == [131_109_952] * 2
    assert sum(m.bytes for m in found.resident if m.category == "parameters") == 2 * 131_109_952
    check_plan(found)


def test_intervals_have_a_bucket_each_where_that_pads_less() -> None:
    """Three intervals of 42 million pad 1,560,192 elements, fewer than the 15,554,976 that two would be
    longer by.
    """
    found = plan_of(reduce_bucket_size=42_000_000)
    assert calls(found, "reduce_scatter") == calls(found, "all_gather") == [84_000_000] * 3


def test_the_host_waits_for_the_sum_and_the_norm_of_every_gradient() -> None:
    names = [op.name for op in plan_of().ops]
    assert names.count("read sum of gradient") == TENSORS
    assert names.count("read norm of gradient") == TENSORS
    later = [op.name for op in plan_of(early=False).ops]
    assert later.count("read norm of gradient") == 0


def test_it_copies_all_gradients_twice_where_stage_2_copies_none() -> None:
    """Into parts, and of each interval into the tensor that NCCL takes."""
    moved = {
        op.name: sum(kernel.hbm_bytes for kernel in op.work.kernels)
        for op in plan_of().ops
        if isinstance(op.work, Kernels)
    }
    assert moved["copy gradients into parts"] == moved["join parts"] == 4 * N
    assert moved["average own part"] == 4 * N // GPUS


@pytest.mark.parametrize("version", ["0.10.3", "0.19.8"])
def test_torch_copies_the_parts_out_of_every_gather(version: str) -> None:
    """Whatever the release whose other behaviour applies. The parts were cut before the first step."""
    names = [op.name for op in plan_of(version=version, reduce_bucket_size=50_000_000).ops]
    assert names.count("all_gather parameters") == names.count("copy parameters out") == 2
    assert "slice parameters" not in names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "bf16"}, "found true with bf16, of which DeepSpeed before 0.4 has no ZeRO"),
        ({"offload_optimizer": {"device": "cpu"}}, "found true with offload_optimizer"),
        ({"reduce_bucket_size": 3}, "reduce_bucket_size: found 3 with 4 data-parallel ranks"),
    ],
)
def test_what_it_had_not_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job_of(**changes)
