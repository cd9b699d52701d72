"""Whether a job fits in memory: one verdict with its words, for the terminal, the file and the page.

Also the moments besides the job's step: notes on them, and the one that breaks the job.
"""

from __future__ import annotations

from collections.abc import Iterator

from zsim.dataclass import dataclass
from zsim.plan.moments import BUILDING, FIRST_FORWARD, FIRST_UPDATE, JobMoment
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
        """The first line that a command prints: "FITS  52.10 GB of ..."."""
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
    """`torch.cuda.max_memory_allocated` of the fullest rank: the bytes in use without the CUDA context and
    the buffers of communicators, which `memory_reserved` does not count either.
    """
    peak = report.peaks["gpu"]
    return peak.total - peak.at_total.get("framework", 0)


def torch_words(report: Report) -> str:
    """E.g. "torch allocates 52.10 GB and reserves 83.55 GB of 83.64 GB". Empty where its allocator was not
    simulated.
    """
    row = report.allocator
    if row is None:
        return ""
    reserved = f"{format_bytes(row.reserved_bytes)} of {format_bytes(row.limit_bytes)}"
    return f"torch allocates {format_bytes(allocated_bytes(report))} and reserves {reserved}"


_BREAKS = {
    BUILDING: "It breaks before the first step, while the optimizer's states are made",
    FIRST_FORWARD: "It breaks in the first step, before the optimizer's states are made",
    FIRST_UPDATE: "It breaks in the first update, while the optimizer's states are made",
}
_PLACES = {"gpu": "a GPU", "host": "a node's host"}
_SHOWN = 0.5  # of a tier's capacity: a moment that needs less troubles nobody


def needs(moment: JobMoment) -> dict[str, int]:
    """The moment's bytes by device, where it needs more than is allocated between steps."""
    found = {"gpu": moment.gpu_bytes, "host": moment.host_bytes}
    return {device: size for device, size in found.items() if size is not None}


def exceeds(moment: JobMoment, report: Report) -> str:
    """The device whose capacity the moment exceeds. Empty where it has room."""
    limits = report.capacity_bytes
    return next((name for name, size in needs(moment).items() if size > (limits.get(name) or size)), "")


def moment_notes(report: Report) -> Iterator[str]:
    """Notes on the moments that the job passes through and that need more than its step and at least half of
    a tier, with their cause. One more note is on those without room that only some scripts have.
    """
    for moment in report.moments:
        if moment.is_certain and _is_worth_a_note(moment, report):
            over = ", more than it has" if exceeds(moment, report) else ""
            yield f"{moment_words(moment)}{over}: {moment.cause}"
    some = [one for one in report.moments if not one.is_certain and exceeds(one, report)]
    if some:
        yield (
            f"no room, where the script does it: {'; '.join(map(moment_words, some))} (`moments` of --json "
            "has the cause of each)"
        )


def _is_worth_a_note(moment: JobMoment, report: Report) -> bool:
    for device, size in needs(moment).items():
        limit = report.capacity_bytes.get(device)
        if limit and size > max(_SHOWN * limit, report.peaks[device].total):
            return True
    return False


def breaking_sentence(report: Report) -> str:
    """When a job breaks that does not fit: in which of its moments first. Empty for one that fits."""
    broken = next((one for one in report.moments if one.is_certain and exceeds(one, report)), None)
    if broken is not None:
        device = exceeds(broken, report)
        size, place = format_bytes(needs(broken)[device]), _PLACES[device]
        return f"{_BREAKS.get(broken.name, f'It breaks when {broken.name}')}: {size} on {place}"
    finding, first = report.out_of_memory, {one.name: one for one in report.moments}
    if finding is None or finding.pool != "gpu" or FIRST_UPDATE not in first:
        return ""
    sizes = [format_bytes(first[name].gpu_bytes or 0) for name in (FIRST_FORWARD, FIRST_UPDATE)]
    return (
        f"It breaks in the second step: the first one's forward and backward need {sizes[0]}, since the "
        f"optimizer's states are not made yet, and its update {sizes[1]}"
    )


def moment_words(moment: JobMoment) -> str:
    """E.g. "saving whole weights, 141.10 GB on a node's host"."""
    sizes = " and ".join(f"{format_bytes(size)} on {_PLACES[name]}" for name, size in needs(moment).items())
    return f"{moment.name}, {sizes}"
