"""The memory profile of an experiment, by owner, without simulating it. Several variants can be compared."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from zsim.api import simulate
from zsim.errors import InputError, ZsimError, check_choice, shorten
from zsim.plan.make import make_plan, moments_of
from zsim.plan.memory.capacity import framework_memory, usable_bytes_of_fullest_gpu
from zsim.plan.memory.tensors import MemoryKey
from zsim.plan.moments import JobMoment
from zsim.plan.ops import state_bytes
from zsim.report.job_features import framework_title
from zsim.report.memory import Holder, MemoryProfile, Moment, Remedy, holders, memory_profile
from zsim.report.report import Report
from zsim.report.views.displayable import Displayable, DisplayableList, Figures
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.meanings import CAPACITY, MEMORY
from zsim.report.views.result import Column
from zsim.report.views.text.plain import named_columns, table
from zsim.report.views.text.sentences import format_remedy
from zsim.specs.experiment.job import Job, gpus_label, strategy_label
from zsim.specs.experiment.load import ExperimentSource, change_experiment, experiment_of, plain_table
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.expert_layer import has_experts
from zsim.study.sweep.points import Point
from zsim.study.tune.remedy import remedy_of
from zsim.units import GIGABYTES, format_bytes, format_seconds, format_setting
from zsim.validated.verdict import Verdict, mark_meanings, verdict_content, verdict_of

BY = ("category", "phase", "time")
_LIMIT = 12  # rows of each table
_PHASES = ("forward", "recompute", "backward", "optimizer")
_SHORT = {"parameters": "params", "gradients": "grads", "optimizer_states": "states",
          "activations": "activ.", "buffers": "buffers", "framework": "other"}  # fmt: skip
_LABEL_COLUMNS, _LABEL_COLUMNS_OF_TIME = 23, 32


@dataclass(frozen=True, repr=False)
class MemoryResult(Displayable):
    """A job and the memory of its fullest GPU over a step, by owner."""

    job: Job
    profile: MemoryProfile
    capacity_bytes: int
    """The bytes that are available to tensors."""
    moments: tuple[JobMoment, ...] = ()
    """Moments of the job outside of its step that need memory too."""
    remedy: Remedy | None = None
    """The fewest switches that make it fit. None where that was not asked for."""

    @property
    def load_and_exact(self) -> tuple[float, float]:
        """GPU bytes as a fraction of the usable ones, the larger of the step's and those of any moment that
        the job passes through, and the part of it that model states are, 0 for a moment.
        """
        peak = self.profile.peak
        certain = [(moment.gpu_bytes or 0, 0) for moment in self.moments if moment.is_certain]
        load, exact = max([(peak.total, state_bytes(peak.by_category)), *certain])
        return load / self.capacity_bytes, exact / self.capacity_bytes

    @property
    def fits(self) -> bool:
        """Whether all tensors have room, by zsim's best estimate."""
        return self.profile.peak.total <= self.capacity_bytes

    @property
    def verdict(self) -> Verdict:
        """Whether the job fits, judged by its tensors: torch's allocator is not simulated."""
        (load, exact), title = self.load_and_exact, framework_title(self.job)
        return verdict_of(load, title, exact=exact, is_mixture=has_experts(self.job.model))

    def records(self) -> Sequence[Mapping[str, Any]]:
        """The owners of the memory at the peak, the blocks of one kind in one row, largest first."""
        return [asdict(row) for row in self.holders()]

    def holders(self) -> list[Holder]:
        """Owners of the memory at the peak, the blocks of one kind combined."""
        return holders(self.profile.at_peak)

    def headline(self) -> str:
        peak, capacity = format_bytes(self.profile.peak.total), format_bytes(self.capacity_bytes)
        return f"{self._job()} | peak {peak} of {capacity}: {self.verdict.word}"

    def lines(self, limit: int = _LIMIT) -> Iterator[str]:
        """The tables, with `limit` rows each (0: all)."""
        yield f"{self._job()}\n"
        yield from profile_lines(
            self.profile, self.verdict, capacity_bytes=self.capacity_bytes, limit=limit,
            has_allocator=self.job.cluster.gpu.has_caching_allocator,
        )  # fmt: skip
        if self.moments:
            yield ""
            yield from moment_lines(self.moments)
        if self.remedy is not None:
            yield "\n" + textwrap.fill(format_remedy(self.remedy), 80, break_on_hyphens=False)

    def to_dict(self) -> dict[str, Any]:
        """The object that `zsim memory --json` writes."""
        content = {
            "capacity_bytes": self.capacity_bytes,
            "fits": self.fits,
            **verdict_content(self.verdict),
            **self.profile.to_dict(),
            "moments": [asdict(row) for row in self.moments],
        }
        if not self.fits:
            content["remedy"] = None if self.remedy is None else asdict(self.remedy)
        return content

    def plots(self) -> Figures:
        rows = [(moment.phase, moment.by_category) for moment in self.profile.phases]
        return {"phases": lambda: _stacked_bars(rows, self.capacity_bytes)}

    def _job(self) -> str:
        job = self.job
        return f"{job.model.name} | {strategy_label(job)} | {job.cluster.name} | {gpus_label(job)}"


def profile_memory(experiment: Experiment) -> MemoryResult:
    """The memory profile that the plan's allocations and frees add up to. Its peak equals the simulated one.

    Raises InputError and NotSimulatedError as `simulate` does.
    """
    job = resolve(experiment)
    plan = make_plan(job)
    return MemoryResult(
        job,
        memory_profile(plan, [framework_memory(job, plan)]),
        usable_bytes_of_fullest_gpu(job, plan),
        moments_of(job, plan),
    )


@dataclass(frozen=True)
class Variant:
    """One combination of the varied keys."""

    overrides: Mapping[str, Any]
    profiled: MemoryResult | None = None
    report: Report | None = None
    """The simulated step, if the combination was simulated too."""
    error: str = ""
    """The reason why the combination cannot be planned."""

    @property
    def verdict(self) -> Verdict:
        """The verdict on the simulated step, or by the tensors alone if the combination was only planned."""
        if self.report is not None:
            return self.report.verdict
        assert self.profiled is not None, "a combination with an error has no verdict"
        return self.profiled.verdict


def compare_memory(
    experiment: Experiment, axes: Mapping[str, Sequence[Any]], *, simulates: bool = False
) -> Iterator[Variant]:
    """The memory of every combination of the dotted keys' values, with the last key varying fastest. With
    `simulates` the step is simulated too. A combination that is no valid experiment is yielded with its
    error.

    Raises InputError, before the first row, for a value that is invalid in every combination.
    """
    if not axes:
        raise InputError("nothing to vary; expected keys with values")
    points = []
    for number, combination in enumerate(itertools.product(*axes.values())):
        overrides = dict(zip(axes, combination, strict=True))
        points.append(Point.of(number, overrides, partial(change_experiment, experiment, overrides)))
    for key, values in axes.items():
        for value in values:
            errors = [point.error for point in points if point.values[key] == value]
            if all(errors):
                raise InputError(f"{key} = {value}: {errors[0]}")
    return _variants(points, simulates)


def _variants(points: Sequence[Point], simulates: bool) -> Iterator[Variant]:
    for point in points:
        if point.experiment is None:
            yield Variant(point.values, error=point.error or "")
            continue
        try:
            profiled = profile_memory(point.experiment)
            report = simulate(point.experiment).report if simulates else None
        except ZsimError as error:
            yield Variant(point.values, error=str(error))
        else:
            yield Variant(point.values, profiled, report)


@dataclass(frozen=True, repr=False, eq=False)
class MemoryVariants(DisplayableList[Variant]):
    """The memory of every combination of the varied keys. A combination that is no valid experiment has its
    reason in `error`."""

    items: tuple[Variant, ...]
    keys: tuple[str, ...]
    by: str = "category"

    def records(self) -> Sequence[Mapping[str, Any]]:
        """One row per combination: its settings, `fits`, the peak's bytes by category, and its step where
        simulated."""
        rows = []
        for variant in self.items:
            row: dict[str, Any] = {key: variant.overrides[key] for key in self.keys}
            if variant.profiled is not None:
                peak = variant.profiled.profile.peak
                row |= {
                    "fits": variant.profiled.fits,
                    **verdict_content(variant.verdict),
                    "peak_bytes": peak.total,
                }
                row |= {f"peak_bytes.{name}": size for name, size in peak.by_category.items()}
            if variant.report is not None:
                row["step_seconds"] = variant.report.step_seconds
                row["tokens_per_second_per_gpu"] = variant.report.tokens_per_second_per_gpu
            rows.append(row | ({"error": variant.error} if variant.error else {}))
        return rows

    def columns(self) -> Sequence[str]:
        timed = ["step_seconds", "tokens_per_second_per_gpu"] if self.by == "time" else []
        failed = ["error"] if any(variant.error for variant in self.items) else []
        return [*self.keys, "fits", "verdict", "fits_probability", "peak_bytes", *timed, *failed]

    def lines(self) -> Iterator[str]:
        yield variants_heading(self.keys, self.by)
        for variant in self.items:
            yield variant_words(variant, self.by)
        yield from self.legend()

    def legend(self) -> Iterator[str]:
        """The meaning of the marks in the lines."""
        words = {variant.verdict.word for variant in self.items if variant.profiled is not None}
        yield from mark_meanings(words)
        if self.by == "time" and "does not fit" in words:
            yield "The steps of jobs that do not fit assume that they do."
        if self.by != "time" and words - {"does not fit"}:
            yield "Judged by tensors alone; --by time also marks where torch's allocator runs short"

    def to_dict(self) -> list[dict[str, Any]]:
        """The array that `zsim memory --vary ... --json` writes."""
        return [_variant_dict(variant) for variant in self.items]

    def plots(self) -> Figures:
        rows = [
            (variant_label(variant), variant.profiled.profile.peak.by_category)
            for variant in self.items
            if variant.profiled is not None
        ]
        limits = [variant.profiled.capacity_bytes for variant in self.items if variant.profiled is not None]
        return {"peaks": lambda: _stacked_bars(rows, max(limits))} if rows else {}


def memory(
    experiment: ExperimentSource = None,
    *,
    vary: Mapping[str, Iterable[Any]] | None = None,
    by: str = "category",
    overrides: Mapping[str, Any] | None = None,
    on_variant: Callable[[Variant], None] | None = None,
) -> MemoryResult | MemoryVariants:
    """Who holds a GPU's memory, and when, as `zsim memory` says. Nothing is simulated where it fits.

    `vary` holds dotted keys and their values. The answer is then a `MemoryVariants` with every combination,
    and `by` "time" also simulates each step. `on_variant` is called with each as it is done.

        zsim.memory("experiment.toml").to_frame()                      # owners at the peak
        zsim.memory("experiment.toml", vary={"training.micro_batch_size": [1, 2, 4]})

    Raises InputError for an unknown key, and where no combination is an experiment.
    """
    check_choice(f"--by {by}: ", by, BY)
    resolved_experiment = experiment_of(experiment, overrides)
    if not vary:
        if by != "category":
            raise InputError(f"--by {by} is for --vary; `zsim run` simulates one experiment")
        profiled = profile_memory(resolved_experiment)
        return profiled if profiled.fits else replace(profiled, remedy=remedy_of(resolved_experiment))
    axes = {key: [plain_table(value) for value in values] for key, values in vary.items()}
    variants = []
    for variant in compare_memory(resolved_experiment, axes, simulates=by == "time"):
        variants.append(variant)
        if on_variant is not None:
            on_variant(variant)
    if all(variant.error for variant in variants):
        raise InputError(variants[0].error)
    return MemoryVariants(tuple(variants), tuple(axes), by)


def variants_heading(keys: Iterable[str], by: str) -> str:
    """The line above those of `variant_words`."""
    subject = ", ".join(key.rpartition(".")[2] for key in keys)
    if by == "time":
        return f"{_label(subject, by)}{'peak GB':>9}{'in':>11}{'step':>13}{'tokens/s/GPU':>15}"
    return f"{_label(subject, by)}{_cells(_PHASES if by == 'phase' else _SHORT.values(), by)}{'peak GB':>9}"


def variant_words(variant: Variant, by: str) -> str:
    """One combination in a line: GB of each category at the peak, or the maximum of each phase, or the step's
    time, and the peak with the verdict's mark.
    """
    label = variant_label(variant)
    if variant.profiled is None:
        message = shorten(variant.error.removeprefix("experiment: "), 78 - _LABEL_COLUMNS)
        return f"{_label(label, '')}  {message}"
    profile, report = variant.profiled.profile, variant.report
    peak = profile.peak
    total = f"{peak.total / 1e9:.2f}{variant.verdict.mark}"
    if report is not None:
        tokens = report.tokens_per_second_per_gpu
        rate = "-" if tokens is None else f"{tokens:,.0f}"
        return (
            f"{_label(label, 'time')}{total:>9}{peak.phase:>11}{format_seconds(report.step_seconds):>13}"
            f"{rate:>15}"
        )
    highest = {moment.phase: moment.total for moment in profile.phases}
    sizes = [highest.get(name, 0) for name in _PHASES] if by == "phase" else peak.by_category.values()
    return f"{_label(label, by)}{_cells((f'{size / 1e9:.2f}' for size in sizes), by)}{total:>9}"


def _label(text: str, by: str) -> str:
    width = _LABEL_COLUMNS_OF_TIME if by == "time" else _LABEL_COLUMNS
    return f"{shorten(text, width - 1):<{width}}"


def _cells(texts: Iterable[str], by: str) -> str:
    return "".join(f"{text:>{12 if by == 'phase' else 8}}" for text in texts)


def variant_label(variant: Variant) -> str:
    """The values of the varied keys."""
    return ", ".join(_format_value(value) for value in variant.overrides.values())


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_format_value(inner)}" for key, inner in value.items()) or "as the rest"
    return format_setting(value)


def _variant_dict(variant: Variant) -> dict[str, Any]:
    row: dict[str, Any] = {"overrides": variant.overrides}
    if variant.profiled is None:
        return row | {"error": variant.error}
    row |= {"fits": variant.profiled.fits, **verdict_content(variant.verdict)}
    row["peak"] = variant.profiled.profile.to_dict()["peak"]
    if variant.report is not None:
        allocator = variant.report.allocator
        row["may_run_out"] = allocator is not None and allocator.may_run_out
        row["step_seconds"] = variant.report.step_seconds
        row["tokens_per_second_per_gpu"] = variant.report.tokens_per_second_per_gpu
    return row


def _stacked_bars(rows: Sequence[tuple[str, Mapping[str, int]]], capacity: int) -> Figure:
    """Bytes by category, a bar per row, against the capacity."""
    figure = Figure(layout(150 + 40 * len(rows), barmode="stack"))
    for name, meaning in MEMORY.items():
        sizes = [by_category.get(name, 0) / 1e9 for _, by_category in rows]
        if any(sizes):
            figure.add_bar(
                name=meaning.label, orientation="h", y=[label for label, _ in rows], x=sizes,
                marker_color=meaning.color, hovertemplate="%{y}: %{x:.2f} GB",
            )  # fmt: skip
    figure.add_vline(
        x=capacity / 1e9, line={"dash": "dash", "width": 2, "color": CAPACITY.color}, text="capacity"
    )
    figure.update_xaxes(title_text="GB", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", automargin=True, type="category")
    return figure


# -- the profile as text of at most 80 columns --------------------------------------------------------------


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
    yield f"      at '{shorten(peak.name, 43)}', op {peak.op + 1:,} of {profile.num_ops:,}"
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
    units = holders({key: size for key, size in profile.highest.items() if key[1]}, "buffers")
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
