"""ZeRO-3 of DeepSpeed before 0.6: a call for each parameter, and a host that waits for the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective, Plan
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment


def plans(gpus: int = 16, **training: Any) -> tuple[Plan, Plan]:
    """(0.6 and later, before) of GPT-2 with a threshold that keeps its biases and norms gathered."""
    settings = {"sequence_length": 128, "precision": "fp16", **training}
    experiment = Experiment(
        model="gpt2", cluster="dgx-2", gpus=gpus, training=settings, strategy={"stage": 3}
    )
    job = resolve(experiment)
    return make_plan(job), make_plan(early(job))


def early(job: Job) -> Job:
    assert isinstance(job.strategy, DeepSpeedConfig)
    return replace(job, strategy=replace(job.strategy, fetches_one_by_one=True))


def gathers(plan: Plan) -> list[Collective]:
    works = [op.work for op in plan.ops if isinstance(op.work, Collective)]
    return [work for work in works if work.kind == "all_gather"]


def test_every_parameter_is_gathered_by_itself() -> None:
    """As many bytes in more calls, none of them of two tensors: GPT-2's weights have 768 x (768, 2304, 3072),
    50,257 or 1,024 rows, its larger biases 3,072 and 2,304."""
    later, before = plans()
    assert len(gathers(before)) > len(gathers(later))
    sizes = {work.bytes // 2 for work in gathers(before)}
    rows = (768, 2304, 3072, 1024, 50_257)
    assert sizes <= {768 * count for count in rows} | {3072, 2304, 768}


def test_the_host_waits_for_every_stream_before_a_gather() -> None:
    """Of the kernel before on the compute stream, and of the gather before."""
    _, before = plans()
    number = {op.name: place for place, op in enumerate(before.ops)}
    slices = [op for op in before.ops if op.name.startswith("slice transformer")]
    fetched = [op for op in before.ops if op.name.startswith("all_gather") and op.phase != "optimizer"]
    assert len(slices) == len(fetched)  # what stays gathered is gathered anew with the update
    assert all(op.host_waits for op in slices)
    zeros = number["zeros for transformer.h.3.mlp.c_fc.weight"]
    waited = before.ops[number["slice transformer.h.3.mlp.c_fc.weight"]].host_waits
    assert {before.ops[op].stream for op in waited} >= {"compute", "fetch"}
    assert zeros < number["slice transformer.h.3.mlp.c_fc.weight"]


@pytest.mark.parametrize("gpus", [16, 64])
def test_slices_and_copies_grow_with_the_ranks(gpus: int) -> None:
    """A part for each rank, in Python and on the GPU."""
    _, before = plans(gpus)
    sliced = {op.events for op in before.ops if op.name.startswith("slice transformer")}
    copied = {op.launches for op in before.ops if op.name.startswith("copy parts of")}
    assert (sliced, copied) == ({gpus}, {gpus})


def test_gradients_are_scattered_one_by_one() -> None:
    """One call for each of GPT-2's 148 tensors, padded to the ranks."""
    later, before = plans()

    def scattered(plan: Plan) -> list[int]:
        works = [op.work for op in plan.ops if isinstance(op.work, Collective)]
        return [work.bytes for work in works if work.kind == "reduce_scatter"]

    assert len(scattered(before)) == 148
    assert sum(scattered(before)) == sum(scattered(later))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_memory_is_back_at_its_start_after_a_step(toys: Any, checkpointing: str) -> None:
    _, before = plans(activation_checkpointing=checkpointing, gradient_accumulation_steps=2)
    for category, levels in toys.host_levels(before).items():
        assert levels[-1] == levels[0], category
        assert min(levels) >= 0, category


def test_nothing_is_fetched_ahead() -> None:
    """Every gather is waited for before the product that needs it, and each block gathers its four weights
    anew in backward, as the trace is one step off.
    """
    _, before = plans(activation_checkpointing="full")
    names = [op.name for op in before.ops if op.name.startswith("all_gather") and op.phase != "optimizer"]
    weights = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    block = [f"all_gather transformer.h.7.{name}.weight" for name in weights]
    assert [name for name in names if "h.7." in name and "weight" in name] == [*block, *block, *block[::-1]]
    for name in block:
        gathers = [number for number, op in enumerate(before.ops) if op.name == name]
        for number in gathers:
            product = next(op for op in before.ops[number:] if op.stream == "compute" and op.host_waits)
            assert {before.ops[wait].stream for wait in product.host_waits} >= {"fetch"}


def test_without_contiguous_gradients_a_bucket_is_all_reduced() -> None:
    """`buffered_reduce_fallback`: GPT-2's 124,439,808 parameters in 16 bits, in place of the scatters."""
    training = {"sequence_length": 128, "micro_batch_size": 1, "precision": "fp16"}
    strategy = {"config": {"zero_optimization": {"stage": 3, "contiguous_gradients": False}}}
    experiment = Experiment(model="gpt2", cluster="dgx-2", gpus=16, training=training, strategy=strategy)
    works = [op.work for op in make_plan(early(resolve(experiment))).ops if isinstance(op.work, Collective)]
    assert not any(work.kind == "reduce_scatter" for work in works)
    sizes = [work.bytes for work in works if work.kind == "all_reduce" and work.dtype == "fp16"]
    assert sum(sizes) == 2 * 124_439_808
