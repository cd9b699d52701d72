"""Efficiency against batch size as in section 4 of the ZeRO-Infinity paper (Rajbhandari et al. 2021, arXiv
2104.07857), the one-trillion-parameter run on 4 to 32 DGX-2 nodes, and what a simulation may cost.

The paper's model: without overlap, efficiency = ait bw / (ait bw + peak), where ait is FLOPs per byte moved:
parameters and gradients seq x bsz, optimizer states seq x bsz / 4, activation checkpoints 24 x hidden.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from zsim import Experiment
from zsim.cost.kernels.kernel import Kernel
from zsim.engine.simulate import simulate_job
from zsim.fabric.algorithms.rings import ring_usage
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.make import make_plan
from zsim.plan.ops import Copy, DriveIo, Group, HostWork, Plan
from zsim.plan.shared.host_side import READ, WRITE
from zsim.plan.stage import WORLD
from zsim.report.breakdown import step_breakdown
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve

HIDDEN, LAYERS, SEQUENCE, GPUS = 8192, 4, 1024, 16
PARAMETERS = 12 * HIDDEN**2 * LAYERS
BATCHES = (1, 4, 16)


def dgx2_job(**nvme: Any) -> Job:
    """One DGX-2 node whose launches and latencies cost nothing."""
    job = resolve(Experiment(model="gpt2", cluster="dgx-2", nodes=1))
    cluster = job.cluster
    assert cluster.nvme is not None
    drives = cluster.nvme.model_copy(update={"read_latency": 0.0, "write_latency": 0.0, **nvme})
    host = cluster.host.model_copy(update={"seconds_per_launch": 0.0, "overhead_factor": 1e-9})
    return replace(job, cluster=cluster.model_copy(update={"nvme": drives, "host": host}))


def layer(tokens: int, times: int) -> Kernel:
    """2 FLOPs per parameter and token, `times` over."""
    flops = 2.0 * 12 * HIDDEN**2 * tokens
    return Kernel("gemm", flops * times, 0.0, "fp16", (tokens, 12 * HIDDEN, HIDDEN), times)


def efficiency_of(job: Job, plan: Plan) -> tuple[float, float]:
    """Compute time over step time, and the FLOP/s that the kernels reach."""
    trace = simulate_job(job, plan=plan).trace
    compute = step_breakdown(trace).seconds["compute"]
    flops = sum(info.flops for _, info, _, _ in trace.rows())
    return compute / trace.step_seconds, flops / compute


def test_parameter_and_gradient_bandwidth() -> None:
    """16-bit weights come three times (forward, recomputation, backward), gradients go once: 8 bytes per
    parameter for 8 FLOPs per parameter and token, so ait is the tokens. Four GPUs share an uplink of 15.75 x
    0.8 = 12.6 GB/s: 3.15 GB/s each, both ways."""
    for batch in BATCHES:
        tokens, builder = batch * SEQUENCE, PlanBuilder([Group.regular("world", GPUS)])
        size = 2 * 12 * HIDDEN**2
        for times in (1, 1, 2):
            for _ in range(LAYERS):
                builder.copy("weights", Copy("h2d", size), stream=COMPUTE)
                builder.kernels("layer", [layer(tokens, times)])
                if times == 2:
                    builder.copy("gradients", Copy("d2h", size), stream=COMPUTE)
        found, peak = efficiency_of(dgx2_job(), builder.finish("test", GPUS, []))
        expected = tokens * 3.15e9 / (tokens * 3.15e9 + peak)
        assert found == pytest.approx(expected, rel=0.02), batch


def test_optimizer_state_bandwidth() -> None:
    """32 bytes per parameter in all, read and written by all ranks of the node over its drives at 28 GB/s,
    one after the other: ait is a quarter of the tokens."""
    for batch in BATCHES:
        tokens, builder = batch * SEQUENCE, PlanBuilder([Group.regular("world", GPUS)])
        for times in (1, 1, 2):
            for _ in range(LAYERS):
                builder.kernels("layer", [layer(tokens, times)])
        size = 16 * PARAMETERS
        builder.wait_stream(READ, COMPUTE)
        builder.add("read", READ, DriveIo("read", size, queue_depth=64))
        builder.wait_stream(WRITE, READ)
        builder.add("write", WRITE, DriveIo("write", size, queue_depth=64))
        job = dgx2_job(write_bandwidth=3.5e9)
        found, peak = efficiency_of(job, builder.finish("test", GPUS, []))
        bandwidth = tokens / 4 * 28e9 / GPUS
        assert found == pytest.approx(bandwidth / (bandwidth + peak), rel=0.02), batch


def test_activation_bandwidth() -> None:
    """2 bytes per layer, token and element of the hidden size out and in again, 8 x 12 x hidden^2 FLOPs per
    layer and token: ait = 24 x hidden, whatever the batch."""
    for batch in BATCHES:
        tokens, builder = batch * SEQUENCE, PlanBuilder([Group.regular("world", GPUS)])
        size = 2 * tokens * HIDDEN
        for times in (1, 3):
            for _ in range(LAYERS):
                direction = "d2h" if times == 1 else "h2d"
                builder.copy("checkpoint", Copy(direction, size), stream=COMPUTE)  # type: ignore[arg-type]
                builder.kernels("layer", [layer(tokens, times)])
        found, peak = efficiency_of(dgx2_job(), builder.finish("test", GPUS, []))
        expected = 24 * HIDDEN * 3.15e9 / (24 * HIDDEN * 3.15e9 + peak)
        assert found == pytest.approx(expected, rel=0.02), batch


def test_a_real_step_without_overlap_is_its_bytes_over_its_rates() -> None:
    """DeepSpeed's ZeRO-3 on one GPU, everything on the CPU, no stream of its own for anything: the step is
    compute, plus every copy at 12.6 GB/s, plus CPU-Adam at 70.4 GB/s, plus scaling and casting at 72.7."""
    model = {
        "model_type": "gpt2", "n_embd": 4096, "n_layer": 50, "n_head": 32, "n_positions": 1024,
        "vocab_size": 50257,
    }  # fmt: skip
    cpu = {"device": "cpu"}
    zero = {
        "stage": 3, "overlap_comm": False, "offload_param": cpu, "offload_optimizer": cpu,
        "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0,
    }  # fmt: skip
    experiment = Experiment(
        model=model, cluster="dgx-2", gpus=1,
        training={"sequence_length": 1024, "micro_batch_size": 4, "activation_checkpointing": "full"},
        strategy={"kind": "deepspeed", "config": {"fp16": {"enabled": True}, "zero_optimization": zero}},
    )  # fmt: skip
    job = resolve(experiment)
    plan = make_plan(job)
    trace = simulate_job(job, plan=plan).trace
    copies = sum(op.work.bytes for op in plan.ops if isinstance(op.work, Copy))
    works = [op.work for op in plan.ops if isinstance(op.work, HostWork)]
    steps, casts = (sum(w.bytes for w in works if w.kind == kind) for kind in ("optimizer", "copy"))
    compute = step_breakdown(trace).seconds["compute"]
    expected = compute + copies / 12.6e9 + steps / (256e9 * 0.275) + casts / (256e9 * 0.284)
    assert trace.step_seconds == pytest.approx(expected, rel=0.02)


def trillion(nodes: int, accumulation: int) -> Job:
    """128 layers of 25,600: 1.008T parameters, all states and weights on NVMe, checkpoints in host memory."""
    model = {
        "model_type": "gpt2", "n_embd": 25600, "n_layer": 128, "n_head": 160, "n_positions": 1024,
        "vocab_size": 50257,
    }  # fmt: skip
    nvme = {"device": "nvme", "nvme_path": "/nvme"}
    zero = {
        "stage": 3, "sub_group_size": 400_000_000 // nodes,
        "offload_optimizer": {**nvme, "pipeline_read": True, "pipeline_write": True, "buffer_count": 12},
        "offload_param": {**nvme, "max_in_cpu": 0, "buffer_count": 8, "buffer_size": 200_000_000},
    }  # fmt: skip
    config = {
        "fp16": {"enabled": True}, "zero_optimization": zero,
        "activation_checkpointing": {"cpu_checkpointing": True},
    }  # fmt: skip
    training = {
        "sequence_length": 1024, "micro_batch_size": 5, "gradient_accumulation_steps": accumulation,
        "activation_checkpointing": "full",
    }  # fmt: skip
    return resolve(
        Experiment(
            model=model,
            cluster="dgx-2",
            nodes=nodes,
            training=training,
            strategy={"kind": "deepspeed", "config": config},
        )
    )


def drive_stall(job: Job) -> tuple[float, float]:
    """Seconds of the step without what the allocator takes, and of them the offload stall."""
    outcome = simulate_job(job)
    assert outcome.allocation is not None
    stall = step_breakdown(outcome.trace).seconds["offload_stall"]
    return outcome.trace.step_seconds - outcome.allocation.extra_seconds, stall


def test_twice_the_nodes_halve_the_drives_stall_and_leave_the_compute() -> None:
    """The paper's reason for superlinear scaling: drives and links add up, the work per GPU stays."""
    (four, stall_of_four), (eight, stall_of_eight) = (drive_stall(trillion(nodes, 1)) for nodes in (4, 8))
    assert stall_of_four / stall_of_eight == pytest.approx(2.0, rel=0.15)
    assert four - stall_of_four == pytest.approx(eight - stall_of_eight, rel=0.01)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("ZSIM_SLOW"), reason="half a minute; set ZSIM_SLOW=1")
def test_a_trillion_parameters_scale_superlinearly_as_published() -> None:
    """43.9, 48.7, 46.3, 49.0 TFLOP/s per GPU on 4, 8, 16, 32 nodes (training_runs.csv,
    zero-infinity-slides-0007 to 0010): 4 to 8 nodes 1.109, 4 to 32 nodes 1.116, with a scatter of 5 % (16
    nodes are slower than 8). The batch is not published; with 25 sequences per GPU both come out within 5 %.
    """
    seconds = {nodes: drive_stall(trillion(nodes, 5))[0] for nodes in (4, 8, 32)}
    assert seconds[4] / seconds[8] == pytest.approx(48.7 / 43.9, rel=0.05)
    assert seconds[4] / seconds[32] == pytest.approx(49.0 / 43.9, rel=0.05)


def test_a_trillion_parameters_on_512_gpus_are_two_lanes() -> None:
    """A plan of some 30,000 ops, and not twice as many events for each lane, whatever the GPUs: 1.3 s of a
    busy core, a fifth more than with one lane. Two GPUs of a DGX-2 share a network card, and the ring of all
    ranks leaves a node from one of them: this one's PCIe link carries bytes that the other's does not, beside
    the copies to the host, so that links tell the two apart. What they share decides here, and both take as
    long: a copy has a quarter of its switch's uplink, which the ring leaves it on either link."""
    outcome = simulate_job(trillion(32, 1))
    assert outcome.classes.class_of_rank.tolist() == [0, 1] * 256
    assert len(outcome.plan.ops) < 40_000
    assert outcome.stats.events < 2 * 2 * len(outcome.plan.ops)
    usage = ring_usage(outcome.topology, outcome.topology.slots[outcome.plan.groups[WORLD].members])
    first = outcome.topology.classes["pcie_up"].first
    assert usage[first : first + 16].tolist() == [2 / 16, 0.0] * 8
    ends = outcome.trace.end_seconds.reshape(2, -1)
    np.testing.assert_array_equal(ends[0], ends[1])
