"""A tuned configuration in words: a table of the best few, what limits each, the changes to make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zsim.report.views.meanings import BREAKDOWN
from zsim.report.views.text.plain import Column, paragraph, table
from zsim.specs.experiment.labels import gpus_label
from zsim.specs.experiment.resolve import resolve
from zsim.specs.formats.export import export_files
from zsim.study.differences import is_told_apart, range_of_row, row_words, verdict_of_row
from zsim.study.tune.days import RunDays
from zsim.study.tune.evaluate import Measured
from zsim.study.tune.explain import Change, TuningStep
from zsim.study.tune.tellings import script_changes, told_in_file
from zsim.study.tune.tune import Tuned
from zsim.units import format_bytes, format_duration, format_gpus, format_seconds
from zsim.validated.ratios import NO_DIFFERENCE
from zsim.validated.verdict import verdict_content


def tuned_lines(tuned: Tuned) -> Iterator[str]:
    """The output of `zsim tune`, within 80 columns."""
    yield subject(tuned)
    yield verdict(tuned)
    yield from _days(tuned)
    if tuned.settled:
        yield from paragraph(tuned.settled, indent=2)
    yield ""
    yield from _table(tuned)
    if tuned.steps:
        yield ""
        yield from _changes(tuned)
    yield ""
    yield from paragraph(_counts(tuned))
    if (gain := tuned.at_most_better) is not None:
        yield from paragraph(
            f"The budget of simulations is used up: the {tuned.found.num_left:,} left could be at most "
            f"{percent(gain)} {'cheaper' if tuned.goal == 'cheapest' else 'faster'} by their bounds "
            "(--simulations allows more)"
        )
    for reason, count in _reasons(tuned.refused):
        yield from paragraph(f"{count} refused: {reason}", indent=4)


def _days(tuned: Tuned) -> Iterator[str]:
    """The run of days of the best configuration, and of the experiment's."""
    best = tuned.best[0].days
    if best is None:
        return
    yield from paragraph(days_words(best), indent=2)
    if tuned.given is not None and tuned.given.days is not None:
        yield from paragraph(f"as given: {days_words(tuned.given.days)}", indent=2)


def days_words(days: RunDays) -> str:
    """E.g. "3.88 days, 99.3 % goodput: mode async, saves 8.0 min apart"."""
    if days.error is not None:
        return f"no run: {days.error}"
    return (
        f"{days.days:.2f} days, {percent(days.goodput_fraction)} goodput: mode {days.mode}, saves "
        f"{format_duration(days.interval_seconds)} apart"
    )


def subject(tuned: Tuned) -> str:
    """The title, e.g. "llama-3-8b | dgx-h100 | 16 GPUs"."""
    job, gpus = tuned.best[0].candidate.base.job, tuned.best[0].gpus
    used = gpus_label(job) if gpus == job.world_size else format_gpus(gpus)
    return f"{job.model.name} | {job.cluster.name} | {used}"


def verdict(tuned: Tuned) -> str:
    """The result in one line, e.g. "fastest: 4.44 s per step, 12.1 % less than the 5.05 s given"."""
    best = tuned.best[0]
    said = f"{tuned.goal}: {format_seconds(best.seconds)} per step"
    if tuned.given is None:
        return said + "; what was given " + ("does not fit" if tuned.given_memory else "is refused")
    if best.days is not None:
        return said + f" ({format_seconds(tuned.given.seconds)} given)"
    if tuned.goal != "fastest":
        return said
    gain = 1 - best.seconds / tuned.given.seconds
    given = format_seconds(tuned.given.seconds)
    if gain <= 5e-4:
        return f"{said}, as given"
    told = "" if is_told_apart(best.row, tuned.given.row) else f": {NO_DIFFERENCE}"
    return f"{said}, {percent(gain)} less than the {given} given{told}"


def percent(fraction: float) -> str:
    return f"{fraction * 100:.1f} %"


NEEDS_SCRIPT = "needs a change of the script"


def doubts(measured: Measured) -> list[str]:
    """The verdict on a configuration and its odds, unless it fits."""
    verdict = verdict_of_row(measured.row)
    return [] if verdict is None or verdict.word == "fits" else [f"{verdict.word}, {verdict.odds}"]


_SHARES = {f"{name}_seconds": meaning.label for name, meaning in BREAKDOWN.items()}


def limits_of(measured: Measured) -> str:
    """The parts of the step, largest first: "compute 94 %, exposed communication 4 %"."""
    shares = {name: measured.row[key] / measured.seconds for key, name in _SHARES.items()}
    largest_first = sorted(shares.items(), key=lambda entry: -entry[1])
    return ", ".join(f"{name} {share * 100:.0f} %" for name, share in largest_first if share >= 0.005)


_COLUMNS = [Column(title) for title in ("", "step", "tokens/s/GPU", "MFU", "GPU memory", "GPUs")]


def _table(tuned: Tuned) -> Iterator[str]:
    """A row for each of the best configurations and for the experiment's. Below each stand its label and its
    limits.
    """
    best = tuned.best[0]
    shown = [(str(place), label_of(measured), measured) for place, measured in enumerate(tuned.best, 1)]
    if tuned.given is not None and all(m.candidate is not tuned.given.candidate for m in tuned.best):
        shown.append(("-", "as given", tuned.given))
    heading, *lines = table(_COLUMNS, [_cells(place, measured) for place, _, measured in shown])
    yield heading
    for (place, label, measured), line in zip(shown, lines, strict=True):
        yield line
        said = [label, row_words(measured.row, best.row), limits_of(measured)]
        said += [days_words(measured.days)] if measured.days is not None else []
        if place != "-":
            said += doubts(measured)
            said += [f"{NEEDS_SCRIPT}: {change}" for change in script_changes(measured.candidate)]
        for words in said:
            yield from paragraph(words, first=4)


def _cells(place: str, measured: Measured) -> list[str]:
    row = measured.row
    return [
        place,
        format_seconds(measured.seconds),
        f"{row['tokens_per_second_per_gpu'] or 0.0:,.0f}",
        "-" if row["mfu_fraction"] is None else percent(row["mfu_fraction"]),
        format_bytes(measured.gpu_bytes),
        f"{measured.gpus:,}",
    ]


def label_of(measured: Measured) -> str:
    return measured.candidate.label or "as given"


def _changes(tuned: Tuned) -> Iterator[str]:
    yield "What to change, in order of gain, each simulated:"
    for number, step in enumerate(tuned.steps, 1):
        yield from paragraph(f"{number:>3} {step_words(step)}", indent=4)
        for change in step.changes:
            yield from paragraph(change_words(change), first=4)


def step_words(step: TuningStep) -> str:
    """E.g. "1.98 s -> 575.5 ms, 71.0 % less", and a remark if zsim cannot distinguish the two."""
    after = format_seconds(step.after.seconds)
    if step.before_seconds is None or step.gain_fraction is None:
        return f"does not fit -> {after}"
    said = f"{format_seconds(step.before_seconds)} -> {after}, {percent(step.gain_fraction)} less"
    return said if step.is_told_apart else f"{said}: {NO_DIFFERENCE}"


def change_words(change: Change) -> str:
    """E.g. "zero_optimization.stage: 3 -> 1", and the change of the script if no file can express it."""
    key = change.key.removeprefix("strategy.config.")
    text = f"{key}: {_shown(change.before)} -> {_shown(change.after)}"
    return f"{text} ({NEEDS_SCRIPT}: {change.script})" if change.script else text


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value is None else str(value)


def _counts(tuned: Tuned) -> str:
    """The counts of the search as a sentence. The counts before the bracket add up to all configurations.

    A configuration with many micro-batches is simulated as two steps of fewer. Refinements, changes and the
    experiment's configuration take further steps.
    """
    found = tuned.found
    counts = [
        f"{found.num_too_large:,} do{'es' if found.num_too_large == 1 else ''} not fit",
        f"{found.num_too_slow:,} cannot be faster",
        *([f"{found.num_left:,} left"] if found.num_left else []),
        *([f"{found.num_refused:,} refused"] if found.num_refused else []),
        f"{found.num_simulated:,} simulated",
    ]
    said = f"{found.num_candidates:,} configuration{'' if found.num_candidates == 1 else 's'}: "
    said += ", ".join(counts)
    if tuned.num_simulated == found.num_simulated:
        return said
    return f"{said} ({tuned.num_simulated:,} steps in all, with what was given and variations)"


def _reasons(refused: Mapping[str, int]) -> Sequence[tuple[str, int]]:
    return sorted(refused.items(), key=lambda entry: (-entry[1], entry[0]))[:3]


def tuned_to_dict(tuned: Tuned) -> dict[str, Any]:
    """The content of `zsim tune --json`: times in seconds, sizes in bytes, fractions from 0 to 1."""
    found = tuned.found
    return {
        "goal": tuned.goal,
        "settled": tuned.settled,
        "given": None if tuned.given is None else _measured_to_dict(tuned.given),
        "best": [_measured_to_dict(measured) for measured in tuned.best],
        "steps": [
            {
                "changes": [
                    {
                        "key": change.key,
                        "before": change.before,
                        "after": change.after,
                        "script_change": change.script or None,
                    }
                    for change in step.changes
                ],
                "before_seconds": step.before_seconds,
                "after_seconds": step.after.seconds,
                "gain_fraction": step.gain_fraction,
                "is_told_apart": step.is_told_apart,
            }
            for step in tuned.steps
        ],
        "configurations": found.num_candidates,
        "do_not_fit": found.num_too_large,
        "cannot_be_faster": found.num_too_slow,
        **_left(tuned),
        "refused": dict(tuned.refused),
        "refused_configurations": found.num_refused,
        "simulated_configurations": found.num_simulated,
        "simulated": tuned.num_simulated,
    }


def _left(tuned: Tuned) -> dict[str, Any]:
    """The entries on the candidates that the budget left unexamined, where there is a budget."""
    if tuned.budget is None:
        return {}
    return {
        "simulations_budget": tuned.budget,
        "left": tuned.found.num_left,
        "left_at_most_better_fraction": tuned.at_most_better,
    }


def _measured_to_dict(measured: Measured) -> dict[str, Any]:
    found = range_of_row(measured.row)
    return {
        "label": label_of(measured),
        "overrides": measured.candidate.overrides,
        "gpus": measured.gpus,
        "step_seconds": measured.seconds,
        "step_seconds_range": None if found is None else list(found),
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


def tuned_files(tuned: Tuned) -> dict[str, str]:
    """{path below the output folder: text}: `best/`, then `2/`, `3/` ... Each folder has its NOTES.txt."""
    found: dict[str, str] = {}
    for place, measured in enumerate(tuned.best, 1):
        folder = Path("best" if place == 1 else str(place))
        experiment = measured.candidate.experiment()
        exported = export_files(resolve(experiment))
        for name, text in exported.files.items():
            found[str(folder / name)] = text
        lines = [
            label_of(measured),
            f"{format_seconds(measured.seconds)} per step on {measured.gpus} GPUs, "
            f"{format_bytes(measured.gpu_bytes)} on the fullest; {measured.row['limit']}",
            "",
        ]
        told = [
            *(f"{NEEDS_SCRIPT}: {change}" for change in script_changes(measured.candidate)),
            *told_in_file(measured.candidate),
            *exported.notes,
            *(f"no {name}: {reason}" for name, reason in exported.missing.items()),
        ]
        lines += [line for note in told for line in paragraph(note, first="- ")]
        found[str(folder / "NOTES.txt")] = "\n".join(lines) + "\n"
    return found
