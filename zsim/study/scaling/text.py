"""A scaling study as text of 80 columns: a table, and sentences on where efficiency changes and why."""

from __future__ import annotations

from collections.abc import Iterator

from zsim.report.critical.causes import cause_meaning, cause_noun
from zsim.report.views.text.plain import Column, paragraph, table
from zsim.study.scaling.scaling import KNEE, Bend, Scale, Scaling
from zsim.units import format_bytes, format_seconds
from zsim.validated.ratios import NO_DIFFERENCE, ratio_range

MODES = {
    "weak": "weak scaling: the same batch on every GPU",
    "strong": "strong scaling: the same batch in all",
    "fill": "the micro-batch that fills the GPU",
}
WORTH_SAYING = 0.01  # relative to a token's cost
_TITLES = ("GPUs", "batch", "step", "tokens/s", "linear", "MFU", "memory", "80 %")
_COLUMNS = [Column(title) for title in _TITLES]


def scaling_lines(scaling: Scaling) -> Iterator[str]:
    """The table, then the sentences."""
    yield scaling.title
    yield MODES[scaling.mode]
    heading, *lines = table(_COLUMNS, [_cells(scaling, scale) for scale in scaling.scales])
    yield heading
    for scale, line in zip(scaling.scales, lines, strict=True):
        yield from [line] if scale.error is None else paragraph(f"{line} {scale.error}", indent=8)
    yield ""
    for sentence in sentences(scaling):
        yield from paragraph(sentence)


def _cells(scaling: Scaling, scale: Scale) -> list[str]:
    if scale.error is not None:
        return [f"{scale.gpus:,}"]
    return [
        f"{scale.gpus:,}",
        f"{scale.micro_batch_size}x{scale.gradient_accumulation_steps}",
        format_seconds(scale.step_seconds),
        f"{scale.tokens_per_second:,.0f}",
        f"{scaling.efficiency(scale) * 100:.1f}%",
        "-" if scale.mfu_fraction is None else f"{scale.mfu_fraction * 100:.1f}%",
        format_bytes(scale.gpu_peak_bytes),
        _around(scale),
    ]


def _around(scale: Scale) -> str:
    """The step's interval relative to the step, in percent, or the verdict, unless the job fits."""
    if scale.verdict is not None and scale.verdict.word != "fits":
        return scale.verdict.word
    if scale.step_seconds_range is None:
        return ""
    low, high = (end / scale.step_seconds - 1 for end in scale.step_seconds_range)
    return f"{low * 100:+.0f} {high * 100:+.0f} %"


def sentences(scaling: Scaling) -> Iterator[str]:
    """Sentences on the study: that nothing fits, where efficiency changes and why, or that it does not, and
    where a smaller micro-batch than the largest is used, and why.
    """
    if scaling.runs and not any(scale.fits for scale in scaling.runs):
        yield "It fits on none of these; the steps are as if it did."
    bends = sorted([*scaling.knees(), *scaling.gains()], key=lambda bend: (bend.start, bend.end))
    for bend in bends:
        verb = "falls" if bend.after < bend.before else "rises"
        yield (
            f"{bend.start:,} -> {bend.end:,} GPUs: efficiency {verb} from {bend.before * 100:.0f} % to "
            f"{bend.after * 100:.0f} %; {because(bend, scaling)}"
            f"{'' if _is_told_apart(bend, scaling) else f' ({NO_DIFFERENCE})'}."
        )
    if not bends and len(scaling.runs) > 1:
        last = scaling.runs[-1]
        share = scaling.efficiency(last) * 100
        yield (
            f"No knee up to {last.gpus:,} GPUs: {share:.0f} % of linear there, and no doubling loses "
            f"{KNEE * 100:.0f} points."
        )
    for scale in scaling.runs:
        if scale.largest_micro_batch and scale.micro_batch_size < scale.largest_micro_batch:
            yield (
                f"{scale.gpus:,} GPUs: micro-batch {scale.largest_micro_batch} fits as well, but torch's "
                f"allocator runs short with it; {scale.micro_batch_size} makes a sequence cheapest."
            )


def range_of_efficiency(efficiency: float, scaling: Scaling, *scales: Scale) -> tuple[float, float]:
    """The interval that contains the efficiency of one of two counts against the other with 80 %."""
    settings = ["GPUs"] if scaling.grow is None else ["GPUs", "parallelism"]
    return ratio_range(efficiency, settings, is_shared=any(scale.is_shared for scale in scales))


def _is_told_apart(bend: Bend, scaling: Scaling) -> bool:
    ends = (scale for scale in scaling.runs if scale.gpus in (bend.start, bend.end))
    low, high = range_of_efficiency(bend.after / bend.before, scaling, *ends)
    return not low <= 1.0 <= high


def because(bend: Bend, scaling: Scaling) -> str:
    """The reason for a change of efficiency: the causes by which a token costs more, or less."""
    more, less = ("more", "less") if bend.net_change > 0 else ("less", "more")
    netted = abs(bend.cause_change - bend.net_change)
    but = ""
    if bend.offset and netted >= WORTH_SAYING:
        but = (
            f" ({abs(bend.cause_change) * 100:.0f} % {more}, partly offset by {less} "
            f"{cause_meaning(bend.offset).label} on the critical path)"
        )
    whole, part = (f"{abs(change) * 100:.0f} %" for change in (bend.change, bend.net_change))
    of_it = "" if part == whole else f", {part}"
    return f"a token costs {whole} {more}{of_it} because of {cause_noun(bend.cause)}{but}"
