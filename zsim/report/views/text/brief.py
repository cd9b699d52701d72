"""The report in three lines: whether it fits, how fast it is, and what the whole training takes."""

from __future__ import annotations

from collections.abc import Iterator

from zsim.report.energy import bill
from zsim.report.fit import breaking_sentence, fit_of
from zsim.report.report import Report
from zsim.report.views.text.plain import paragraph
from zsim.units import format_bytes, format_seconds, format_tokens

_BILLION = 1e9
_UNITS = (("days", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))
_LEAST = 2.0  # of a unit, of which smaller amounts are told in the next one


def brief_lines(report: Report) -> Iterator[str]:
    """Whether the job fits, its step with the range of 80 %, and hours and money to the end.

    Each is a line of 80 columns, and goes on in a second one where it is longer. The first note on what was
    asked follows, such as keys of a file that are not read, with the number of others.
    """
    first, *others = (*report.input_notes, "") if report.input_notes else ("",)
    num_others = len(others) - 1
    more = f" (and {num_others} more without --brief)" if num_others > 0 else ""
    notes = [f"note: {first}{more}"] if first else []
    for text in (_fit_text(report), _step_text(report), _run_text(report), *notes):
        yield "\n".join(paragraph(text, indent=2))


def _fit_text(report: Report) -> str:
    peak, capacity = report.peaks["gpu"].total, report.capacity_bytes.get("gpu")
    verdict = fit_of(report).verdict
    used = format_bytes(peak) + (f" of {format_bytes(capacity)}" if capacity else "")
    breaking = breaking_sentence(report)
    phrases = (f"{used}, {verdict.odds}", breaking[:1].lower() + breaking[1:])
    labels = (report.labels.get(name) for name in ("model", "strategy", "cluster", "gpus"))
    job = ", ".join(label for label in labels if label)
    return f"{verdict.word.upper()}  {'; '.join(filter(None, phrases))}: {job}"


def _step_text(report: Report) -> str:
    text = f"step {format_seconds(report.step_seconds)}"
    if report.step_seconds_range is not None:
        low, high = report.step_seconds_range
        text += f" ({format_seconds(low)} to {format_seconds(high)})"
    if report.tokens_per_second_per_gpu is not None:
        text += f", {report.tokens_per_second_per_gpu:,.0f} tokens/s/GPU"
    if report.mfu_fraction is not None:
        text += f", MFU {report.mfu_fraction * 100:.1f} %"
    return text


def _run_text(report: Report) -> str:
    """Time, GPU-hours and money of the run, or of a billion tokens where the run has no length.

    A run of less than one step takes one.
    """
    cost = report.cost
    has_length = cost is not None and cost.tokens is not None
    tokens = cost.tokens if cost is not None and cost.tokens is not None else _BILLION
    seconds = max(tokens / report.step_tokens, 1.0) * report.step_seconds
    unit, unit_seconds = next((row for row in _UNITS if seconds >= _LEAST * row[1]), _UNITS[-1])
    gpu_hours = seconds * report.simulation.world_size / 3600.0
    steps = ", less than one step, which takes" if tokens < report.step_tokens else ":"
    text = f"{format_tokens(tokens)} tokens{steps} {seconds / unit_seconds:,.1f} {unit}"
    if report.step_seconds_range is not None:
        low, high = (seconds / unit_seconds * end / report.step_seconds for end in report.step_seconds_range)
        text += f" ({low:,.1f} to {high:,.1f} {unit})"
    text += f", {bill(gpu_hours, cost)}"
    return text if has_length else f"{text}; --tokens N or --samples N"
