"""Rates of drives and of the CPU's optimizer, against their formulas worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.cost.kernels.update import update_bytes
from zsim.cost.rates.offload import (
    blocks_in_flight,
    cast_bytes,
    drive_bytes_per_second,
    scale_bytes,
    stream_bytes_per_second,
    thread_share,
)
from zsim.specs.cluster.cluster import Nvme
from zsim.specs.cluster.files import load_cluster


def nvme_of(**values: float) -> Nvme:
    table = {
        "source": "made up for a test", "evidence": "assumed", "drives": 2, "capacity": "1 TB",
        "read_bandwidth": "2 GB/s", "write_bandwidth": "1 GB/s", "read_latency": "100 us",
    }  # fmt: skip
    return Nvme.model_validate(table).model_copy(update=values)


def test_one_block_at_a_time_waits_for_every_block() -> None:
    """2**20 / (1e-4 s + 2**20 / 2e9 s) = 1.6796 GB/s of 4."""
    assert stream_bytes_per_second(nvme_of(), "read", 2**20, 1, 1) == pytest.approx(1.679635e9, rel=1e-6)


def test_every_thread_has_a_queue_of_its_own() -> None:
    one = stream_bytes_per_second(nvme_of(), "read", 2**20, 1, 1)
    assert stream_bytes_per_second(nvme_of(), "read", 2**20, 1, 2) == pytest.approx(2 * one)


def test_deep_queues_reach_all_drives() -> None:
    assert stream_bytes_per_second(nvme_of(), "read", 2**20, 8, 1) == 4e9
    assert stream_bytes_per_second(nvme_of(), "write", 2**20, 8, 1) == 2e9


def test_efficiency_scales_the_data_sheet() -> None:
    assert drive_bytes_per_second(nvme_of(efficiency=0.75), "read") == 3e9


def test_a_write_cache_lasts_for_its_size() -> None:
    """2 drives with 10 GB of cache each, 1 GB/s in it and 0.25 beyond: 40 GB take 10 + 40 = 50 s."""
    nvme = nvme_of(write_cache=10_000_000_000, sustained_write_bandwidth=0.25e9)
    assert drive_bytes_per_second(nvme, "write", 20e9) == 2e9
    assert drive_bytes_per_second(nvme, "write", 40e9) == pytest.approx(40e9 / 50)


@given(st.integers(1, 256), st.integers(1, 16), st.sampled_from([2**17, 2**20, 2**23]))
def test_a_queue_never_holds_more_than_its_depth(depth: int, threads: int, block: int) -> None:
    """Little's law backwards: rate x time per block is at most the blocks in flight."""
    nvme = nvme_of()
    rate = stream_bytes_per_second(nvme, "read", block, depth, threads)
    in_flight = rate / block * (nvme.read_latency + block / nvme.read_bandwidth)
    assert in_flight <= blocks_in_flight(depth, threads) * (1 + 1e-9)
    assert rate <= 2 * nvme.read_bandwidth


def test_adam_moves_28_bytes_per_element() -> None:
    """Reads weight, gradient, two moments (16), writes weight and moments (12); scaling 8, cast to bf16 6. A
    pass per operation: 18 over states and 3 over gradients, 84."""
    assert update_bytes(1000) == 28_000
    assert update_bytes(1000, "sgd") == 12_000
    assert update_bytes(1000, "adamw", "foreach") == update_bytes(1000, "adamw", "for_loop") == 84_000
    assert scale_bytes(1000) == 8_000
    assert cast_bytes(1000, "fp32", "bf16") == 6_000


def test_the_dgx_2_cpu_step_lies_between_the_published_ones() -> None:
    """10.279e9 parameters at 28 bytes in 6.35 s (mb-00622): 45.3 GB/s of 256; 10e9 in 2.57 s (ZeRO-Offload's
    table 4): 109 GB/s. The file has the mean of their logarithms, 70 GB/s, and both as its spread."""
    cluster = load_cluster("dgx-2")
    slow, fast = (cluster.host.memory_bandwidth * end for end in cluster.offload.spread["optimizer_fraction"])
    assert update_bytes(10_279_047_168) / slow == pytest.approx(6.35, rel=0.005)
    assert update_bytes(10**10) / fast == pytest.approx(2.57, rel=0.005)
    rate = cluster.host.memory_bandwidth * cluster.offload.optimizer_fraction
    assert rate == pytest.approx((slow * fast) ** 0.5, rel=0.005)


def test_ranks_share_the_cores_or_have_their_own_threads() -> None:
    """Threads without a rate of their own have a core's share of the node's 256 x 0.275 GB/s; with 5 GB/s
    each, six reach 30 of these 70.4."""
    cluster = load_cluster("dgx-2")
    threads = {"threads_per_rank": 6, "thread_bandwidth": None}
    even = cluster.offload.model_copy(update=threads)
    own = cluster.offload.model_copy(update={**threads, "thread_bandwidth": 5e9})
    rate = 256e9 * 0.275
    assert thread_share(cluster.host, cluster.offload, 1, rate) == 1.0
    assert thread_share(cluster.host, even, 1, rate) == 0.125
    assert thread_share(cluster.host, even, 16, rate) == 1.0
    assert thread_share(cluster.host, own, 1, rate) == pytest.approx(30 / 70.4)
    assert thread_share(cluster.host, own, 16, rate) == 1.0
