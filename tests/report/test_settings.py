"""The experiment as sections with readable values."""

from __future__ import annotations

import pytest

from zsim.report.settings import sections


def test_tables_become_sections_with_their_source_and_grade() -> None:
    experiment = {"nodes": 2, "link": {"source": "a data sheet", "evidence": "measured", "bandwidth": 450e9}}
    top = sections(experiment)
    assert top.rows == [("nodes", "2")]
    (link,) = top.children
    assert (link.title, link.source, link.evidence) == ("link", "a data sheet", "measured")
    assert link.rows == [("bandwidth", "450.00 GB/s")]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("latency", 5e-7, "0.5 us"),
        ("seconds_per_launch", 2e-6, "2.0 us"),
        ("capacity", 80 * 10**9, "80.00 GB"),
        ("bytes_per_second", 1e9, "1.00 GB/s"),
        ("efficiency", 0.81, "81 %"),
        ("max_fraction", 0.645, "64.5 %"),
        ("sequence_length", 8192, "8,192"),
        ("compile", False, "no"),
        ("mesh", [2, 8], "2, 8"),
        ("gradient_clipping", 1.0, "1"),
    ],
)
def test_values_are_shown_with_the_unit_of_their_key(
    key: str, value: bool | float | list[int], words: str
) -> None:
    assert sections({key: value}).rows == [(key.replace("_", " "), words)]


def test_peaks_are_flops_per_second() -> None:
    (peak,) = sections({"peak": {"bf16": 989.4e12}}).children
    assert peak.rows == [("bf16", "989.40 TFLOP/s")]


def test_what_is_not_set_is_left_out_and_lists_of_tables_are_numbered() -> None:
    top = sections({"nvme": None, "extra": {}, "links": [{"kind": "switch"}, {"kind": "none"}]})
    assert top.rows == []
    assert [child.title for child in top.children] == ["links 1", "links 2"]


def test_a_users_own_dotted_key_stays_as_written() -> None:
    assert sections({"zero_optimization.stage": 3}).rows == [("zero_optimization.stage", "3")]


def test_long_values_ask_for_a_line_of_their_own() -> None:
    assert sections({"effect": "x" * 41}).has_long_values
    assert not sections({"effect": "x" * 40}).has_long_values
