"""A memory profile as text of at most 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from zsim.plan.memory.tensors import MemoryKey
from zsim.plan.moments import JobMoment
from zsim.report.memory import Holder, MemoryProfile, Moment, holders
from zsim.report.views.meanings import MEMORY
from zsim.report.views.result import Column
from zsim.report.views.text.plain import named_columns, table
from zsim.units import GIGABYTES, format_bytes, format_seconds
from zsim.validated.verdict import Verdict

_SHORT = {"parameters": "params", "gradients": "grads", "optimizer_states": "states",
          "activations": "activ.", "buffers": "buffers", "framework": "other"}  # fmt: skip
By = Literal["category", "phase", "time"]
PHASES = ("forward", "recompute", "backward", "optimizer")
_VARIANT_COLUMNS = 23


def profile_lines(
    profile: MemoryProfile,
    verdict: Verdict,
    *,
    capacity_bytes: int,
    limit: int = 12,
    has_allocator: bool = True,
) -> Iterator[str]:
    """Lines on the peak, the peak of each phase, the holders at the peak, and the bytes kept for backward.

    There are `limit` rows of each (0: all). With `has_allocator`, the `verdict` is about tensors only,
    because torch's allocator can only be judged by a simulation.
    """
    peak = profile.peak
    yield f"{verdict.word.upper()}  {verdict.chance}"
    yield f"peak  {format_bytes(peak.total)} of {format_bytes(capacity_bytes)}, {peak.phase}"
    yield f"      at '{_truncate(peak.name, 44)}', op {peak.op + 1:,} of {profile.num_ops:,}"
    if has_allocator and verdict.word != "does not fit":
        yield "      Whether torch's allocator runs short, `zsim run` says."
    yield ""
    yield from _phase_lines(profile.phases)
    yield ""
    yield from _holder_lines("Who holds it at the peak", holders(profile.at_peak), peak.total, limit)
    kept_holders = holders(profile.kept_for_backward, "activations")
    if kept_holders:
        yield ""
        kept_bytes = sum(row.total_bytes for row in kept_holders)
        yield from _holder_lines(
            f"Kept for backward: {format_bytes(kept_bytes)}", kept_holders, kept_bytes, limit
        )
    units = _unit_holders(profile.highest)
    if units:
        yield ""
        yield from _unit_lines(units, profile.at_peak, limit)
    yield ""
    yield f"{GIGABYTES}."


def moment_lines(moments: Sequence[JobMoment]) -> list[str]:
    """A table of the moments outside of the steady step, in the order of a run."""
    columns = [Column("Beside the step, GB", is_left=True), Column("GPU"), Column("host")]
    rows = [
        (
            f"{moment.name}{'' if moment.is_certain else ' (*)'}",
            "" if moment.gpu_bytes is None else f"{moment.gpu_bytes / 1e9:.2f}",
            "" if moment.host_bytes is None else f"{moment.host_bytes / 1e9:.2f}",
        )
        for moment in moments
    ]
    footnotes = (
        []
        if all(moment.is_certain for moment in moments)
        else ["(*) where the script does so; --json says how"]
    )
    return [*table(columns, rows), *footnotes]


def _phase_lines(phases: Sequence[Moment]) -> list[str]:
    names = [*_SHORT.values(), "total"]
    columns = [Column("Highest of, GB", is_left=True), *(Column(name, min_width=7) for name in names)]
    rows = [
        (
            moment.phase,
            *(f"{size / 1e9:.2f}" for size in (*(moment.by_category[name] for name in _SHORT), moment.total)),
        )
        for moment in phases
    ]
    return table(columns, rows)


def _holder_lines(title: str, rows_of_holders: Sequence[Holder], total_bytes: int, limit: int) -> list[str]:
    listed = rows_of_holders if limit == 0 else rows_of_holders[:limit]
    rows = [
        (
            _name(row),
            f"{row.count:,}",
            format_bytes(row.each_bytes),
            format_bytes(row.total_bytes),
            f"{row.total_bytes / total_bytes:.1%}",
        )
        for row in listed
    ]
    if len(listed) < len(rows_of_holders):
        unlisted_bytes = sum(row.total_bytes for row in rows_of_holders[len(listed) :])
        rows.append(
            (
                f"{len(rows_of_holders) - len(listed)} more",
                "",
                "",
                format_bytes(unlisted_bytes),
                f"{unlisted_bytes / total_bytes:.1%}",
            )
        )
    return table(named_columns(title, "count", "each", "together", "share", min_width=36), rows)


def _unit_holders(highest: Mapping[MemoryKey, int]) -> list[Holder]:
    """Gathered parameters and unreduced gradients of each unit, each at its maximum."""
    return holders({key: size for key, size in highest.items() if key[1]}, "buffers")


def _unit_lines(units: Sequence[Holder], at_peak: Mapping[MemoryKey, int], limit: int) -> Iterator[str]:
    bytes_at_peak = {row.owner: row.total_bytes for row in holders(at_peak, "buffers")}
    listed = units if limit == 0 else units[:limit]
    rows = [
        (
            row.owner,
            f"{row.count:,}",
            format_bytes(row.each_bytes),
            format_bytes(bytes_at_peak.get(row.owner, 0)),
        )
        for row in listed
    ]
    yield from table(
        named_columns("Unsharded by unit", "count", "each, most", "at the peak", min_width=36), rows
    )
    if len(listed) < len(units):
        yield f"{len(units) - len(listed)} more"


def _name(row: Holder) -> str:
    """Name of a row: the module for activations, else the owner with its category."""
    if row.category == "activations":
        return row.owner or "activations"
    label = MEMORY[row.category].label if row.category in MEMORY else row.category
    return f"{row.owner}: {label}" if row.owner else label


def variant_heading(subject: str, by: By) -> str:
    """Heading of the lines of `variant_line`, in which `subject` is varied."""
    if by == "time":
        return f"{_truncate(subject, 32):<32}{'peak GB':>9}{'in':>11}{'step':>13}{'tokens/s/GPU':>15}"
    names = PHASES if by == "phase" else _SHORT.values()
    return (
        f"{_truncate(subject, _VARIANT_COLUMNS):<{_VARIANT_COLUMNS}}" + _cells(names, by) + f"{'peak GB':>9}"
    )


def variant_line(label: str, profile: MemoryProfile, by: By, *, verdict: Verdict) -> str:
    """GB of each category at the peak, or the maximum of each phase."""
    peak, highest = profile.peak, {moment.phase: moment.total for moment in profile.phases}
    sizes = [highest.get(name, 0) for name in PHASES] if by == "phase" else peak.by_category.values()
    cells = _cells((f"{size / 1e9:.2f}" for size in sizes), by)
    return f"{_truncate(label, _VARIANT_COLUMNS):<{_VARIANT_COLUMNS}}{cells}{_total(peak, verdict):>9}"


def simulated_line(
    label: str, peak: Moment, *, verdict: Verdict, seconds: float, tokens: float | None
) -> str:
    """The peak and the step's time, with the verdict's mark."""
    rate = "-" if tokens is None else f"{tokens:,.0f}"
    step = format_seconds(seconds)
    return f"{_truncate(label, 32):<32}{_total(peak, verdict):>9}{peak.phase:>11}{step:>13}{rate:>15}"


def error_line(label: str, error: str) -> str:
    message = error.removeprefix("experiment: ")
    return (
        f"{_truncate(label, _VARIANT_COLUMNS):<{_VARIANT_COLUMNS}}  "
        f"{_truncate(message, 79 - _VARIANT_COLUMNS)}"
    )


def _cells(texts: Iterable[str], by: By) -> str:
    return "".join(f"{text:>{12 if by == 'phase' else 8}}" for text in texts)


def _total(peak: Moment, verdict: Verdict) -> str:
    return f"{peak.total / 1e9:.2f}{verdict.mark}"


def _truncate(text: str, columns: int) -> str:
    return text if len(text) < columns else text[: columns - 4] + "..."
