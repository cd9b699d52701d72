"""What a run of the tests left out, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

MAX_LINES = 12


def skip_lines(reports: Iterable[pytest.TestReport | pytest.CollectReport]) -> list[str]:
    """`12  no Chromium here` for each reason, those of most tests first; a module that is skipped whole
    counts as one."""
    counts = Counter(reason_of(report) for report in reports)
    lines = [
        f"{count:6,}  {reason}" for reason, count in sorted(counts.items(), key=lambda row: (-row[1], row[0]))
    ]
    rest = len(lines) - MAX_LINES
    return lines if rest <= 0 else [*lines[:MAX_LINES], f"        and {rest} more reasons: pytest -rs"]


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """In one line, without pytest's own word in front."""
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return " ".join(said.removeprefix("Skipped: ").split())
