"""The summary of skipped tests."""

from __future__ import annotations

import pytest

from tests.skips import MAX_LINES, skip_lines


def skipped(reason: str) -> pytest.TestReport:
    where = ("tests/test_it.py", 3, f"Skipped: {reason}")
    return pytest.TestReport("tests/test_it.py::test", ("", None, ""), {}, "skipped", where, "setup")


def test_skipped_tests_are_counted_by_reason_most_first() -> None:
    reports = [skipped("needs torch"), skipped("no Chromium here"), skipped("no Chromium\n  here")]
    assert skip_lines(reports) == ["     2  no Chromium here", "     1  needs torch"]


def test_a_long_list_is_cut() -> None:
    lines = skip_lines(skipped(f"reason {number:02}") for number in range(MAX_LINES + 3))
    assert lines[-2:] == [f"     1  reason {MAX_LINES - 1}", "        and 3 more reasons: pytest -rs"]
