"""Hosts by the name of their CPU."""

from __future__ import annotations

import pytest

from zsim.errors import InputError
from zsim.specs.cluster.cluster import HostDevice
from zsim.specs.cluster.files import load_cluster
from zsim.specs.cluster.host_speeds import host_speeds
from zsim.specs.cluster.spreads import scale_host_speeds


def host(extends: str, **changes: object) -> HostDevice:
    return load_cluster({"extends": extends, "host": changes}).host


def test_another_cpu_takes_the_time_of_the_files_cpu_by_their_ratings() -> None:
    """A DGX A100 has 1.5 and 7.5 us with an EPYC 7742, rated 2,145; an EPYC 7763, rated 2,635, takes 0.814 of
    both."""
    found = host("dgx-a100-80gb", cpu="EPYC 7763")
    assert found.overhead_factor == pytest.approx(1.5 * 2145 / 2635, abs=1e-4)
    assert found.seconds_per_launch == pytest.approx(7.5e-6 * 2145 / 2635, rel=1e-3)
    assert found.cores == 128


def test_a_file_without_a_cpu_is_changed_from_the_reference() -> None:
    """The reference is rated 2,979 and takes 5 us a launch at a factor of 1; an EPYC 7742 1.389 times it."""
    found = host("rtx-4090-x8", cpu="EPYC 7742")
    assert found.overhead_factor == pytest.approx(2979 / 2145, abs=1e-4)
    assert found.seconds_per_launch == pytest.approx(5e-6 * 2979 / 2145, rel=1e-3)


def test_the_cpu_of_a_file_changes_nothing_of_what_it_says_itself() -> None:
    found = load_cluster("dgx-a100-80gb").host
    assert (found.cpu, found.overhead_factor) == ("EPYC 7742", 1.5)
    assert found.seconds_per_launch == pytest.approx(7.5e-6)
    said = host("dgx-a100-80gb", cpu="EPYC 7763", overhead_factor=2.0)
    assert said.overhead_factor == 2.0
    assert said.seconds_per_launch == pytest.approx(7.5e-6)


def test_the_same_cpu_is_as_fast_as_before() -> None:
    assert host("dgx-a100-80gb", cpu="AMD EPYC 7742 64-Core Processor").overhead_factor == 1.5


def test_a_file_in_between_is_what_the_next_is_changed_from() -> None:
    """Two changes of CPU, one after the other, end where the last alone ends."""
    between = {"extends": "dgx-a100-80gb", "host": {"cpu": "EPYC 7763"}}
    before = load_cluster(between).host
    after = host("dgx-a100-80gb", cpu="Xeon Platinum 8380")
    assert before.overhead_factor * 2635 / 2385 == pytest.approx(after.overhead_factor, abs=2e-4)


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("AMD EPYC 7763 64-Core Processor", "AMD EPYC 7763"),
        ("Intel(R) Xeon(R) Platinum 8380 CPU @ 2.30GHz", "Intel Xeon Platinum 8380"),
        ("Xeon Platinum 8480+", "Intel Xeon Platinum 8480C"),
        ("12th Gen Intel(R) Core(TM) i9-12900K", "Intel Core i9-12900K"),
        ("xeon-gold-6248", "Intel Xeon Gold 6248"),
    ],
)
def test_a_cpu_is_known_by_what_lscpu_says_of_it(said: str, name: str) -> None:
    assert host_speeds().processor(said, "").name == name


def test_an_unknown_cpu_names_the_nearest_and_the_way_out() -> None:
    with pytest.raises(InputError, match=r"host\.cpu: unknown CPU 'EPYC 7764'.*overhead_factor"):
        host("dgx-a100-80gb", cpu="EPYC 7764")


def test_every_cluster_with_a_known_cpu_has_a_rating_for_it() -> None:
    """Grace has none: its file says what an event and a launch take."""
    for name in ("dgx-1", "dgx-2", "dgx-a100-80gb", "dgx-h100", "jean-zay-v100"):
        assert host_speeds().find(load_cluster(name).host.cpu), name
    assert host_speeds().find("NVIDIA Grace") is None
    assert load_cluster("gb200-nvl72").host.overhead_factor == 1.25


def test_the_ends_of_a_hosts_spread_turn_all_that_issuing_takes() -> None:
    spread = host_speeds().spread
    slow = scale_host_speeds(load_cluster("dgx-h100"), "slow").host
    assert slow.overhead_factor == pytest.approx(1.25 * spread.slow)
    assert slow.seconds_per_launch == pytest.approx(6e-6 * spread.slow)
    assert slow.memory_bandwidth == load_cluster("dgx-h100").host.memory_bandwidth
