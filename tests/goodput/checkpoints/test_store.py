"""What a store gives and takes: limits of writing and of reading, apart from each other."""

from __future__ import annotations

import numpy as np
import pytest

from zsim.goodput.checkpoints.machine import (
    StoreLimits,
    file_seconds,
    read_limits,
    transfer_seconds,
    write_limits,
)
from zsim.specs.experiment.run.storage import StorageTable

NODE = 7e9  # bytes per second of a node's cards


def test_reading_is_as_writing_where_nothing_is_said_of_it() -> None:
    """Two threads of 0.5 GB/s each, 3 GB/s a node, a fifth of 40 GB/s in all."""
    table = StorageTable(
        write_bandwidth_per_writer="0.5 GB/s", write_bandwidth_per_node="3 GB/s", write_bandwidth="40 GB/s",
        efficiency=0.2, latency="3 ms", metadata_per_second=100.0,
    )  # fmt: skip
    expected = StoreLimits(1e9, 3e9, 8e9, 0.003, 100.0)
    assert write_limits(table, 2, NODE) == expected
    assert read_limits(table, 2, NODE) == expected


def test_rates_of_reading_are_its_own() -> None:
    table = StorageTable(
        write_bandwidth_per_writer="0.5 GB/s", write_bandwidth_per_node="3 GB/s", write_bandwidth="40 GB/s",
        read_bandwidth_per_reader="0.75 GB/s", read_bandwidth_per_node="5 GB/s", read_bandwidth="60 GB/s",
        efficiency=0.5,
    )  # fmt: skip
    assert write_limits(table, 2, NODE) == StoreLimits(1e9, 3e9, 20e9)
    assert read_limits(table, 2, NODE) == StoreLimits(1.5e9, 5e9, 30e9)


def test_a_rate_of_reading_alone_bounds_reading_alone() -> None:
    table = StorageTable(
        write_bandwidth="10 GB/s", read_bandwidth_per_reader="0.75 GB/s", read_bandwidth_per_node="5 GB/s"
    )
    assert write_limits(table, 1, NODE) == StoreLimits(np.inf, NODE, 10e9)
    assert read_limits(table, 1, NODE) == StoreLimits(0.75e9, 5e9, 10e9)


def test_without_rates_a_nodes_cards_are_the_limit() -> None:
    table = StorageTable(write_bandwidth_per_writer="1 GB/s")
    assert write_limits(table, 4, NODE) == StoreLimits(4e9, NODE, np.inf)
    none = StorageTable(write_bandwidth="1 GB/s")
    assert read_limits(none, 4, NODE) == StoreLimits(np.inf, NODE, 1e9)


def test_files_cost_their_making_by_rank_and_by_all() -> None:
    """3 files of the fullest rank at 10 ms, and 4 in all at 100 a second."""
    limits = StoreLimits(1e9, 1e9, 1e9, 0.01, 100.0)
    assert file_seconds(np.array([3, 1]), limits) == pytest.approx(0.03 + 0.04)
    assert file_seconds(np.array([], dtype=np.int64), limits) == 0.0
    assert file_seconds(np.array([3, 1]), StoreLimits(1e9, 1e9, 1e9)) == 0.0


def test_without_any_limit_bytes_take_no_time() -> None:
    free = StoreLimits(np.inf, np.inf, np.inf)
    assert transfer_seconds(np.array([10**9, 0]), np.array([0, 1]), free) == 0.0
