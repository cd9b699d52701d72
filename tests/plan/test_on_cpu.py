"""On a CPU an operator runs in the thread that issues it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zsim
from zsim.plan.ops import Collective, Kernels

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
}


def result(strategy: dict[str, Any]) -> zsim.Result:
    return zsim.simulate(
        zsim.Experiment(
            model=LLAMA,
            cluster="cpu-gloo",
            gpus=2,
            training={"sequence_length": 128, "micro_batch_size": 8, "precision": "fp32"},
            strategy=strategy,
        )
    )


def test_nothing_overlaps_in_fsdp2_whose_calls_block() -> None:
    """torch 2.13 calls with async_op=False and leaves overlap to CUDA's streams, of which there are none."""
    made = result({"kind": "fsdp2", "wrapping": "torchtitan-0.1"})
    trace = made.trace.select_rank(0)
    order = np.argsort(trace.start_seconds, kind="stable")
    starts, ends = trace.start_seconds[order], trace.end_seconds[order]
    assert np.all(starts[1:] >= ends[:-1] - 1e-12)


@pytest.mark.parametrize("strategy", [{"kind": "ddp", "bucket_cap_mb": 2}, {"kind": "reference"}])
def test_what_is_asked_for_asynchronously_overlaps(strategy: dict[str, Any]) -> None:
    made = result(strategy)
    trace = made.trace.select_rank(0)
    busy = (trace.end_seconds - trace.start_seconds).sum()
    assert busy > made.report.step_seconds


def test_a_plan_on_gpus_waits_for_nothing_of_the_kind() -> None:
    on_cpu = zsim.make_plan(zsim.Experiment(model=LLAMA, cluster="cpu-gloo", gpus=2))
    on_gpu = zsim.make_plan(zsim.Experiment(model=LLAMA, cluster="dgx-h100", gpus=2))
    works = [op.work for op in on_cpu.ops]
    shared = [type(op.work) for op in on_cpu.ops if not op.name.startswith(("copy for", "slice of"))]
    assert shared == [type(op.work) for op in on_gpu.ops]
    assert any(isinstance(work, Collective) for work in works)
    blocking = [number for number, work in enumerate(works) if isinstance(work, Kernels | Collective)]
    followers = {wait for op in on_cpu.ops for wait in op.host_waits}
    assert set(blocking[:-1]) <= followers
    assert not any(op.host_waits for op in on_gpu.ops)


def test_gloos_reduce_scatter_copies_before_and_after() -> None:
    """The whole tensor and its slice, in the thread that calls; NCCL's, and the engine's own all-to-all, do
    not. Everything else stays where it was."""
    strategy = {"kind": "fsdp2", "wrapping": "torchtitan-0.1"}
    own, engine = (result(table).plan for table in (strategy, {"kind": "reference", "stage": 3}))
    assert not any(op.name.startswith(("copy for", "slice of")) for op in engine.ops)
    scatters = 0
    for number, op in enumerate(own.ops):
        if isinstance(op.work, Collective) and op.work.kind == "reduce_scatter":
            before, after = own.ops[number - 1].work, own.ops[number + 1].work
            assert isinstance(before, Kernels)
            assert isinstance(after, Kernels)
            assert [kernel.hbm_bytes for kernel in before.kernels] == [2 * op.work.bytes]
            assert [kernel.hbm_bytes for kernel in after.kernels] == [op.work.bytes]
            assert own.ops[number + 1].host_waits == (number,)
            scatters += 1
    assert scatters == 5
    held = peak = 0
    for change in own.memory:
        held += change.bytes
        peak = max(peak, held)
    assert held == 0
    assert peak > 0
