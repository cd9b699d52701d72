"""Ranks that differ, steps that differ, jobs side by side: rows, words, and what is left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.expect import about
from zsim.report.irregular import JobRow, RankRow, StepSpread, rank_rows, step_spread
from zsim.report.views.tables import irregular_tables
from zsim.specs.experiment.jitter import JitterConfig


def two_ranks(make_trace: Callable[..., Any]) -> Any:
    """Rank 0 computes 1 s and waits 1 s for rank 5, which computes 2 s; both then gather for 0.5 s."""
    gather = {"kind": "all_gather", "stream": "compute", "name": "gather", "group": "world", "bytes": 8}
    return make_trace(
        [
            {"rank": 0, "start": 0.0, "end": 1.0, "name": "block"},
            {"rank": 0, "start": 1.0, "end": 2.5, **gather},
            {"rank": 5, "start": 0.0, "end": 2.0, "name": "block"},
            {"rank": 5, "start": 2.0, "end": 2.5, **gather},
        ],
        step_seconds=2.5,
    )


def test_a_row_says_what_a_class_computes_and_how_long_it_waits(make_trace: Callable[..., Any]) -> None:
    assert rank_rows(two_ranks(make_trace), [7, 1], [1.0, 2.0]) == (
        RankRow(0, 7, 1.0, about(1.0), about(1.5)),
        RankRow(5, 1, 2.0, about(2.0), about(0.5)),
    )


def test_ranks_that_began_later_are_read_on_their_own_clock(make_trace: Callable[..., Any]) -> None:
    """Rank 5 began its step 0.5 s after rank 0: its spans are 0.5 s later, its row is the same."""
    trace = two_ranks(make_trace)
    is_late = trace.ranks == 5
    later = replace(
        trace,
        start_seconds=trace.start_seconds + 0.5 * is_late,
        end_seconds=trace.end_seconds + 0.5 * is_late,
        issue_seconds=trace.issue_seconds + 0.5 * is_late,
        begins={5: 0.5},
    )
    assert rank_rows(later, [7, 1], [1.0, 2.0])[1] == rank_rows(trace, [7, 1], [1.0, 2.0])[1]


@pytest.mark.parametrize("sizes", [[8], [1, 1], [2] * 13])
def test_there_are_no_rows_for_one_class_for_single_ranks_and_for_too_many(
    make_trace: Callable[..., Any], sizes: list[int]
) -> None:
    spans = [{"rank": rank, "start": 0.0, "end": 1.0} for rank in range(len(sizes))]
    assert rank_rows(make_trace(spans), sizes, [1.0] * len(sizes)) == ()


def test_percentiles_are_steps_that_were_drawn(make_trace: Callable[..., Any]) -> None:
    """Of 20 steps of 1 to 20 s the 1st, the 10th and the 19th."""
    steps = [make_trace([{"start": 0.0, "end": float(n)}], step_seconds=float(n)) for n in range(20, 0, -1)]
    spread = step_spread(JitterConfig(1, 20, 0.01, 0.02, {"rank": "here"}, "assumed"), steps, 0.5)
    assert spread.step_seconds == {"p5": 1.0, "p50": 10.0, "p95": 19.0}
    assert spread.exposed_communication_seconds == {"p5": 0.0, "p50": 0.0, "p95": 0.0}


def test_the_tables_say_it_in_words(make_step_report: Callable[..., Any]) -> None:
    percentiles = {"p5": 1.0, "p50": 2.0, "p95": 3.0}
    report = replace(
        make_step_report(),
        jobs=(JobRow("other", "gpt2", "DDP", 2, 16, 3, 1.0, 1.5),),
        jitter=StepSpread(7, 20, 0.01, 0.02, {}, percentiles, percentiles, 0.9),
        ranks=(RankRow(0, 15, 1.0, 1.0, 0.5), RankRow(3, 1, 1.2, 1.2, 0.3)),
    )
    jobs, jitter, ranks = irregular_tables(report)
    assert jobs.rows == [("other", "16", "1.000 s", "1.500 s", "1.50 times", "gpt2, DDP")]
    assert jitter.title == "20 steps with jitter, seed 7"
    assert jitter.rows[0] == ("step", "1.000 s", "2.000 s", "3.000 s", "900.00 ms")
    assert [row[0] for row in ranks.rows] == ["like rank 0", "rank 3"]
    assert [row[-1] for row in ranks.rows] == ["-", "1.2 times"]
    assert all(len(row) == len(table.columns) for table in (jobs, jitter, ranks) for row in table.rows)
    assert list(irregular_tables(make_step_report())) == []
    assert report.to_dict()["jobs"][0]["slowdown"] == 1.5
