"""Two nodes on a shaped link: bytes against the interfaces' counters, and gathers behind computation."""

from __future__ import annotations

import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install zsim[validate]")

from validation import network, overlap  # noqa: E402
from validation.cases.shaped_link import bytes_per_second  # noqa: E402
from validation.launch import run  # noqa: E402

pytestmark = pytest.mark.torch
RATE = "400mbit"
BURST = 131_072  # bytes that `tc tbf ... burst 128kb` lets pass at once


@functools.cache
def measured() -> list[dict[str, Any]]:
    return run("validation.overlap:measure", 2, (8, 2), prefix=network.PRIVATE, link_rate=RATE)


@pytest.fixture(autouse=True)
def _needs_shaped_links() -> None:
    if network.why_not_shaped():
        pytest.skip(network.why_not_shaped() or "")


@pytest.mark.parametrize("way", overlap.WAYS)
def test_each_node_receives_what_the_closed_form_says(way: str) -> None:
    """Half of every full tensor comes from the other of two nodes; within 0.5 % for headers."""
    for node in measured():
        expected = node[way]["declared"] // 2
        assert expected <= node[way]["received"][-1] <= 1.005 * expected


@pytest.mark.parametrize("way", overlap.WAYS)
def test_no_gather_is_faster_than_the_link(way: str) -> None:
    """Half of the tensor has to come over the link; the shaper's burst may be there at once."""
    rows = overlap.gathers_and_cover(measured()[0][way]["events"])
    assert len(rows) == 10  # five units, forward and backward
    for size, seconds, _ in rows:
        assert seconds >= (size / 2 - BURST) / bytes_per_second(RATE)


def test_gathers_ahead_run_while_units_compute_and_serial_ones_do_not() -> None:
    """Block i + 1 is asked for before block i computes and block i begins at once, while the link needs 29 ms
    (half of 3.2 MB less the burst, at 50 MB/s). Without gathering ahead nothing computes during a gather.
    """
    cover = {
        way: [covered for _, _, covered in overlap.gathers_and_cover(measured()[0][way]["events"])]
        for way in overlap.WAYS
    }
    assert sum(cover["serial"]) == 0
    assert sum(covered > 0 for covered in cover["ahead"]) >= 6  # 3 in forward, 3 in backward
