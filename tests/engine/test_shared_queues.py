"""CUDA_DEVICE_MAX_CONNECTIONS: launches of all streams in one line, on hand-made plans and on frameworks'."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zsim.api import Result, simulate
from zsim.cost.kernels.kernel import Kernel
from zsim.engine.simulate import simulate_job
from zsim.plan.builder import PlanBuilder
from zsim.plan.ops import Copy, Group, Memory
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

LONG = Kernel("copy", 0.0, 3e9)  # about a millisecond on an H100
SHORT = Kernel("copy", 0.0, 1e8)
BYTES = 10**9  # gathered in about 3 ms

Times = dict[str, tuple[float, float]]


def job_of(connections: int) -> Job:
    """Without interference, so that what runs beside a collective takes as long as ever."""
    job = resolve(Experiment(model="llama-2-7b", cluster="dgx-h100", gpus=8))
    gpu = job.cluster.gpu
    interference = gpu.interference.model_copy(update={"compute_slowdown": 1.0})
    cluster = job.cluster.model_copy(update={"gpu": gpu.model_copy(update={"interference": interference})})
    training = replace(job.training, device_max_connections=connections)
    return replace(job, cluster=cluster, training=training)


def builder() -> PlanBuilder:
    return PlanBuilder([Group.regular("world", 8), Group.regular("again", 8)])


def gather(b: PlanBuilder, name: str) -> int:
    return b.collective("all_gather", BYTES, "bf16", "world", stream="comm", name=name)


def run(b: PlanBuilder, connections: int, *, is_serial: bool = False) -> Times:
    plan = b.finish("test", 8, [Memory("parameters", 1)])
    trace = simulate_job(job_of(connections), plan=plan, is_serial=is_serial).trace
    rows = zip(trace.info_indices, trace.start_seconds, trace.end_seconds, strict=True)
    return {trace.infos[info].name: (float(start), float(end)) for info, start, end in rows}


def ahead_of_a_product() -> PlanBuilder:
    b = builder()
    gather(b, "gather")
    b.kernels("product", [LONG])
    return b


def test_in_one_queue_a_collective_launched_before_a_product_hides_beneath_it() -> None:
    """Megatron's reason for the setting: the launch leaves the queue at once and makes room."""
    one, eight = run(ahead_of_a_product(), 1), run(ahead_of_a_product(), 8)
    assert one == eight
    assert one["gather"][0] < one["product"][0] < one["product"][1] < one["gather"][1]


def behind_a_collective() -> PlanBuilder:
    """The second collective waits for the first on their stream, and the product for nothing."""
    b = builder()
    gather(b, "first")
    gather(b, "second")
    b.kernels("product", [SHORT])
    return b


def test_in_one_queue_a_collective_that_waits_for_its_stream_holds_up_what_is_behind_it() -> None:
    one, eight = run(behind_a_collective(), 1), run(behind_a_collective(), 8)
    assert one["product"][0] == one["second"][0] == one["first"][1]
    assert eight["product"][1] < eight["first"][1]


def behind_an_event() -> PlanBuilder:
    """The collective waits for a long product's event; a short one on a third stream for nothing."""
    b = builder()
    product = b.kernels("product", [LONG])
    b.stream_wait("comm", product)
    gather(b, "gather")
    b.kernels("beside", [SHORT], stream="side")
    return b


def test_in_one_queue_a_collective_that_waits_for_an_event_holds_up_what_is_behind_it() -> None:
    one, eight = run(behind_an_event(), 1), run(behind_an_event(), 8)
    assert one["beside"][0] == one["gather"][0] == one["product"][1]
    assert eight["beside"][1] < eight["product"][1]


def test_of_three_streams_in_two_queues_the_first_and_the_last_share_one() -> None:
    """So the third stream's kernel does not stand behind the collective of the second."""
    assert run(behind_an_event(), 2) == run(behind_an_event(), 8)


def test_the_queue_moves_on_in_order_once_its_head_has_left() -> None:
    """Three held launches of three streams start at the same instant, when the first collective ends."""
    b = behind_a_collective()
    b.kernels("beside", [SHORT], stream="side")
    b.collective("all_gather", BYTES, "bf16", "again", stream="other", name="other")
    times = run(b, 1)
    assert {times[name][0] for name in ("second", "product", "beside", "other")} == {times["first"][1]}


def test_copies_do_not_stand_in_the_kernels_queue() -> None:
    b = behind_a_collective()
    b.copy("copy", Copy("h2d", 10**6), stream="copies")
    times = run(b, 1)
    assert times["copy"][1] < times["product"][0]


def test_run_serially_a_product_waits_for_the_collective_before_it() -> None:
    times = run(ahead_of_a_product(), 8, is_serial=True)
    assert times["product"][0] == times["gather"][1]


ZERO_3 = {"kind": "deepspeed", "stage": 3}


def step(connections: int, strategy: dict[str, Any] = ZERO_3, nodes: int = 2) -> Result:
    training = {
        "micro_batch_size": 1, "sequence_length": 1024, "device_max_connections": connections,
    }  # fmt: skip
    return simulate(
        Experiment(
            model="llama-2-7b", cluster="dgx-a100-80gb", nodes=nodes, training=training, strategy=strategy
        )
    )


@pytest.mark.parametrize("strategy", [ZERO_3, {"kind": "fsdp2"}, {"kind": "fsdp1"}, {"kind": "ddp"}])
def test_one_queue_costs_sharded_data_parallelism_its_overlap_and_the_report_says_so(
    strategy: dict[str, Any],
) -> None:
    """More queues than streams change nothing; one makes the step no faster, and a note names both times."""
    one, eight, many = (step(count, strategy).report for count in (1, 8, 32))
    assert many.step_seconds == eight.step_seconds
    assert one.step_seconds >= eight.step_seconds
    (note,) = (note for note in one.notes if "CUDA_DEVICE_MAX_CONNECTIONS=1" in note)
    assert "one hardware queue" in note
    assert not any("CUDA_DEVICE_MAX_CONNECTIONS" in note for note in eight.notes)


@pytest.mark.parametrize(("strategy", "most"), [(ZERO_3, 0.85), ({"kind": "fsdp2"}, 0.4)])
def test_one_queue_hides_less(strategy: dict[str, Any], most: float) -> None:
    """FSDP2 loses nearly all of it (NVIDIA/Megatron-LM issue 1468 shows such a trace), ZeRO-3, whose gathers
    are launched before the products that they run beneath, what it hid of its reductions."""
    one, eight = step(1, strategy).report, step(8, strategy).report
    assert one.step_seconds > 1.03 * eight.step_seconds
    assert one.overlap_fraction is not None
    assert eight.overlap_fraction is not None
    assert one.overlap_fraction < most * eight.overlap_fraction


def test_time_behind_others_is_a_part_of_the_critical_path_as_what_those_waited_for() -> None:
    """The chain's parts add up to the step, none of it for no known reason."""
    report = step(1).report
    parts = report.critical_path_seconds
    assert parts is not None
    assert sum(parts.values()) == pytest.approx(report.step_seconds, rel=1e-9)
    assert "others" not in parts
