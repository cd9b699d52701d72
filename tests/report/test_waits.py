"""Waits as columns: the same waits again, and what those with one cause were for."""

from __future__ import annotations

from zsim.report.waits import NO_WAITS, Wait, Waits

WAITS = (
    Wait(0.0, 1.0, "exposed_communication", 7, "forward"),
    Wait(1.5, 2.0, "host_bound", None, "forward"),
    Wait(3.0, 3.25, "exposed_communication", 4, "backward"),
    Wait(4.0, 8.0, "exposed_communication", None, "backward"),
)


def test_waits_are_the_same_when_they_are_read_again() -> None:
    assert tuple(Waits.of(WAITS)) == WAITS
    assert len(Waits.of(WAITS)) == 4
    assert (tuple(NO_WAITS), len(NO_WAITS)) == ((), 0)


def test_waits_with_a_cause_are_for_spans_and_not_for_the_host() -> None:
    infos, seconds = Waits.of(WAITS).select_cause("exposed_communication")
    assert (infos.tolist(), seconds.tolist()) == ([7, 4], [1.0, 0.25])
    assert not len(Waits.of(WAITS).select_cause("data_loading")[0])
