"""A scaling study as text of 80 columns: a table, and sentences on where efficiency changes and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from zsim.report.critical.causes import cause_meaning, cause_noun
from zsim.report.views.result import Cell, ItemColumn, Medium, ResultTable, table_of
from zsim.report.views.text.plain import paragraph, text_table
from zsim.study.scaling.scaling import KNEE, EfficiencyChange, Scaling, ScalingPoint
from zsim.units import format_bytes, format_percent, format_seconds
from zsim.validated.ratios import NO_DIFFERENCE, ratio_range
from zsim.validated.validation import format_range
from zsim.validated.verdict import verdict_suffix

MODES = {
    "weak": "weak scaling: the same batch on every GPU",
    "strong": "strong scaling: the same batch in all",
    "fill": "the micro-batch that fills the GPU",
}
WORTH_SAYING = 0.01  # relative to a token's cost


def scaling_lines(scaling: Scaling) -> Iterator[str]:
    """The table, then the sentences."""
    yield scaling.title
    yield MODES[scaling.mode]
    heading, *lines = text_table(point_table(scaling, "text"))
    yield heading
    for point, line in zip(scaling.points, lines, strict=True):
        yield from [line] if point.error is None else paragraph(f"{line} {point.error}", indent=8)
    yield ""
    for sentence in sentences(scaling):
        yield from paragraph(sentence)


def point_table(scaling: Scaling, medium: Medium) -> ResultTable:
    """A row for each number of GPUs. One without a step has its error in the page's last column."""
    gpus: ItemColumn[ScalingPoint] = ItemColumn("GPUs", lambda point: f"{point.gpus:,}")
    causes: ItemColumn[ScalingPoint] = ItemColumn(
        "mostly waiting for", lambda point: point.error or _format_causes(point), is_left=True, where="page"
    )
    fields = [replace(field, cell=partial(_cell_of_run, field.cell)) for field in _fields(scaling)]
    return table_of("", [gpus, *fields, causes], scaling.points, medium)


def _cell_of_run(cell: Callable[[ScalingPoint], Cell], point: ScalingPoint) -> Cell:
    return "" if point.error is not None else cell(point)


def _fields(scaling: Scaling) -> Sequence[ItemColumn[ScalingPoint]]:
    return (
        ItemColumn("nodes", lambda point: f"{point.nodes:,}", where="page"),
        ItemColumn("batch", lambda point: f"{point.micro_batch_size}x{point.gradient_accumulation_steps}"),
        ItemColumn("step", lambda point: format_seconds(point.step_seconds)),
        ItemColumn("80 %", _format_ends, where="page"),
        ItemColumn("tokens/s", lambda point: f"{point.tokens_per_second:,.0f}"),
        ItemColumn("linear", lambda point: format_percent(scaling.efficiency(point), "")),
        ItemColumn("MFU", lambda point: format_percent(point.mfu_fraction, "")),
        ItemColumn("memory", lambda point: format_bytes(point.gpu_peak_bytes), where="text"),
        ItemColumn("memory", _format_memory, where="page"),
        ItemColumn("80 %", _format_range, where="text"),
    )


def _format_causes(point: ScalingPoint) -> str:
    """The three largest costs of a token."""
    total_cost = sum(point.costs.values()) or 1.0
    largest = sorted(point.costs.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{cause_meaning(name).label} {cost / total_cost * 100:.0f} %" for name, cost in largest)


def _format_ends(point: ScalingPoint) -> str:
    return "" if point.step_seconds_range is None else format_range(point.step_seconds_range)


def _format_memory(point: ScalingPoint) -> str:
    """The memory of the fullest GPU, and the verdict unless the job fits."""
    return format_bytes(point.gpu_peak_bytes) + verdict_suffix(point.verdict)


def _format_range(point: ScalingPoint) -> str:
    """The step's interval relative to the step, in percent, or the verdict, unless the job fits."""
    if point.verdict is not None and point.verdict.word != "fits":
        return point.verdict.word
    if point.step_seconds_range is None:
        return ""
    low, high = (end / point.step_seconds - 1 for end in point.step_seconds_range)
    return f"{low * 100:+.0f} {high * 100:+.0f} %"


def sentences(scaling: Scaling) -> Iterator[str]:
    """Sentences on the study: that nothing fits, where efficiency changes and why, or that it does not, and
    where a smaller micro-batch than the largest is used, and why.
    """
    if scaling.runs and not any(point.fits for point in scaling.runs):
        yield "It fits on none of these; the steps are as if it did."
    deltas = sorted([*scaling.knees(), *scaling.gains()], key=lambda delta: (delta.start, delta.end))
    for delta in deltas:
        verb = "falls" if delta.after < delta.before else "rises"
        yield (
            f"{delta.start:,} -> {delta.end:,} GPUs: efficiency {verb} from {delta.before * 100:.0f} % to "
            f"{delta.after * 100:.0f} %; {explain_change(delta, scaling)}"
            f"{'' if _is_distinguishable(delta, scaling) else f' ({NO_DIFFERENCE})'}."
        )
    if not deltas and len(scaling.runs) > 1:
        last = scaling.runs[-1]
        share = scaling.efficiency(last) * 100
        yield (
            f"No knee up to {last.gpus:,} GPUs: {share:.0f} % of linear there, and no doubling loses "
            f"{KNEE * 100:.0f} points."
        )
    for point in scaling.runs:
        if point.largest_micro_batch and point.micro_batch_size < point.largest_micro_batch:
            yield (
                f"{point.gpus:,} GPUs: micro-batch {point.largest_micro_batch} fits as well, but torch's "
                f"allocator runs short with it; {point.micro_batch_size} makes a sequence cheapest."
            )


def range_of_efficiency(efficiency: float, scaling: Scaling, *points: ScalingPoint) -> tuple[float, float]:
    """The interval that contains the efficiency of one of two counts against the other with 80 %."""
    settings = ["GPUs"] if scaling.grow is None else ["GPUs", "parallelism"]
    return ratio_range(efficiency, settings, is_shared=any(point.is_shared for point in points))


def _is_distinguishable(delta: EfficiencyChange, scaling: Scaling) -> bool:
    ends = (point for point in scaling.runs if point.gpus in (delta.start, delta.end))
    low, high = range_of_efficiency(delta.after / delta.before, scaling, *ends)
    return not low <= 1.0 <= high


def explain_change(delta: EfficiencyChange, scaling: Scaling) -> str:
    """The reason for a change of efficiency: the causes by which a token costs more, or less."""
    more, less = ("more", "less") if delta.net_change > 0 else ("less", "more")
    netted_change = abs(delta.cause_change - delta.net_change)
    offset_text = ""
    if delta.offset and netted_change >= WORTH_SAYING:
        offset_text = (
            f" ({abs(delta.cause_change) * 100:.0f} % {more}, partly offset by {less} "
            f"{cause_meaning(delta.offset).label} on the critical path)"
        )
    total, part = (f"{abs(change) * 100:.0f} %" for change in (delta.change, delta.net_change))
    share_text = "" if part == total else f", {part}"
    return f"a token costs {total} {more}{share_text} because of {cause_noun(delta.cause)}{offset_text}"
