"""What shares a PCIe switch, host memory, cores or a drive slows each other; what does not, does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim import Experiment
from zsim.engine.simulate import Outcome, simulate_job
from zsim.plan.builder import PlanBuilder
from zsim.plan.ops import Collective, Copy, DriveIo, Group, HostWork, Plan
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.placement import Placement
from zsim.specs.experiment.resolve import resolve

GB = 10**9


def cluster_of(base: Cluster, **tables: dict[str, Any]) -> Cluster:
    """`base` with single numbers of its tables replaced."""
    changed = {name: getattr(base, name).model_copy(update=values) for name, values in tables.items()}
    return base.model_copy(update=changed)


def job_of(gpus: int, nodes: int = 1, **tables: dict[str, Any]) -> Job:
    """A job on DGX-2 nodes with round numbers: 10 GB/s per PCIe link and uplink, 4 GPUs per switch, host
    memory of 80 GB/s on one socket, a CPU optimizer of 20 GB/s, one drive (2 GB/s read, 1 written); no
    latencies."""
    job = resolve(Experiment(model="gpt2", cluster="dgx-2", gpus=16))
    defaults: dict[str, dict[str, Any]] = {
        "pcie": {"bandwidth": 10e9, "efficiency": 1.0, "latency": 0.0, "gpus_per_switch": 4},
        "host": {"memory_bandwidth": 100e9, "seconds_per_launch": 0.0, "overhead_factor": 1e-9,
                 "sockets": 1, "socket_bandwidth": None},
        "offload": {"dma_fraction": 0.8, "optimizer_fraction": 0.2, "copy_fraction": 0.5,
                    "pageable_bandwidth": 5e9, "threads_per_rank": None, "thread_bandwidth": None},
        "nvme": {"drives": 1, "read_bandwidth": 2e9, "write_bandwidth": 1e9, "read_latency": 0.0,
                 "write_latency": 0.0, "efficiency": 1.0},
    }  # fmt: skip
    merged = {name: {**values, **tables.get(name, {})} for name, values in defaults.items()}
    merged |= {name: values for name, values in tables.items() if name not in defaults}
    placement = Placement(nodes, tuple(range(nodes)), (gpus // nodes,) * nodes)
    return replace(job, cluster=cluster_of(job.cluster, **merged), placement=placement)


def plan_of(gpus: int, *works: Copy | HostWork | DriveIo | Collective) -> Plan:
    """Every rank starts all `works` at once, each on a stream of its own."""
    builder = PlanBuilder([Group.regular("world", gpus)])
    for number, work in enumerate(works):
        builder.add(f"work {number}", f"stream {number}", work, launches=0)
    return builder.finish("test", gpus, [])


def outcome_of(gpus: int, *works: Any, nodes: int = 1, unfold: bool = False, **tables: Any) -> Outcome:
    return simulate_job(job_of(gpus, nodes, **tables), plan=plan_of(gpus, *works), unfold=unfold)


def seconds_of(gpus: int, *works: Any, **options: Any) -> float:
    return outcome_of(gpus, *works, **options).trace.step_seconds


def test_two_gpus_behind_one_switch_take_twice_as_long_as_two_behind_two() -> None:
    """10 GB each over an uplink of 10 GB/s: 1 s alone, 2 s for two; with one GPU per switch 1 s for two."""
    copy = Copy("d2h", 10 * GB)
    assert seconds_of(1, copy) == pytest.approx(1.0)
    assert seconds_of(2, copy) == pytest.approx(2.0)
    assert seconds_of(2, copy, pcie={"gpus_per_switch": 1}) == pytest.approx(1.0)


def test_the_directions_of_pcie_do_not_disturb_each_other() -> None:
    assert seconds_of(1, Copy("d2h", 10 * GB), Copy("h2d", 10 * GB)) == pytest.approx(1.0)


def test_host_memory_bounds_all_copies_of_a_node_together() -> None:
    """16 GPUs with links of their own of 10 GB/s want 160 GB/s of memory that gives 80: 1 s becomes 2."""
    assert seconds_of(16, Copy("h2d", 10 * GB), pcie={"gpus_per_switch": 1}) == pytest.approx(2.0)


def test_a_copy_that_is_not_pinned_goes_at_the_drivers_pace() -> None:
    """10 GB at 5 GB/s: 2 s instead of 1."""
    assert seconds_of(1, Copy("h2d", 10 * GB, is_pinned=False)) == pytest.approx(2.0)


def test_two_ranks_on_one_drive_halve_each_other() -> None:
    """2 GB at 2 GB/s are 1 s for one rank and 2 s for two; on two nodes with a drive each, 1 s."""
    read = DriveIo("read", 2 * GB, queue_depth=32)
    assert seconds_of(1, read) == pytest.approx(1.0)
    assert seconds_of(2, read) == pytest.approx(2.0)
    assert seconds_of(2, read, nodes=2) == pytest.approx(1.0)


def test_striping_adds_drives_up() -> None:
    assert seconds_of(1, DriveIo("read", 8 * GB, queue_depth=64), nvme={"drives": 4}) == pytest.approx(1.0)


def test_reading_and_writing_share_a_drives_time_unless_it_does_both_at_once() -> None:
    """2 GB read and 1 GB written take 1 s each alone and 2 s together; with full overlap 1 s."""
    works = DriveIo("read", 2 * GB, queue_depth=64), DriveIo("write", 1 * GB, queue_depth=64)
    assert seconds_of(1, *works) == pytest.approx(2.0)
    assert seconds_of(1, *works, nvme={"mixed_overlap": 2.0}) == pytest.approx(1.0)


def test_a_short_queue_bounds_a_stream() -> None:
    """Little's law: one block of 1 MiB in flight, 0.5 ms for it to come and 1 ms to wait for it, is
    2**20 / (1e-3 + 2**20 / 2e9) = 0.688 GB/s of the drive's 2."""
    read = DriveIo("read", 2 * GB, queue_depth=1)
    expected = 2 * GB * (1e-3 + 2**20 / 2e9) / 2**20
    assert seconds_of(1, read, nvme={"read_latency": 1e-3}) == pytest.approx(expected + 1e-3, rel=1e-9)


def test_a_full_write_cache_leaves_the_sustained_rate() -> None:
    """4 GB into a cache of 1 GB: 1 s at 1 GB/s, the rest at 0.5 GB/s, 6 s: 7 s instead of 4."""
    cache = {"write_cache": GB, "sustained_write_bandwidth": 5e8}
    write = DriveIo("write", 4 * GB, queue_depth=64)
    assert seconds_of(1, write) == pytest.approx(4.0)
    assert seconds_of(1, write, nvme=cache) == pytest.approx(7.0)
    assert seconds_of(1, DriveIo("write", GB, queue_depth=64), nvme=cache) == pytest.approx(1.0)


def test_gpudirect_storage_needs_no_host_memory_and_the_link_instead() -> None:
    """40 GB/s of drives: through host memory of 16 GB/s 40 GB take 2.5 s; direct they take the link's 4 s,
    and with links of 100 GB/s the drives' 1 s."""
    fast: dict[str, Any] = {
        "nvme": {"drives": 20, "read_bandwidth": 2e9}, "host": {"memory_bandwidth": 20e9},
    }  # fmt: skip
    bounce, direct = (DriveIo("read", 40 * GB, queue_depth=999, is_direct=flag) for flag in (False, True))
    assert seconds_of(1, bounce, **fast) == pytest.approx(2.5)
    assert seconds_of(1, direct, **fast) == pytest.approx(4.0)
    assert seconds_of(1, direct, pcie={"bandwidth": 100e9}, **fast) == pytest.approx(1.0)


def test_drives_under_the_gpus_switches_share_their_uplinks() -> None:
    """One switch: 10 GB up from drives and 10 GB up from the GPU share 10 GB/s; drives at the host do not."""
    works = Copy("d2h", 10 * GB), DriveIo("read", 10 * GB, queue_depth=999)
    drives: dict[str, Any] = {"drives": 10, "read_bandwidth": 2e9}
    assert seconds_of(4, *works, nvme={**drives, "attached": "host"}) == pytest.approx(4.0)
    assert seconds_of(4, *works, nvme={**drives, "attached": "switch"}) == pytest.approx(8.0)


def test_the_cpus_of_a_node_are_shared_by_its_ranks() -> None:
    """10 GB of optimizer traffic at 20 GB/s: 0.5 s alone, 2 s for four ranks; 12 of 48 threads a quarter."""
    step = HostWork("optimizer", 10 * GB)
    assert seconds_of(1, step) == pytest.approx(0.5)
    assert seconds_of(4, step) == pytest.approx(2.0)
    assert seconds_of(1, step, offload={"threads_per_rank": 12}) == pytest.approx(2.0)


def test_threads_reach_what_one_reaches_as_often_as_there_are_up_to_the_nodes_rate() -> None:
    """A thread reaches 4 GB/s: one for 10 GB takes 2.5 s, three 10 / 12 s, and six no less than the node's 20
    GB/s let them. Four ranks of one thread move 40 GB at 16 GB/s."""
    step = HostWork("optimizer", 10 * GB)

    def seconds(ranks: int, threads: int) -> float:
        return seconds_of(ranks, step, offload={"threads_per_rank": threads, "thread_bandwidth": 4e9})

    assert seconds(1, 1) == pytest.approx(2.5)
    assert seconds(1, 3) == pytest.approx(10 / 12)
    assert seconds(1, 6) == pytest.approx(0.5)
    assert seconds(4, 1) == pytest.approx(2.5)


def test_a_thread_takes_as_long_for_an_element_of_two_bytes_as_for_one_of_four() -> None:
    """A billion elements are 28 GB in fp32 and 14 in bf16: a thread of 4 GB/s takes 7 s for either, all
    threads, bound by memory of 20 GB/s, half as long for the latter."""
    of_fp32, of_bf16 = (HostWork("optimizer", size * 10**9, 10**9) for size in (28, 14))
    thread = {"threads_per_rank": 1, "thread_bandwidth": 4e9}
    assert seconds_of(1, of_fp32, offload=thread) == pytest.approx(7.0)
    assert seconds_of(1, of_bf16, offload=thread) == pytest.approx(7.0)
    assert seconds_of(1, of_fp32) == pytest.approx(1.4)
    assert seconds_of(1, of_bf16) == pytest.approx(0.7)


def test_the_cpus_step_and_copies_share_host_memory() -> None:
    """Memory of 24 GB/s: a step at 20 GB/s and copies at 10 GB/s ask for 30. Fair shares are 14 and 10: the
    copy of 10 GB ends after 1 s, the step has 14 of its 20 GB done and ends 0.3 s later."""
    works = HostWork("optimizer", 20 * GB), Copy("h2d", 10 * GB)
    slow = {"host": {"memory_bandwidth": 30e9}, "offload": {"optimizer_fraction": 2 / 3}}
    assert seconds_of(1, *works, **slow) == pytest.approx(1.3)


def test_a_collective_across_nodes_and_a_copy_share_the_gpus_link() -> None:
    """The network's bytes pass the GPU's PCIe link, so each slows the other and neither is free."""
    gather, copy = Collective("all_gather", 40 * GB, "fp16", "world"), Copy("h2d", 20 * GB)
    alone = seconds_of(2, gather, nodes=2), seconds_of(2, copy, nodes=2)
    both = seconds_of(2, gather, copy, nodes=2)
    assert max(alone) < both <= sum(alone) + 1e-9


WORKS: dict[str, Callable[[int], Copy | HostWork | DriveIo]] = {
    "h2d": lambda size: Copy("h2d", size),
    "d2h": lambda size: Copy("d2h", size),
    "pageable": lambda size: Copy("d2h", size, is_pinned=False),
    "step": lambda size: HostWork("optimizer", size),
    "cast": lambda size: HostWork("copy", size),
    "read": lambda size: DriveIo("read", size),
    "write": lambda size: DriveIo("write", size),
    "direct": lambda size: DriveIo("read", size, is_direct=True),
}
SOME_WORK = st.lists(
    st.builds(lambda kind, size: WORKS[kind](size), st.sampled_from(sorted(WORKS)), st.integers(1, 5 * GB)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(works=SOME_WORK, attached=st.sampled_from(["host", "switch"]), gpus=st.sampled_from([1, 4, 8]))
def test_folded_equals_unfolded_and_nothing_is_oversubscribed(
    works: list[Any], attached: str, gpus: int
) -> None:
    """Ranks at symmetric places stand for each other; no resource is in use for more than the step."""
    options: dict[str, Any] = {"nvme": {"attached": attached}}
    folded = outcome_of(gpus, *works, **options)
    unfolded = outcome_of(gpus, *works, unfold=True, **options)
    assert folded.trace.step_seconds == pytest.approx(unfolded.trace.step_seconds, rel=1e-9)
    for row, other in zip(folded.devices, unfolded.devices, strict=True):
        assert row.utilisation_fraction <= 1 + 1e-9
        assert row.per_rank == pytest.approx(other.per_rank, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(works=SOME_WORK)
def test_nothing_ends_sooner_in_company_than_alone(works: list[Any]) -> None:
    """More work may end the rest sooner, where shares are fair on several resources: a copy that takes half
    of the uplink from another that is not pinned, and so moves its bytes through memory more than once,
    leaves memory to a third."""
    assert seconds_of(4, *works) >= max(seconds_of(4, work) for work in works) * (1 - 1e-9)


def test_a_copy_more_may_leave_memory_to_others() -> None:
    """40 bytes through memory at 50 GB/s take 0.8 ns; copies that want more than the 30 GB/s beside that slow
    them down, unless these copies slow one another down."""
    works = [WORKS["cast"](10), WORKS["h2d"](1), WORKS["pageable"](1)]
    assert seconds_of(4, *works) == pytest.approx(0.88e-9)
    assert seconds_of(4, *works, WORKS["d2h"](1)) == pytest.approx(0.8e-9)


@settings(max_examples=40, deadline=None)
@given(works=SOME_WORK)
def test_bytes_are_conserved_on_every_tier(works: list[Any]) -> None:
    """What a rank puts on its links and its share of the drives is what its work says, to the byte."""
    rows = {row.name: row.per_rank for row in outcome_of(4, *works).devices}
    for direction, link in (("h2d", "pcie_down"), ("d2h", "pcie_up")):
        copied = sum(work.bytes for work in works if isinstance(work, Copy) and work.direction == direction)
        if direction == "h2d":
            copied += sum(work.bytes for work in works if isinstance(work, DriveIo) and work.is_direct)
        assert rows.get(link, 0) == pytest.approx(copied, rel=1e-12)
    for direction in ("read", "write"):
        moved = sum(work.bytes for work in works if isinstance(work, DriveIo) and work.direction == direction)
        assert rows.get(f"drive_{direction}", 0) == pytest.approx(moved, rel=1e-12)


SIZES = st.integers(GB // 100, 50 * GB)
RATES = st.floats(1e9, 1e11)


@settings(max_examples=25, deadline=None)
@given(size=SIZES, rate=RATES, direction=st.sampled_from(["h2d", "d2h"]))
def test_sharing_a_switch_doubles_any_copy(size: int, rate: float, direction: Any) -> None:
    """Two GPUs behind one switch take twice as long as two behind two, whatever the size and the link."""
    links: dict[str, Any] = {"bandwidth": rate}
    copy, host = Copy(direction, size), {"memory_bandwidth": 1e13}
    apart = seconds_of(2, copy, pcie={**links, "gpus_per_switch": 1}, host=host)
    together = seconds_of(2, copy, pcie={**links, "gpus_per_switch": 2}, host=host)
    assert together == pytest.approx(2 * apart, rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(size=SIZES, rate=RATES, direction=st.sampled_from(["read", "write"]), gpus=st.sampled_from([2, 4, 8]))
def test_ranks_on_one_drive_divide_it(size: int, rate: float, direction: Any, gpus: int) -> None:
    """n ranks on one drive take n times as long as one."""
    io = DriveIo(direction, size, queue_depth=4096)
    options: dict[str, Any] = {
        "nvme": {"read_bandwidth": rate, "write_bandwidth": rate}, "host": {"memory_bandwidth": 1e13},
    }  # fmt: skip
    assert seconds_of(gpus, io, **options) == pytest.approx(gpus * seconds_of(1, io, **options), rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(
    size=SIZES,
    latency=st.floats(1e-6, 1e-2),
    depth=st.integers(1, 64),
    threads=st.integers(1, 8),
    gpus=st.sampled_from([1, 4]),
)
def test_no_ranks_queue_ever_exceeds_its_depth(
    size: int, latency: float, depth: int, threads: int, gpus: int
) -> None:
    """As simulated, with other ranks on the drives: blocks per second times the time of one block, latency
    and transfer, is what is in flight, and no more than depth x threads."""
    block = 2**20
    io = DriveIo("read", size, block, depth, threads)
    seconds = seconds_of(gpus, io, nvme={"read_latency": latency, "drives": 4}) - latency
    in_flight = size / seconds / block * (latency + block / 2e9)
    assert in_flight <= depth * threads * (1 + 1e-9)
