"""The report in three lines: whether it fits, how fast it is, and what the whole training takes."""

from __future__ import annotations

from collections.abc import Iterator

from zsim.report.fit import breaking_sentence, fit_of
from zsim.report.report import Report
from zsim.report.views.text.sentences import headline
from zsim.units import format_amount, format_bytes, format_seconds

_BILLION = 1e9
_DAY_SECONDS = 86_400.0


def brief_lines(report: Report) -> Iterator[str]:
    """Whether the job fits, its step with the range of 80 %, and hours and money to the end."""
    yield _fit_line(report)
    yield _step_line(report)
    yield _run_line(report)


def _fit_line(report: Report) -> str:
    peak, capacity = report.peaks["gpu"].total, report.capacity_bytes.get("gpu")
    verdict = fit_of(report).verdict
    used = format_bytes(peak) + (f" of {format_bytes(capacity)}" if capacity else "")
    phrases = (used, verdict.odds, breaking_sentence(report))
    return f"{verdict.word.upper()}  {'; '.join(filter(None, phrases))}; {headline(report)}"


def _step_line(report: Report) -> str:
    text = f"step {format_seconds(report.step_seconds)}"
    if report.step_seconds_range is not None:
        low, high = report.step_seconds_range
        text += f" ({format_seconds(low)} to {format_seconds(high)}, 80 %)"
    tokens = report.tokens_per_second_per_gpu
    if tokens is not None:
        text += f", {tokens:,.0f} tokens/s/GPU, {tokens * report.simulation.world_size:,.0f} tokens/s"
    if report.mfu_fraction is not None:
        text += f", MFU {report.mfu_fraction * 100:.1f} %"
    return text


def _run_line(report: Report) -> str:
    """Time, GPU-hours and money of the run, or of a billion tokens where the run has no length."""
    cost = report.cost
    tokens = None if cost is None else cost.tokens
    is_run = tokens is not None
    steps = (tokens if tokens is not None else _BILLION) / report.step_tokens
    seconds = steps * report.step_seconds
    gpu_hours = seconds * report.simulation.world_size / 3600.0
    text = f"{tokens if is_run else _BILLION:.4g} tokens: {_format_span(seconds)}"
    if report.step_seconds_range is not None:
        low, high = (steps * end for end in report.step_seconds_range)
        text += f" ({_format_span(low)} to {_format_span(high)})"
    text += f", {format_amount(gpu_hours)} GPU-hours"
    if cost is not None and cost.gpu_hour_price is not None:
        text += f", {format_amount(gpu_hours * cost.gpu_hour_price)} {cost.currency}"
    if not is_run:
        text += "; --tokens, --samples or --epochs say how far it goes"
    elif cost is None or cost.gpu_hour_price is None:
        text += "; --set cost.gpu_hour_price=2 adds the money"
    return text


def _format_span(seconds: float) -> str:
    """Hours below two days, else days."""
    return (
        f"{seconds / 3600.0:.3g} h" if seconds < 2 * _DAY_SECONDS else f"{seconds / _DAY_SECONDS:,.1f} days"
    )
