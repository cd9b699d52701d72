"""A tuned configuration: the best few, what limits each, the changes to make, as text, files and a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from zsim.report.views.displayable import Displayable
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout, time_scale
from zsim.report.views.meanings import BREAKDOWN, CAPACITY, COMMUNICATION, TOTAL
from zsim.report.views.result import Column, ItemColumn, Medium, ResultTable, Section, columns_of, table_of
from zsim.report.views.text.plain import paragraph, text_table
from zsim.specs.experiment.job import gpus_label
from zsim.specs.experiment.resolve import resolve
from zsim.specs.formats.export import export_files
from zsim.study.differences import format_step_range, is_distinguishable, range_of_row, verdict_of_row
from zsim.study.tune.evaluate import CandidateResult, MemoryBounds, RunDays
from zsim.study.tune.explain import Change, TuningStep, file_settings, script_changes
from zsim.study.tune.framework import Base
from zsim.study.tune.search import SearchResult
from zsim.units import (
    format_bytes,
    format_duration,
    format_gpus,
    format_percent,
    format_seconds,
    format_setting,
)
from zsim.validated.ratios import NO_DIFFERENCE
from zsim.validated.verdict import Verdict, verdict_content

_BEST = "#1B9E77"


@dataclass(frozen=True, repr=False)
class TuneResult(Displayable):
    """The best configurations in order, the given one, and the changes that lead from it to the best.

    `save(folder)` writes each as files for its framework (`best/`, `2/`, ...) and tune.html.
    """

    file: ClassVar[str] = "tune"
    goal: str
    remark: str
    """A sentence on the size that the goal decided ("" without one)."""
    base: Base
    given: CandidateResult | None
    """The experiment's own configuration, if it fits."""
    given_memory: MemoryBounds | None
    """The memory of the experiment's own configuration in any case."""
    best: Sequence[CandidateResult]
    """The best configurations in order."""
    steps: Sequence[TuningStep]
    """The changes that lead from `given` to the best."""
    doubtful: Sequence[TuningStep]
    """Further changes, whose gain zsim cannot tell from none. They are not in the best."""
    other_numerics: CandidateResult | None
    """The best with changes to the numbers that training computes, such as fp8, where it is faster."""
    search: SearchResult
    measured: Sequence[CandidateResult]
    """All simulated configurations, for figures."""
    refused: dict[str, int]
    num_simulated: int
    num_checked: int
    given_verdict: Verdict | None = None
    """The verdict on the experiment's own configuration, in any case but for one that is refused."""
    budget: int | None = None
    """The number of configurations to simulate, or None for as many as the proof needs."""

    @property
    def largest_possible_gain(self) -> float | None:
        """The largest fraction of the best step (or of the goal's value) by which anything that the budget
        left unexamined could be better. None if nothing is left that could be.
        """
        least_bound = self.search.least_bound
        if least_bound is None:
            return None
        best = self.best[0]
        value = best.seconds * best.gpus if self.goal == "cheapest" else best.seconds
        gain = 1 - least_bound / best.risked(value if best.days is None else best.days.days)
        return gain if gain > 0 else None

    def records(self) -> Sequence[Mapping[str, Any]]:
        """The best configurations with their changes (`overrides`) and results, best first."""
        best: list[dict[str, Any]] = self.to_dict()["best"]
        return best

    def headline(self) -> str:
        return f"{subject(self)}. {verdict(self)}"

    def columns(self) -> Sequence[str]:
        return ("label", "gpus", "step_seconds", "tokens_per_second_per_gpu", "mfu_fraction",
                "gpu_peak_bytes", "limit")  # fmt: skip

    def lines(self) -> Iterator[str]:
        """The output of `zsim tune`, within 80 columns."""
        yield subject(self)
        yield verdict(self)
        yield from _days(self)
        if self.remark:
            yield from paragraph(self.remark, indent=2)
        yield ""
        yield from _table(self)
        if self.steps or self.doubtful:
            yield ""
            yield from _changes(self)
        yield ""
        yield from paragraph(_counts(self))
        if (gain := self.largest_possible_gain) is not None:
            yield from paragraph(
                f"The budget of simulations is used up: the {self.search.num_left:,} left could be at most "
                f"{format_percent(gain)} {'cheaper' if self.goal == 'cheapest' else 'faster'} by their "
                "bounds (--simulations allows more)"
            )
        for reason, count in sorted(self.refused.items(), key=lambda entry: (-entry[1], entry[0]))[:3]:
            yield from paragraph(f"{count} refused: {reason}", indent=4)

    def to_dict(self) -> dict[str, Any]:
        """The content of `zsim tune --json`: times in seconds, sizes in bytes, fractions from 0 to 1."""
        budget_content: dict[str, Any] = {}  # on the candidates that the budget left unexamined
        if self.budget is not None:
            budget_content = {
                "simulations_budget": self.budget,
                "left": self.search.num_left,
                "left_at_most_better_fraction": self.largest_possible_gain,
            }
        search_result = self.search
        return {
            "goal": self.goal,
            "settled": self.remark,
            "given": None if self.given is None else _result_to_dict(self.given),
            "given_verdict": verdict_content(self.given_verdict),
            "best": [_result_to_dict(measured) for measured in self.best],
            "changes_numerics": (
                None if self.other_numerics is None else _result_to_dict(self.other_numerics)
            ),
            "steps": [_step_to_dict(step) for step in self.steps],
            "doubtful_steps": [_step_to_dict(step) for step in self.doubtful],
            "configurations": search_result.num_candidates,
            "do_not_fit": search_result.num_too_large,
            "cannot_be_faster": search_result.num_too_slow,
            **budget_content,
            "refused": dict(self.refused),
            "refused_configurations": search_result.num_refused,
            "simulated_configurations": search_result.num_simulated,
            "simulated": self.num_simulated,
        }

    def heading(self) -> tuple[str, str]:
        doubtful = format_doubtful(self) if self.doubtful else ""
        summary = ". ".join(part for part in (verdict(self), self.remark, doubtful) if part)
        return subject(self), summary

    def sections(self) -> Iterator[Section]:
        yield Section("The best that fit", table=best_table(self, "page"))
        caption = (
            "Every simulated configuration. Down and to the left is better; the line joins those that no "
            "other beats in both."
        )
        yield Section("Time against memory", [("pareto", caption, partial(pareto_figure, self))])
        if self.steps:
            rows = [
                [
                    str(number),
                    "; ".join(format_change(change) for change in step.changes),
                    format_step(step, self.given_verdict),
                ]
                for number, step in enumerate(self.steps, 1)
            ]
            columns = columns_of("", Column("change", is_left=True), "step time")
            caption = "Each change on top of those above it, each simulated."
            figure = "steps", caption, partial(steps_figure, self)
            yield Section("What to change", [figure], ResultTable("", columns, rows))

    def pages(self) -> Mapping[str, str]:
        return {**tuning_files(self), "tune.html": self.page()}

    @property
    def label(self) -> str:
        """The best configuration in words."""
        return label_of(self.best[0])


def _days(tuning: TuneResult) -> Iterator[str]:
    """The run of days of the best configuration, and of the experiment's."""
    best = tuning.best[0].days
    if best is None:
        return
    yield from paragraph(format_days(best), indent=2)
    if tuning.given is not None and tuning.given.days is not None:
        yield from paragraph(f"as given: {format_days(tuning.given.days)}", indent=2)


def format_days(days: RunDays) -> str:
    """E.g. "3.88 days, 99.3 % goodput: mode async, saves 8.0 min apart"."""
    if days.error is not None:
        return f"no run: {days.error}"
    return (
        f"{days.days:.2f} days, {format_percent(days.goodput_fraction)} goodput: mode {days.mode}, saves "
        f"{format_duration(days.interval_seconds)} apart"
    )


def subject(tuning: TuneResult) -> str:
    """The title, e.g. "llama-3-8b | dgx-h100 | 16 GPUs"."""
    job, gpus = tuning.best[0].candidate.base.job, tuning.best[0].gpus
    gpus_text = gpus_label(job) if gpus == job.world_size else format_gpus(gpus)
    return f"{job.model.name} | {job.cluster.name} | {gpus_text}"


def verdict(tuning: TuneResult) -> str:
    """The result in one line, e.g. "fastest: 4.44 s per step instead of 5.05 s, 12.1 % less"."""
    best = tuning.best[0]
    is_shortest = all(best.seconds <= measured.seconds for measured in tuning.best)
    label = tuning.goal if is_shortest or tuning.goal != "fastest" else "fewest changes among the fastest"
    text = f"{label}: {format_seconds(best.seconds)} per step"
    if tuning.given is None:
        return f"{text}; what was given {given_words(tuning)}"
    if best.days is not None:
        return text + f" ({format_seconds(tuning.given.seconds)} given)"
    if tuning.goal != "fastest":
        return text
    gain = 1 - best.seconds / tuning.given.seconds
    given_text = format_seconds(tuning.given.seconds)
    if gain <= -5e-4:
        return f"{text}; the {given_text} given {given_words(tuning)}"
    if gain <= 5e-4:
        return f"{text}, as given"
    doubt = "" if is_distinguishable(best.row, tuning.given.row) else f": {NO_DIFFERENCE}"
    return f"{text} instead of {given_text}, {format_percent(gain)} less{doubt}"


def given_words(tuning: TuneResult) -> str:
    """The verdict on the experiment's own configuration in the words of a run of it."""
    verdict = tuning.given_verdict
    if verdict is None:
        return "is refused" if tuning.given_memory is None else "does not fit"
    return verdict.word if verdict.is_sure else f"{verdict.word}, {verdict.chance}"


NEEDS_SCRIPT = "needs a change of the script"


def verdict_notes(measured: CandidateResult) -> list[str]:
    """The verdict on a configuration and its odds, unless it fits."""
    verdict = verdict_of_row(measured.row)
    return [] if verdict is None or verdict.word == "fits" else [f"{verdict.word}, {verdict.chance}"]


_SHARES = {f"{name}_seconds": meaning.label for name, meaning in BREAKDOWN.items()}


def limits_of(measured: CandidateResult) -> str:
    """The parts of the step, largest first: "compute 94 %, exposed communication 4 %"."""
    shares = {name: measured.row[key] / measured.seconds for key, name in _SHARES.items()}
    largest_first = sorted(shares.items(), key=lambda entry: -entry[1])
    return ", ".join(f"{name} {share * 100:.0f} %" for name, share in largest_first if share >= 0.005)


_Ranked = tuple[str, str, CandidateResult]
"""A configuration with its rank, or the mark in its place, and its label."""


def _ranked(tuning: TuneResult) -> list[_Ranked]:
    """The best configurations, then the experiment's, and one with other numerics, where they are."""
    ranked = [(str(rank), label_of(measured), measured) for rank, measured in enumerate(tuning.best, 1)]
    if tuning.given is not None and all(m.candidate is not tuning.given.candidate for m in tuning.best):
        ranked.append(("-", "as given", tuning.given))
    if tuning.other_numerics is not None:
        ranked.append(("*", other_numerics_label(tuning), tuning.other_numerics))
    return ranked


def best_table(tuning: TuneResult, medium: Medium) -> ResultTable:
    """A row for each of the best configurations and for the experiment's."""
    best = tuning.best[0]
    fields: list[ItemColumn[_Ranked]] = [
        ItemColumn("", lambda entry: entry[0]),
        ItemColumn("configuration", lambda entry: entry[1], is_left=True, where="page"),
        ItemColumn("step", lambda entry: format_seconds(entry[2].seconds)),
        ItemColumn(
            "80 %", lambda entry: format_step_range(entry[2].row, best.row), is_left=True, where="page"
        ),
        ItemColumn("tokens/s/GPU", lambda entry: f"{entry[2].row['tokens_per_second_per_gpu'] or 0.0:,.0f}"),
        ItemColumn("MFU", lambda entry: format_percent(entry[2].row["mfu_fraction"])),
        ItemColumn("GPU memory", lambda entry: format_bytes(entry[2].gpu_bytes)),
        ItemColumn("GPUs", lambda entry: f"{entry[2].gpus:,}"),
        ItemColumn("limited by", lambda entry: "; ".join(_remarks(*entry)), is_left=True, where="page"),
    ]
    return table_of("", fields, _ranked(tuning), medium)


def _remarks(rank: str, _: str, measured: CandidateResult) -> Iterator[str]:
    """The limits of a configuration, its run of days, its verdict, and the changes of the script for it."""
    yield limits_of(measured)
    if measured.days is not None:
        yield format_days(measured.days)
    yield from verdict_notes(measured)
    if rank not in "-*":
        yield from (f"{NEEDS_SCRIPT}: {change}" for change in script_changes(measured.candidate))


def _table(tuning: TuneResult) -> Iterator[str]:
    """The table. Below each row stand its label and its remarks."""
    best = tuning.best[0]
    heading, *lines = text_table(best_table(tuning, "text"))
    yield heading
    for (rank, label, measured), line in zip(_ranked(tuning), lines, strict=True):
        yield line
        for sentence in (label, format_step_range(measured.row, best.row), *_remarks(rank, label, measured)):
            yield from paragraph(sentence, first=4)


def other_numerics_label(tuning: TuneResult) -> str:
    """E.g. "1 with precision block, which changes what training computes"."""
    assert tuning.other_numerics is not None, "there is one"
    before, after = tuning.best[0].candidate.choices, tuning.other_numerics.candidate.choices
    names = [choice.label for name, choice in after.items() if choice != before.get(name)]
    return f"1 with {', '.join(names)}, which changes what training computes"


def label_of(measured: CandidateResult) -> str:
    return measured.candidate.label or "as given"


def _changes(tuning: TuneResult) -> Iterator[str]:
    if tuning.steps:
        yield "What to change, in order of gain, each simulated:"
    small = tuple(
        step for step in tuning.steps if not step.is_distinguishable and (step.gain_fraction or 0) >= 0
    )
    large = [step for step in tuning.steps if step not in small]
    for number, step in enumerate(large, 1):
        yield from paragraph(f"{number:>3} {format_step(step, tuning.given_verdict)}", indent=4)
        for change in step.changes:
            yield from paragraph(format_change(change), first=4)
    if small:
        changes = "; ".join(format_change(change) for step in small for change in step.changes)
        yield from paragraph(f"    In 1 as well, {NO_DIFFERENCE} for each: {changes}", indent=4)
    if tuning.doubtful:
        yield from paragraph(format_doubtful(tuning))


def format_doubtful(tuning: TuneResult) -> str:
    """E.g. "Not in 1, since zsim cannot tell a gain of 1 % from none: training.compile: false -> true"."""
    first, last = tuning.doubtful[0], tuning.doubtful[-1]
    before = tuning.best[0].seconds if first.seconds_before is None else first.seconds_before
    changes = "; ".join(
        dict.fromkeys(format_change(change) for step in tuning.doubtful for change in step.changes)
    )
    gain = format_percent(1 - last.after.seconds / before)
    return f"Not in 1, since zsim cannot tell a gain of {gain} from none: {changes}"


def format_step(step: TuningStep, verdict: Verdict | None) -> str:
    """E.g. "1.98 s -> 575.5 ms, 71.0 % less", and a remark if zsim cannot distinguish the two. Before a step
    that makes the job fit stands the `verdict` on the experiment's own configuration.
    """
    after = format_seconds(step.after.seconds)
    if step.seconds_before is None or step.gain_fraction is None:
        return f"{'does not fit' if verdict is None else verdict.word} -> {after}"
    text = f"{format_seconds(step.seconds_before)} -> {after}"
    if step.gain_fraction < 0:
        return f"{text}, {format_percent(-step.gain_fraction)} more, but it fits with better odds"
    text += f", {format_percent(step.gain_fraction)} less"
    return text if step.is_distinguishable else f"{text}: {NO_DIFFERENCE}"


def format_change(change: Change) -> str:
    """E.g. "zero_optimization.stage: 3 -> 1", and the change of the script if no file can express it."""
    key = change.key.removeprefix("strategy.config.")
    text = f"{key}: {_format_value(change.before)} -> {_format_value(change.after)}"
    return f"{text} ({NEEDS_SCRIPT}: {change.script})" if change.script else text


def _format_value(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "none" if value is None else format_setting(value)


def _counts(tuning: TuneResult) -> str:
    """The counts of the search as a sentence. The counts before the bracket add up to all configurations.

    A configuration with many micro-batches is simulated as two steps of fewer. Refinements, changes and the
    experiment's configuration take further steps.
    """
    search_result = tuning.search
    counts = [
        f"{search_result.num_too_large:,} do{'es' if search_result.num_too_large == 1 else ''} not fit",
        f"{search_result.num_too_slow:,} cannot be faster",
        *([f"{search_result.num_left:,} left"] if search_result.num_left else []),
        *([f"{search_result.num_refused:,} refused"] if search_result.num_refused else []),
        f"{search_result.num_simulated:,} simulated",
    ]
    text = (
        f"{search_result.num_candidates:,} configuration{'' if search_result.num_candidates == 1 else 's'}: "
    )
    text += ", ".join(counts)
    if search_result.num_replaced:
        verb = "does" if search_result.num_replaced == 1 else "do"
        text += f"; {search_result.num_replaced:,} of them {verb} not fit with the given loss"
    if tuning.num_simulated == search_result.num_simulated:
        return text
    return f"{text} ({tuning.num_simulated:,} steps in all, with the given configuration and variations)"


def _step_to_dict(step: TuningStep) -> dict[str, Any]:
    return {
        "changes": [
            {
                "key": change.key,
                "before": change.before,
                "after": change.after,
                "script_change": change.script or None,
            }
            for change in step.changes
        ],
        "before_seconds": step.seconds_before,
        "after_seconds": step.after.seconds,
        "gain_fraction": step.gain_fraction,
        "is_told_apart": step.is_distinguishable,
    }


def _result_to_dict(measured: CandidateResult) -> dict[str, Any]:
    interval = range_of_row(measured.row)
    return {
        "label": label_of(measured),
        "overrides": measured.candidate.overrides,
        "gpus": measured.gpus,
        "step_seconds": measured.seconds,
        "step_seconds_range": None if interval is None else list(interval),
        "validation": {name: measured.row.get(f"validation.{name}") for name in ("regime", "runs")},
        "least_seconds": measured.least_seconds,
        **{key: measured.row[key] for key in ("tokens_per_second_per_gpu", "mfu_fraction", "limit")},
        **{
            f"{device}_peak_bytes": measured.row[f"{device}_peak_bytes"] for device in ("gpu", "host", "nvme")
        },
        "fits": measured.row["fits"],
        **verdict_content(verdict_of_row(measured.row)),
        "may_run_out": measured.may_run_out,
        **(
            {}
            if measured.days is None
            else {"run": asdict(measured.days), "run_settings": measured.days.settings()}
        ),
        "script_changes": list(script_changes(measured.candidate)),
    }


def tuning_files(tuning: TuneResult) -> dict[str, str]:
    """{path below the output folder: text}: `best/`, then `2/`, `3/` ..., and `other-numerics/`. Each folder
    has its NOTES.txt.
    """
    texts: dict[str, str] = {}
    folders = {("best" if rank == 1 else str(rank)): measured for rank, measured in enumerate(tuning.best, 1)}
    if tuning.other_numerics is not None:
        folders["other-numerics"] = tuning.other_numerics
    for name, measured in folders.items():
        folder = Path(name)
        experiment = measured.candidate.experiment()
        exported = export_files(resolve(experiment))
        for name, text in exported.files.items():
            texts[str(folder / name)] = text
        lines = [
            label_of(measured),
            f"{format_seconds(measured.seconds)} per step on {measured.gpus} GPUs, "
            f"{format_bytes(measured.gpu_bytes)} on the fullest; {measured.row['limit']}",
            "",
        ]
        notes = [
            *(f"{NEEDS_SCRIPT}: {change}" for change in script_changes(measured.candidate)),
            *file_settings(measured.candidate),
            *exported.notes,
            *(f"no {name}: {reason}" for name, reason in exported.missing.items()),
        ]
        lines += [line for note in notes for line in paragraph(note, first="- ")]
        texts[str(folder / "NOTES.txt")] = "\n".join(lines) + "\n"
    return texts


def pareto_front(measured: list[CandidateResult]) -> list[CandidateResult]:
    """The results that no other beats in both time and memory, fastest first."""
    front: list[CandidateResult] = []
    for result in sorted(measured, key=lambda m: (m.seconds, m.gpu_bytes)):
        if not front or result.gpu_bytes < front[-1].gpu_bytes:
            front.append(result)
    return front


def pareto_figure(tuning: TuneResult) -> Figure:
    """Step time over the fullest GPU's memory, one mark per simulated configuration."""
    points = [*tuning.measured, *(m for m in tuning.best if m not in tuning.measured)]
    scale, unit = time_scale(max(point.seconds for point in points))
    figure = Figure(layout(460, hovermode="closest"))
    front = pareto_front(points)
    figure.add_scatter(
        name="not beaten in both", mode="lines", x=[p.gpu_bytes / 1e9 for p in front],
        y=[p.seconds * scale for p in front], line={"color": TOTAL.color, "width": 1.5, "shape": "hv"},
        hoverinfo="skip",
    )  # fmt: skip
    groups = [
        ("simulated", points, {"color": COMMUNICATION.color, "size": 8, "opacity": 0.7}),
        ("best", list(tuning.best[:1]), {"color": _BEST, "size": 14, "symbol": "star"}),
    ]
    if tuning.given is not None:
        groups.append(
            ("as given", [tuning.given], {"color": CAPACITY.color, "size": 12, "symbol": "diamond"})
        )
    for name, members, marker in groups:
        figure.add_scatter(
            name=name, mode="markers", marker=marker,
            x=[p.gpu_bytes / 1e9 for p in members], y=[p.seconds * scale for p in members],
            hovertext=[_hover(p) for p in members], hoverinfo="text",
        )  # fmt: skip
    figure.update_xaxes(title_text="GB of the fullest GPU", rangemode="tozero", title_standoff=6)
    figure.update_yaxes(title_text=f"{unit} per step", rangemode="tozero", automargin=True)
    limit = tuning.best[0].row.get("gpu_capacity_bytes")
    if limit:
        figure.add_vline(
            x=limit / 1e9, line={"dash": "dash", "width": 2, "color": CAPACITY.color},
            text=f"capacity {format_bytes(limit)}",
        )  # fmt: skip
    return figure


def _hover(measured: CandidateResult) -> str:
    lines = label_of(measured).replace(", ", "<br>")
    return f"<b>{format_seconds(measured.seconds)}</b>, {format_bytes(measured.gpu_bytes)}<br>{lines}"


def steps_figure(tuning: TuneResult) -> Figure:
    """Step time after each change."""
    first = tuning.steps[0].seconds_before
    names = ["as given"] if first is not None else []
    seconds = [first] if first is not None else []
    for number, step in enumerate(tuning.steps, 1):
        names.append(f"{number}. " + ", ".join(change.key.rpartition(".")[2] for change in step.changes))
        seconds.append(step.after.seconds)
    scale, unit = time_scale(max(seconds))
    figure = Figure(layout(110 + 40 * len(names), showlegend=False))
    figure.add_bar(
        orientation="h", y=names, x=[value * scale for value in seconds],
        marker_color=[COMMUNICATION.color] * (len(names) - 1) + [_BEST],
        text=[format_seconds(value) for value in seconds], textposition="auto",
    )  # fmt: skip
    figure.update_xaxes(title_text=f"{unit} per step", rangemode="tozero", title_standoff=6)
    figure.update_yaxes(autorange="reversed", automargin=True, fixedrange=True)
    return figure
