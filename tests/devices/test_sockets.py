"""Hosts of two sockets: what is local is as fast as before, what is not shares the links between them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.devices.test_offload_laws import GB, SOME_WORK, outcome_of, seconds_of
from zsim.errors import InputError
from zsim.plan.ops import Copy, DriveIo, HostWork
from zsim.specs.cluster.files import load_cluster

# 16 GPUs, 8 to a socket; memory of 2 x 50 GB/s, of which copies get 2 x 40; 8 GB/s between the sockets.
HOST = {"memory_bandwidth": 100e9, "sockets": 2, "socket_bandwidth": 8e9}


def of_two(*works: Any, gpus: int = 1, **options: Any) -> float:
    host = {**HOST, **options.pop("host", {})}
    return seconds_of(gpus, *works, host=host, **options)


def test_a_local_copy_does_not_notice_the_other_socket() -> None:
    assert of_two(Copy("h2d", 10 * GB)) == pytest.approx(1.0)


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_memory_on_the_first_socket_is_far_from_the_second_sockets_gpus(direction: Any) -> None:
    """16 GPUs copy 1 GB each: with a link of their own each 0.1 s of memory's 40 GB/s per socket take 0.2 s.
    All of it on the first socket: its memory gives 40 GB/s to all, 0.4 s; 8 GB cross at 8 GB/s, 1 s."""
    copy, own_link = Copy(direction, GB), {"gpus_per_switch": 1}
    assert of_two(copy, gpus=16, pcie=own_link) == pytest.approx(0.2)
    wide = {"socket_bandwidth": 1e12}
    first = {"placement": "first"}
    assert of_two(copy, gpus=16, pcie=own_link, offload=first, host=wide) == pytest.approx(0.4)
    assert of_two(copy, gpus=16, pcie=own_link, offload=first) == pytest.approx(1.0)


def test_copies_cross_in_the_direction_that_they_go() -> None:
    """Memory on the first socket, drives on both: 8 of 16 GPUs fetch 8 GB from the other socket at 8 GB/s.
    Half of 1 GB that all write meanwhile crosses the same way, 0.0625 s more, and does not meet what they
    send."""
    write = DriveIo("write", GB // 16, queue_depth=64)
    options: dict[str, Any] = {"pcie": {"gpus_per_switch": 1}, "offload": {"placement": "first"}}
    assert of_two(Copy("h2d", GB), write, gpus=16, **options) == pytest.approx(1.0625)
    assert of_two(Copy("d2h", GB), write, gpus=16, **options) == pytest.approx(1.0)


def test_interleaved_memory_sends_half_of_every_copy_across() -> None:
    """10 GB of one GPU: 5 GB cross at 8 GB/s, 0.625 s of the link's 1 s; at 4 GB/s 1.25 s."""
    offload, copy = {"placement": "interleaved"}, Copy("h2d", 10 * GB)
    assert of_two(copy, offload=offload) == pytest.approx(1.0)
    assert of_two(copy, offload=offload, host={"socket_bandwidth": 4e9}) == pytest.approx(1.25)


def test_bound_threads_have_one_sockets_cores_and_touch_nothing_far() -> None:
    """The CPU optimizer's 20 GB/s are both sockets': one rank has all of it unbound and half of it bound; of
    10 GB unbound threads touch 5 on the other socket, 2.5 each way, which 8 GB/s hide and 1 GB/s do not."""
    step = HostWork("optimizer", 10 * GB)
    assert of_two(step) == pytest.approx(0.5)
    assert of_two(step, offload={"bound": True}) == pytest.approx(1.0)
    assert of_two(step, host={"socket_bandwidth": 1e9}) == pytest.approx(2.5)
    assert of_two(step, offload={"bound": True}, host={"socket_bandwidth": 1e9}) == pytest.approx(1.0)


def test_all_ranks_together_have_the_same_cores_bound_or_not() -> None:
    """16 x 1 GB at 20 GB/s: 0.8 s."""
    step = HostWork("optimizer", GB)
    for is_bound in (False, True):
        assert of_two(step, gpus=16, offload={"bound": is_bound}) == pytest.approx(0.8)


def test_a_stripe_lies_on_the_drives_of_both_sockets() -> None:
    """Half of 2 GB read at 2 GB/s comes from the other socket: 1 s, or 2 s where only 0.5 GB/s cross."""
    read = DriveIo("read", 2 * GB, queue_depth=64)
    assert of_two(read) == pytest.approx(1.0)
    assert of_two(read, host={"socket_bandwidth": 5e8}) == pytest.approx(2.0)


def test_what_crosses_is_a_tier_of_its_own() -> None:
    rows = {row.name: row for row in outcome_of(
        1, Copy("h2d", 10 * GB), host=HOST, offload={"placement": "interleaved"}
    ).devices}  # fmt: skip
    assert rows["socket_out"].per_rank == rows["socket_in"].per_rank == pytest.approx(5 * GB)
    assert rows["dram"].per_rank == pytest.approx(10 * GB)


@settings(max_examples=25, deadline=None)
@given(
    works=SOME_WORK,
    gpus=st.sampled_from([1, 4, 16]),
    placement=st.sampled_from(["local", "interleaved", "first"]),
    bound=st.booleans(),
)
def test_folded_equals_unfolded_on_two_sockets(
    works: list[Any], gpus: int, placement: str, bound: bool
) -> None:
    """Ranks of all sockets stand for each other; with memory on the first socket those of each socket do."""
    options: dict[str, Any] = {"host": HOST, "offload": {"placement": placement, "bound": bound}}
    folded = outcome_of(gpus, *works, **options)
    unfolded = outcome_of(gpus, *works, unfold=True, **options)
    assert folded.stats.rank_classes == (2 if gpus == 16 and placement == "first" else 1)
    assert folded.trace.step_seconds == pytest.approx(unfolded.trace.step_seconds, rel=1e-9)
    for row, other in zip(folded.devices, unfolded.devices, strict=True):
        assert row.utilisation_fraction <= 1 + 1e-9
        assert row.per_rank == pytest.approx(other.per_rank, rel=1e-9)


def test_sockets_without_a_link_between_them_are_an_error() -> None:
    host = {"source": "mine", "evidence": "assumed", "sockets": 2}
    with pytest.raises(InputError, match="socket_bandwidth: 2 sockets need one above 0 between them"):
        load_cluster({"schema": 1, "extends": "rtx-4090-x8", "name": "mine", "host": host})
