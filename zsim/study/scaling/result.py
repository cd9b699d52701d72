"""A scaling study: its points, where efficiency changes and why, and how that reads.

# [Note: what a token costs]
The cost of a token, in GPU-seconds by cause, is the step's critical path by cause, times the number of GPUs,
over the tokens of the step. Efficiency is the lowest total cost over the cost at this count, so a loss of
efficiency has a reason: the cause whose cost per token grew most. Time that leaves the path under one cause
may reappear under another: if computation gets faster, communication that it had hidden is exposed. So where
some causes grew and others shrank, the growth of the largest cause overstates its effect. Its net change is
its share of the total change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import log2
from typing import Any, ClassVar, Literal

from zsim.report.critical.causes import cause_meaning, cause_noun
from zsim.report.views.displayable import Displayable
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.meanings import BREAKDOWN, CAPACITY
from zsim.report.views.result import Cell, Column, ItemColumn, Medium, ResultTable, Section, table_of
from zsim.report.views.text.plain import paragraph, table, text_table
from zsim.units import format_bytes, format_duration, format_percent, format_seconds
from zsim.validated.ratios import NO_DIFFERENCE, ratio_range
from zsim.validated.validation import format_range
from zsim.validated.verdict import Verdict, verdict_content, verdict_suffix

Mode = Literal["weak", "strong", "fill"]
MODES: Mapping[Mode, str] = {
    "weak": "weak scaling: the same batch on every GPU",
    "strong": "strong scaling: the same batch in all",
    "fill": "the micro-batch that fills the GPU",
}
KNEE = 0.05  # loss of efficiency per doubling
WORTH_SAYING = 0.01  # relative to a token's cost
_LINE, _LIMIT = BREAKDOWN["compute"].color, CAPACITY.color


@dataclass(frozen=True)
class ScalingPoint:
    """The experiment on one number of GPUs, or `error`, the reason why it has no step there."""

    gpus: int
    error: str | None = None
    nodes: int = 0
    micro_batch_size: int = 0
    gradient_accumulation_steps: int = 0
    step_seconds: float = 0.0
    step_tokens: int = 0
    mfu_fraction: float | None = None
    fits: bool = False
    gpu_peak_bytes: int = 0
    gpu_capacity_bytes: int | None = None
    costs: Mapping[str, float] = field(default_factory=dict)
    """GPU-seconds per token, by cause."""
    allocator_retries: int | None = None
    largest_micro_batch: int | None = None
    step_seconds_range: tuple[float, float] | None = None
    is_shared: bool = False
    """Whether several ranks share a replica of the model."""
    whole_run: Mapping[str, Any] | None = None
    """Columns of the run of days, where the experiment has `[run]`."""
    verdict: Verdict | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.step_tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def token_gpu_seconds(self) -> float:
        """Cost of a token in GPU-seconds."""
        return self.gpus * self.step_seconds / self.step_tokens if self.step_tokens else 0.0


@dataclass(frozen=True, slots=True)
class EfficiencyChange:
    """The change of efficiency between two counts, from `before` to `after`, mostly due to `cause`."""

    start: int
    end: int
    before: float
    after: float
    cause: str
    cause_change: float
    """The change of the cost of `cause` alone, relative to a token's total cost at `start`."""
    change: float
    """The change of a token's total cost, relative to that cost at `start`."""
    net_change: float
    """`cause_change` less its share of opposite changes, so that net changes add up to `change`."""
    offset: str = ""
    """The cause with the largest opposite change ("" without one)."""

    @property
    def change_per_doubling(self) -> float:
        return (self.after - self.before) / log2(self.end / self.start)

    def content(self) -> dict[str, Any]:
        """Its entry in scaling.json."""
        return {
            "from_gpus": self.start, "to_gpus": self.end, "efficiency_before_fraction": self.before,
            "efficiency_after_fraction": self.after, "cause": self.cause,
            "cause_change_fraction": self.cause_change, "change_fraction": self.change,
            "cause_net_change_fraction": self.net_change,
        }  # fmt: skip


@dataclass(frozen=True, repr=False)
class ScalingResult(Displayable):
    """The experiment on each number of GPUs, in order. `knees()` says where efficiency bends, and why."""

    file: ClassVar[str] = "scaling"
    title: str
    mode: Mode
    points: tuple[ScalingPoint, ...]
    base: ScalingPoint
    """The point where a token costs least, to which efficiency is relative. See `best_of`."""
    is_stopped: bool = False
    grow: str | None = None
    """The degree of `GROWN` that grows with the GPUs, if any."""

    def efficiency(self, point: ScalingPoint) -> float:
        return self.base.token_gpu_seconds / point.token_gpu_seconds

    @property
    def runs(self) -> list[ScalingPoint]:
        return [point for point in self.points if point.error is None]

    def changes(self) -> list[EfficiencyChange]:
        """The change of efficiency from each count to the next, over the counts that fit, if any do."""
        return [self._change_between(first, second) for first, second in pairwise(self._comparable_points())]

    def _comparable_points(self) -> list[ScalingPoint]:
        return [point for point in self.runs if point.fits] or self.runs

    def knees(self) -> list[EfficiencyChange]:
        """Falls of more than `KNEE` per doubling. Consecutive ones with the same cause are merged."""
        return self._merge_changes(lambda delta: delta.change_per_doubling < -KNEE)

    def gains(self) -> list[EfficiencyChange]:
        """Rises of more than `KNEE` per doubling: faster than linear."""
        return self._merge_changes(lambda delta: delta.change_per_doubling > KNEE)

    def _merge_changes(self, is_wanted: Callable[[EfficiencyChange], bool]) -> list[EfficiencyChange]:
        by_gpus = {point.gpus: point for point in self.runs}
        merged: list[EfficiencyChange] = []
        for delta in filter(is_wanted, self.changes()):
            if merged and merged[-1].end == delta.start and merged[-1].cause == delta.cause:
                merged[-1] = self._change_between(by_gpus[merged[-1].start], by_gpus[delta.end])
            else:
                merged.append(delta)
        return merged

    def _change_between(self, first: ScalingPoint, second: ScalingPoint) -> EfficiencyChange:
        before, after = self.efficiency(first), self.efficiency(second)
        sign = 1 if after < before else -1
        names = dict.fromkeys([*first.costs, *second.costs])
        growth = {name: second.costs.get(name, 0.0) - first.costs.get(name, 0.0) for name in names}
        cause = max(growth, key=lambda name: sign * growth[name], default="")
        total_cost = first.token_gpu_seconds
        change = (second.token_gpu_seconds - total_cost) / total_cost
        share = growth.get(cause, 0.0) / total_cost
        aligned = sum(cost for cost in growth.values() if cost * sign > 0) / total_cost
        net = share * change / aligned if aligned else 0.0
        opposite = min(growth, key=lambda name: sign * growth[name], default="")
        offset = opposite if sign * growth.get(opposite, 0.0) < 0 else ""
        return EfficiencyChange(first.gpus, second.gpus, before, after, cause, share, change, net, offset)

    def records(self) -> Sequence[Mapping[str, Any]]:
        """One row per number of GPUs."""
        scales: list[dict[str, Any]] = self.to_dict()["scales"]
        return scales

    def headline(self) -> str:
        return f"{self.title} | {MODES[self.mode]}"

    def columns(self) -> Sequence[str]:
        failed = ["error"] if any(scale.error for scale in self.points) else []
        return ["gpus", "step_seconds", "tokens_per_second", "efficiency_fraction", "mfu_fraction", "fits",
                "gpu_peak_bytes", *failed]  # fmt: skip

    def lines(self) -> Iterator[str]:
        """The table, the sentences, and the runs of days."""
        yield self.title
        yield MODES[self.mode]
        heading, *lines = text_table(point_table(self, "text"))
        yield heading
        for point, line in zip(self.points, lines, strict=True):
            yield from [line] if point.error is None else paragraph(f"{line} {point.error}", indent=8)
        yield ""
        for sentence in sentences(self):
            yield from paragraph(sentence)
        yield from run_lines(self)

    def to_dict(self) -> dict[str, Any]:
        """The content of scaling.json."""
        return {
            "title": self.title,
            "mode": self.mode,
            "base_gpus": self.base.gpus,
            "scales": [self._point_content(point) for point in self.points],
            "knees": [change.content() for change in self.knees()],
            "gains": [change.content() for change in self.gains()],
        }

    def _point_content(self, point: ScalingPoint) -> dict[str, Any]:
        if point.error is not None:
            return {"gpus": point.gpus, "error": point.error}
        interval = point.step_seconds_range
        return {
            "gpus": point.gpus, "error": None, "nodes": point.nodes,
            "micro_batch_size": point.micro_batch_size,
            "gradient_accumulation_steps": point.gradient_accumulation_steps,
            "step_seconds": point.step_seconds,
            "step_seconds_range": None if interval is None else [*interval],
            "tokens_per_second": point.tokens_per_second,
            "efficiency_fraction": self.efficiency(point),
            "mfu_fraction": point.mfu_fraction, "fits": point.fits, **verdict_content(point.verdict),
            "gpu_peak_bytes": point.gpu_peak_bytes, "allocator_retries": point.allocator_retries,
            "largest_micro_batch_size": point.largest_micro_batch, "token_gpu_seconds": dict(point.costs),
            **({} if point.whole_run is None else {"run": dict(point.whole_run)}),
        }  # fmt: skip

    def heading(self) -> tuple[str, str]:
        return self.headline(), " ".join(sentences(self))

    def sections(self) -> list[Section]:
        return [
            Section("How far from linear", [
                ("efficiency", "Tokens per second per GPU, of the best point that fits. Marked: knees.",
                 partial(efficiency, self)),
                ("throughput", "Tokens per second; dashed: linear.", partial(throughput, self)),
            ]),
            Section("Why", [
                ("causes", "What a token costs in GPU time, by what the end of the step waited for (the "
                 "critical path); 100 % is its cost at the best point. What grows is what keeps it from "
                 "scaling.", partial(causes, self)),
            ], point_table(self, "page")),
            *run_section(self),
            Section("Room", [("memory", "Memory of the fullest GPU.", partial(memory, self))]),
        ]  # fmt: skip


def best_of(runs: Sequence[ScalingPoint]) -> ScalingPoint:
    """The point with the lowest cost per token, the fewest GPUs among equals. It is chosen among the points
    that fit without allocator retries, or else among those that fit, or else among all.
    """
    fitting = [point for point in runs if point.fits] or list(runs)
    roomy = [point for point in fitting if not point.allocator_retries] or fitting
    return min(roomy, key=lambda point: point.token_gpu_seconds)


def point_table(scaling: ScalingResult, medium: Medium) -> ResultTable:
    """A row for each number of GPUs. One without a step has its error in the page's last column."""
    fields: Sequence[ItemColumn[ScalingPoint]] = (
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
    gpus: ItemColumn[ScalingPoint] = ItemColumn("GPUs", lambda point: f"{point.gpus:,}")
    causes: ItemColumn[ScalingPoint] = ItemColumn(
        "mostly waiting for", lambda point: point.error or _format_causes(point), is_left=True, where="page"
    )
    of_runs = [replace(field, cell=partial(_cell_of_run, field.cell)) for field in fields]
    return table_of("", [gpus, *of_runs, causes], scaling.points, medium)


def _cell_of_run(cell: Callable[[ScalingPoint], Cell], point: ScalingPoint) -> Cell:
    return "" if point.error is not None else cell(point)


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


def sentences(scaling: ScalingResult) -> Iterator[str]:
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
            f"{delta.after * 100:.0f} %; {explain_change(delta)}"
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


def range_of_efficiency(
    efficiency: float, scaling: ScalingResult, *points: ScalingPoint
) -> tuple[float, float]:
    """The interval that contains the efficiency of one of two counts against the other with 80 %."""
    settings = ["GPUs"] if scaling.grow is None else ["GPUs", "parallelism"]
    return ratio_range(efficiency, settings, is_shared=any(point.is_shared for point in points))


def _is_distinguishable(delta: EfficiencyChange, scaling: ScalingResult) -> bool:
    ends = (point for point in scaling.runs if point.gpus in (delta.start, delta.end))
    low, high = range_of_efficiency(delta.after / delta.before, scaling, *ends)
    return not low <= 1.0 <= high


def explain_change(delta: EfficiencyChange) -> str:
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


def _line(figure: Figure, name: str, values: Mapping[int, float], **attributes: Any) -> None:
    """A line over the number of GPUs."""
    figure.add_scatter(
        name=name, x=[*values], y=[*values.values()], mode="lines+markers", line={"color": _LINE, "width": 3},
        **attributes,
    )  # fmt: skip


def _dashes(
    figure: Figure, name: str, values: Mapping[int, float], color: str = _LIMIT, width: int = 2
) -> None:
    figure.add_scatter(
        name=name, x=[*values], y=[*values.values()], mode="lines",
        line={"dash": "dash", "width": width, "color": color}, hoverinfo="skip",
    )  # fmt: skip


def _axes(figure: Figure, counts: Iterable[int], **y: Any) -> Figure:
    """The figure over these numbers of GPUs."""
    ticks = list(counts)
    figure.update_xaxes(title_text="GPUs", type="log", tickvals=ticks, ticktext=[f"{n:,}" for n in ticks])
    figure.update_yaxes(automargin=True, **y)
    return figure


def efficiency(scaling: ScalingResult) -> Figure:
    """Efficiency against linear scaling, knees marked with their causes."""
    runs, base = scaling.runs, scaling.base
    by_gpus = {point.gpus: scaling.efficiency(point) * 100 for point in runs}
    figure = Figure(layout(420))
    ends = {p.gpus: range_of_efficiency(by_gpus[p.gpus], scaling, p, base) for p in runs}
    ends[base.gpus] = (100.0, 100.0)
    _band(figure, ends)
    _line(
        figure,
        "of linear",
        by_gpus,
        marker={"symbol": ["circle" if s.fits else "x" for s in runs], "size": 9},
        hovertext=[_hover(scaling, point) for point in runs],
        hoverinfo="text",
    )
    for kind, deltas, color in (
        ("knee", scaling.knees(), _LIMIT),
        ("faster than linear", scaling.gains(), BREAKDOWN["optimizer"].color),
    ):
        if not deltas:
            continue
        figure.add_scatter(
            name=kind,
            x=[delta.start for delta in deltas],
            y=[by_gpus[delta.start] for delta in deltas],
            mode="markers+text",
            marker={"symbol": "diamond", "size": 14, "color": color},
            text=[cause_meaning(delta.cause).label for delta in deltas],
            textposition="top center",
            hovertext=[f"{delta.start:,} -> {delta.end:,} GPUs: {explain_change(delta)}" for delta in deltas],
            hoverinfo="text",
        )
    figure.add_hline(y=100, line={"dash": "dash", "width": 1, "color": "#8A8F98"})
    highest = max([115.0, *(1.15 * share for share in by_gpus.values())])
    return _axes(figure, by_gpus, title_text="% of linear", range=[0, highest])


def _band(figure: Figure, ends: Mapping[int, tuple[float, float]]) -> None:
    """Draw the 80 % interval at each number of GPUs as a band."""
    if not ends:
        return
    figure.add_scatter(
        name="80 %", x=[*ends, *[*ends][::-1]],
        y=[*(high for _, high in ends.values()), *(low for low, _ in [*ends.values()][::-1])],
        mode="lines", fill="toself", fillcolor="rgba(47, 127, 191, 0.15)", line={"width": 0},
        hoverinfo="skip",
    )  # fmt: skip


def _hover(scaling: ScalingResult, point: ScalingPoint) -> str:
    share, interval = scaling.efficiency(point) * 100, point.step_seconds_range
    step = format_seconds(point.step_seconds) + (f" ({format_range(interval)})" if interval else "")
    return f"{point.gpus:,} GPUs: {step} per step, {share:.1f} % of linear"


def throughput(scaling: ScalingResult) -> Figure:
    runs, base = scaling.runs, scaling.base
    figure = Figure(layout(360))
    ranges = [(point, point.step_seconds_range) for point in runs]
    _band(figure, {
        point.gpus: (point.step_tokens / interval[1], point.step_tokens / interval[0])
        for point, interval in ranges if interval is not None
    })  # fmt: skip
    rates = {point.gpus: point.tokens_per_second for point in runs}
    _line(figure, "tokens/s", rates, hovertemplate="%{x:,} GPUs: %{y:,.0f} tokens/s<extra></extra>")
    linear = {gpus: base.tokens_per_second * gpus / base.gpus for gpus in rates}
    _dashes(figure, "linear", linear, "#8A8F98", 1)
    return _axes(figure, rates, title_text="tokens/s", type="log")


def causes(scaling: ScalingResult) -> Figure:
    """Stacked bars: the cost of a token by cause, in percent of its cost at the base."""
    runs = scaling.runs
    base_cost = scaling.base.token_gpu_seconds
    names = dict.fromkeys(name for point in runs for name in point.costs)
    figure = Figure(layout(460, barmode="stack"))
    labels = [f"{point.gpus:,}" for point in runs]
    for name in names:
        shares = [point.costs.get(name, 0.0) / base_cost * 100 for point in runs]
        if max(shares) < WORTH_SAYING * 100:
            continue
        meaning = cause_meaning(name)
        figure.add_bar(
            name=meaning.label,
            x=labels,
            y=shares,
            marker_color=meaning.color,
            hovertemplate="%{x} GPUs: " + meaning.label + " %{y:.1f} %<extra></extra>",
        )
    figure.update_xaxes(title_text="GPUs", type="category")
    figure.update_yaxes(title_text="% of a token's cost at the best point", automargin=True)
    return figure


def memory(scaling: ScalingResult) -> Figure:
    runs = scaling.runs
    figure = Figure(layout(320))
    _line(
        figure,
        "fullest GPU",
        {point.gpus: point.gpu_peak_bytes / 1e9 for point in runs},
        hovertext=[f"{s.gpus:,} GPUs: {format_bytes(s.gpu_peak_bytes)}, micro-batch {s.micro_batch_size}"
                   for s in runs],
        hoverinfo="text",
    )  # fmt: skip
    if capacities := {s.gpus: s.gpu_capacity_bytes / 1e9 for s in runs if s.gpu_capacity_bytes}:
        _dashes(figure, "capacity", capacities)
    return _axes(figure, [point.gpus for point in runs], title_text="GB", rangemode="tozero")


_COLUMNS = [Column(title) for title in ("GPUs", "days", "5 to 95 %", "goodput", "failures", "save every")]


def run_lines(scaling: ScalingResult) -> Iterator[str]:
    """A table of the runs, then the number of GPUs with the fewest days. Empty without `[run]`."""
    answers = _answers(scaling)
    if not answers:
        return
    yield ""
    yield "whole runs, with saves and failures"
    heading, *lines = table(_COLUMNS, [_cells(point, answer) for point, answer in answers])
    yield heading
    for (_, answer), line in zip(answers, lines, strict=True):
        error = answer["run_error"]
        yield from [line] if error is None else paragraph(f"{line} {error}", indent=8)
    mean_days = [
        (answer["expected_days"], point.gpus) for point, answer in answers if answer["expected_days"]
    ]
    if mean_days:
        days, gpus = min(mean_days)
        yield from paragraph(f"The fewest days: {days:.2f}, on {gpus:,} GPUs.")


def run_section(scaling: ScalingResult) -> list[Section]:
    """The page's section with its figures. Empty without `[run]`."""
    answers = _answers(scaling)
    if not answers:
        return []
    figures = [
        ("goodput", "Goodput: the steps' time over the whole run's, saves and failures included.",
         partial(_run_figure, answers, "goodput_fraction", 100.0, "%")),
        ("days", "Days to the last token; dashed: if nothing were saved and nothing failed.",
         partial(_days_figure, answers)),
    ]  # fmt: skip
    rows = [[*_cells(point, answer), answer["run_error"] or ""] for point, answer in answers]
    return [Section("Whole runs", figures, ResultTable("", [*_COLUMNS, Column("", is_left=True)], rows))]


def _answers(scaling: ScalingResult) -> list[tuple[ScalingPoint, Mapping[str, Any]]]:
    return [(point, point.whole_run) for point in scaling.runs if point.whole_run is not None]


def _cells(point: ScalingPoint, answer: Mapping[str, Any]) -> list[str]:
    if answer["run_error"] is not None:
        return [f"{point.gpus:,}", "", "", "", "", ""]
    days, low, high = answer["expected_days"], answer["days_low"], answer["days_high"]
    interval, goodput = answer["interval_seconds"], answer["goodput_fraction"]
    return [
        f"{point.gpus:,}",
        "no mean" if days is None else f"{days:.2f}",
        f"{low:.1f} to {high:.1f}" if high is not None else f"from {low:.1f}",
        "-" if goodput is None else f"{goodput * 100:.1f} %",
        f"{answer['failures']:,.1f}",
        "-" if interval is None else format_duration(interval),
    ]


def _run_figure(
    answers: list[tuple[ScalingPoint, Mapping[str, Any]]], name: str, factor: float, unit: str
) -> Figure:
    figure = Figure(layout(360))
    values = {point.gpus: answer[name] * factor for point, answer in answers if answer.get(name) is not None}
    title = name.removesuffix("_fraction").replace("_", " ")
    _line(figure, title, values, hovertemplate="%{x:,} GPUs: %{y:,.1f} " + unit + "<extra></extra>")
    return _axes(figure, [point.gpus for point, _ in answers], title_text=unit, rangemode="tozero")


def _days_figure(answers: list[tuple[ScalingPoint, Mapping[str, Any]]]) -> Figure:
    figure = _run_figure(answers, "expected_days", 1.0, "days")
    ideal_days = {point.gpus: answer["ideal_days"] for point, answer in answers if answer["ideal_days"]}
    _dashes(figure, "steps alone", ideal_days)
    figure.update_yaxes(type="log")
    return figure
