"""Lines that others drew through NCCL's times, and the same lines through zsim's."""

from __future__ import annotations

import pytest

from validation.curves.lines import FLOOR, FLOORS, Published, line_through, measured_lines, read_lines
from validation.curves.measured import curve_of


@pytest.fixture(scope="module")
def b200() -> dict[str, Published]:
    return {one.curve.kind: one for one in read_lines() if one.curve.cluster.name == "hgx-b200"}


def test_a_line_through_a_straight_line_is_itself() -> None:
    """7/8 of the bytes at 100 GB/s behind 20 us."""
    curve = curve_of("hgx-b200", "all_gather", 1, 8)
    line = line_through(curve, lambda size: 20e-6 + size * 7 / 8 / 100e9)
    assert line == pytest.approx((100e9, 20e-6), rel=1e-9)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all"])
def test_b200s_bandwidth_is_the_line_s(b200: dict[str, Published], kind: str) -> None:
    """Of all-gathers and reduce-scatters it was chosen so; of all-to-alls it is H100's part of the links."""
    simulated = b200[kind].simulated(FLOORS.get(kind, FLOOR))
    assert simulated.bandwidth == pytest.approx(b200[kind].line.bandwidth, rel=0.05)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_one_thread_s_launches_raise_the_constant(b200: dict[str, Published], kind: str) -> None:
    """SimuMax's constants are above zsim's, which are those of a process per GPU within 10 us."""
    alone, floored = b200[kind].simulated(), b200[kind].simulated(FLOOR)
    assert alone.constant < floored.constant < b200[kind].line.constant
    other = next(one for one in measured_lines() if one.curve.name == f"8 B200, Vultr, {kind}")
    assert alone.constant == pytest.approx(other.line.constant, abs=10e-6)
