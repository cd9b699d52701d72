"""Whether a step fits in memory: one verdict with its words, for the terminal, the file and the page."""

from __future__ import annotations

from typing import Literal

from zsim.dataclass import dataclass
from zsim.report.report import Report, Verdict
from zsim.report.views.text.sentences import missing_memory
from zsim.units import format_bytes, format_seconds

Tone = Literal["fits", "tight", "broken"]  # how the verdict is shown


@dataclass(frozen=True, slots=True)
class Fit:
    """The verdict, and the sentence that goes with it."""

    verdict: Verdict
    words: str

    @property
    def label(self) -> str:
        return self.verdict.capitalize()

    @property
    def tone(self) -> Tone:
        return _TONES[self.verdict]


_TONES: dict[Verdict, Tone] = {
    "fits": "fits", "runs short": "tight", "may not fit": "broken", "does not fit": "broken",
}  # fmt: skip


def fit_of(report: Report) -> Fit:
    """The verdict on a report, with the bytes that are allocated and that torch reserves."""
    verdict = report.verdict
    if report.out_of_memory is not None:
        return Fit(verdict, f"{missing_memory(report.out_of_memory)} The times below assume it did.")
    held = f"{_allocated(report)} on the fullest GPU"
    allocator = report.allocator
    if allocator is None:
        return Fit(verdict, f"{held}.")
    held += f"; {reserved_words(report)}"
    if verdict == "may not fit":
        held += ", whose allocator finds no room for some requests: see the notes"
    elif verdict == "runs short":
        lost = format_seconds(report.breakdown.seconds["allocator"])
        held += f", whose allocator runs short and holds the step up for {lost}: see the notes"
    return Fit(verdict, f"{held}.")


def _allocated(report: Report) -> str:
    peak, capacity = report.peaks["gpu"].total, report.capacity_bytes.get("gpu")
    if not capacity:
        return f"{format_bytes(peak)} allocated"
    return f"{format_bytes(peak)} of {format_bytes(capacity)} ({peak / capacity * 100:.1f} %) allocated"


def reserved_words(report: Report) -> str:
    """E.g. "83.55 GB of 83.64 GB reserved by torch"; "" where torch's allocator was not simulated."""
    row = report.allocator
    if row is None:
        return ""
    return f"{format_bytes(row.reserved_bytes)} of {format_bytes(row.limit_bytes)} reserved by torch"
