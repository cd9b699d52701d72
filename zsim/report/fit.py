"""Whether a step fits in memory: one verdict with its words, for the terminal, the file and the page."""

from __future__ import annotations

from zsim.dataclass import dataclass
from zsim.report.moments import breaking_sentence
from zsim.report.report import Report
from zsim.report.views.text.sentences import missing_memory
from zsim.units import format_bytes, format_seconds
from zsim.validated.verdict import Tone, Verdict


@dataclass(frozen=True, slots=True)
class Fit:
    """The verdict, and the sentence that goes with it."""

    verdict: Verdict
    words: str

    @property
    def label(self) -> str:
        return self.verdict.label

    @property
    def tone(self) -> Tone:
        return self.verdict.tone

    @property
    def line(self) -> str:
        """The first line of what a command prints: "FITS  52.10 GB of ..."."""
        return f"{self.verdict.word.upper()}  {self.words}"


def fit_of(report: Report) -> Fit:
    """The verdict on a report, with the bytes in use, and those that torch allocates and reserves."""
    verdict = report.verdict
    parts = (verdict.leaning, _held(report), breaking_sentence(report), verdict.chance)
    return Fit(verdict, " ".join(f"{part[0].upper()}{part[1:]}." for part in parts if part))


def _held(report: Report) -> str:
    if report.out_of_memory is not None:
        return f"{missing_memory(report.out_of_memory)} The times below assume it did"
    held = f"{_in_use(report)} on the fullest GPU"
    if report.allocator is None:
        return held
    held += f"; {torch_words(report)}"
    if report.allocator.failures:
        held += "; its allocator finds no room for some requests: see the notes"
    elif report.allocator.retries:
        lost = format_seconds(report.breakdown.seconds["allocator"])
        held += f"; its allocator runs short and holds the step up for {lost}: see the notes"
    return held


def _in_use(report: Report) -> str:
    peak, capacity = report.peaks["gpu"].total, report.capacity_bytes.get("gpu")
    if not capacity:
        return f"{format_bytes(peak)} in use"
    return f"{format_bytes(peak)} of {format_bytes(capacity)} ({peak / capacity * 100:.1f} %) in use"


def allocated_bytes(report: Report) -> int:
    """`torch.cuda.max_memory_allocated` of the fullest rank: what is in use without the CUDA context and the
    buffers of communicators, which `memory_reserved` does not count either."""
    peak = report.peaks["gpu"]
    return peak.total - peak.at_total.get("framework", 0)


def torch_words(report: Report) -> str:
    """E.g. "torch allocates 52.10 GB and reserves 83.55 GB of 83.64 GB"; "" where its allocator was not
    simulated."""
    row = report.allocator
    if row is None:
        return ""
    reserved = f"{format_bytes(row.reserved_bytes)} of {format_bytes(row.limit_bytes)}"
    return f"torch allocates {format_bytes(allocated_bytes(report))} and reserves {reserved}"
