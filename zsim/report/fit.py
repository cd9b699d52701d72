"""Whether a job fits in memory: one verdict with its words, for the terminal, the file and the page.

Also the moments besides the job's step: notes on them, and the one that breaks the job.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zsim.plan.moments import BUILDING, FIRST_FORWARD, FIRST_UPDATE, JobMoment
from zsim.report.memory import allocator_notes
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


def fit_of(report: Report) -> Fit:
    """The verdict on a report, with the bytes in use, and those that torch allocates and reserves."""
    verdict = report.verdict
    sentences = (_usage_sentence(report), breaking_sentence(report), verdict.chance)
    return Fit(
        verdict, " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences if sentence)
    )


def _usage_sentence(report: Report) -> str:
    if report.out_of_memory is not None:
        kind = report.experiment.get("strategy", {}).get("kind", "")  # a recorded job has none
        return f"{missing_memory(report.out_of_memory, kind)} The times below assume that it fits"
    sentence = f"{_peak_usage(report)} on the fullest GPU"
    if report.allocator is None:
        return sentence
    sentence += f"; {format_torch_memory(report)}"
    if report.allocator.failures:
        sentence += "; its allocator finds no room for some requests (see the notes)"
    elif report.allocator.retries:
        lost = format_seconds(report.breakdown.seconds["allocator"])
        sentence += f"; its allocator runs short, which delays the step by {lost} (see the notes)"
    return sentence


def allocator_sentences(report: Report) -> tuple[str, ...]:
    """The notes that the verdict refers to: those on an allocator that runs short."""
    notes = {
        note
        for is_expandable in (False, True)
        for note in allocator_notes(report.allocator, is_expandable=is_expandable)
    }
    return tuple(note for note in report.notes if note in notes)


def _peak_usage(report: Report) -> str:
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


@dataclass(frozen=True, slots=True)
class ReservedMemory:
    """Memory of the fullest GPU, by its holders."""

    torch_bytes: int
    """`torch.cuda.max_memory_reserved`."""
    held_bytes: int
    """The same with the CUDA context and the buffers of communicators: what nvidia-smi shows."""
    memory_bytes: int
    """The GPU's memory. The capacity of the verdict leaves a part of it to torch's allocator."""


def reserved_memory(report: Report) -> ReservedMemory | None:
    """The memory that torch reserves of a GPU. None where its allocator was not simulated."""
    row = report.allocator
    if row is None:
        return None
    outside = report.peaks["gpu"].at_total.get("framework", 0)
    return ReservedMemory(row.reserved_bytes, row.reserved_bytes + outside, row.limit_bytes + outside)


def format_torch_memory(report: Report) -> str:
    """E.g. "torch allocates 52.10 GB and reserves 83.55 GB", with the limit where that is more than a GPU's
    capacity, which leaves room for what the allocator wastes. Empty where its allocator was not simulated.
    """
    row = report.allocator
    if row is None:
        return ""
    reserved = format_bytes(row.reserved_bytes)
    if row.reserved_bytes > (report.capacity_bytes.get("gpu") or row.reserved_bytes):
        reserved += f" of {format_bytes(row.limit_bytes)}"
    return f"torch allocates {format_bytes(allocated_bytes(report))} and reserves {reserved}"


_BREAKS = {
    BUILDING: "It runs out of memory before the first step, while the optimizer's states are made",
    FIRST_FORWARD: "It runs out of memory in the first step, before the optimizer's states are made",
    FIRST_UPDATE: "It runs out of memory in the first update, while the optimizer's states are made",
}
_DEVICE_LABELS = {"gpu": "a GPU", "host": "a node's host"}
_LEAST_FRACTION = 0.5  # of a tier's capacity: a moment that needs less troubles nobody


def needed_bytes(moment: JobMoment) -> dict[str, int]:
    """The moment's bytes by device, where it needs more than is allocated between steps."""
    sizes = {"gpu": moment.gpu_bytes, "host": moment.host_bytes}
    return {device: size for device, size in sizes.items() if size is not None}


def exceeded_device(moment: JobMoment, report: Report) -> str:
    """The device whose capacity the moment exceeds. Empty where it has room."""
    limits = report.capacity_bytes
    return next(
        (name for name, size in needed_bytes(moment).items() if size > (limits.get(name) or size)), ""
    )


def moment_notes(report: Report) -> Iterator[str]:
    """Notes on the moments that the job passes through and that need more than its step and at least half of
    a tier, with their cause. One more note is on those without room that only some scripts have.
    """
    for moment in report.moments:
        if moment.is_certain and _is_worth_a_note(moment, report):
            addition = ", more than it has" if exceeded_device(moment, report) else ""
            yield f"{format_moment(moment)}{addition}: {moment.cause}"
    uncertain = [
        moment for moment in report.moments if not moment.is_certain and exceeded_device(moment, report)
    ]
    if uncertain:
        yield (
            f"a script that also does this runs out of memory: {'; '.join(map(format_moment, uncertain))} "
            "(`zsim memory` says why)"
        )


def _is_worth_a_note(moment: JobMoment, report: Report) -> bool:
    for device, size in needed_bytes(moment).items():
        limit = report.capacity_bytes.get(device)
        if limit and size > max(_LEAST_FRACTION * limit, report.peaks[device].total):
            return True
    return False


def breaking_sentence(report: Report) -> str:
    """When a job breaks that does not fit: in which of its moments first. Empty for one that fits."""
    first_exceeded = next(
        (moment for moment in report.moments if moment.is_certain and exceeded_device(moment, report)), None
    )
    if first_exceeded is not None:
        device = exceeded_device(first_exceeded, report)
        size, device_label = format_bytes(needed_bytes(first_exceeded)[device]), _DEVICE_LABELS[device]
        return (
            f"{_BREAKS.get(first_exceeded.name, f'It breaks when {first_exceeded.name}')}: {size} on "
            f"{device_label}"
        )
    finding, moment_of_name = report.out_of_memory, {moment.name: moment for moment in report.moments}
    if finding is None or finding.pool != "gpu" or FIRST_UPDATE not in moment_of_name:
        return ""
    sizes = [format_bytes(moment_of_name[name].gpu_bytes or 0) for name in (FIRST_FORWARD, FIRST_UPDATE)]
    return (
        f"It runs out of memory in the second step: the first one's forward and backward need {sizes[0]}, "
        f"as the optimizer's states are not made yet, and its update {sizes[1]}"
    )


def format_moment(moment: JobMoment) -> str:
    """E.g. "saving whole weights, 141.10 GB on a node's host"."""
    sizes = " and ".join(
        f"{format_bytes(size)} on {_DEVICE_LABELS[name]}" for name, size in needed_bytes(moment).items()
    )
    return f"{moment.name}, {sizes}"
