"""What a node's drives do, from the requests of its ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.expect import there
from zsim.trace.chrome import chrome_trace
from zsim.trace.trace import Trace, drive_rates

GB = 10**9
READ = {"kind": "nvme_read", "stream": "nvme_read", "name": "read", "bytes": 2 * GB}
WRITE = {"kind": "nvme_write", "stream": "nvme_write", "name": "write", "bytes": GB}


def of_node(trace: Trace, **metadata: Any) -> Trace:
    return replace(trace, metadata={**trace.metadata, **metadata})


def test_requests_of_all_ranks_of_a_node_add_up(make_trace: Callable[..., Trace]) -> None:
    """2 GB from 0 to 1 s and 1 GB from 0.5 to 1.5 s, on each of 8 ranks."""
    trace = make_trace([{**READ, "start": 0.0, "end": 1.0}, {**WRITE, "start": 0.5, "end": 1.5}])
    rates = there(drive_rates(of_node(trace, gpus_per_node=8), 0))
    assert rates.seconds.tolist() == [0.0, 0.5, 1.0, 1.5]
    assert rates.read.tolist() == pytest.approx([16 * GB, 16 * GB, 0, 0])
    assert rates.write.tolist() == pytest.approx([0, 8 * GB, 8 * GB, 0])


def test_each_traced_rank_counts_for_those_it_stands_for(make_trace: Callable[..., Trace]) -> None:
    """Rank 0 for itself alone, rank 1 for three; rank 4 is on another node."""
    trace = make_trace(
        [
            {**READ, "rank": rank, "start": 0.0, "end": seconds}
            for rank, seconds in ((0, 1.0), (1, 2.0), (4, 1.0))
        ]
    )
    known = {0: {0: 1, 1: 3}, 1: {0: 1, 1: 3}, 4: {4: 4}}
    rates = there(drive_rates(of_node(trace, node_ranks=known), 1))
    assert rates.seconds.tolist() == [0.0, 1.0, 2.0]
    assert rates.read.tolist() == pytest.approx([5 * GB, 3 * GB, 0])
    assert there(drive_rates(of_node(trace, node_ranks=known), 4)).read.tolist() == pytest.approx([8 * GB, 0])


def test_without_drives_there_is_nothing_to_show(make_trace: Callable[..., Trace]) -> None:
    trace = make_trace([{"name": "gemm", "start": 0.0, "end": 1.0}])
    assert drive_rates(trace, 0) is None
    assert not [e for e in chrome_trace(trace)["traceEvents"] if e["ph"] == "C"]


def test_the_trace_file_has_a_counter_beside_the_ranks_own_tracks(make_trace: Callable[..., Trace]) -> None:
    trace = of_node(make_trace([{**READ, "start": 0.0, "end": 0.5}]), gpus_per_node=2)
    events = chrome_trace(trace)["traceEvents"]
    counters = [event for event in events if event["name"] == "drives of the node (GB/s)"]
    assert [(event["ts"], event["args"]) for event in counters] == [
        (0.0, {"read": 8.0, "write": 0.0}), (500000.0, {"read": 0.0, "write": 0.0}),
    ]  # fmt: skip
    assert "nvme_read" in [event["args"]["name"] for event in events if event["name"] == "thread_name"]
