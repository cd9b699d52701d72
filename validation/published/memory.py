"""Published memory: rewrites the table that verdicts rest on (zsim/presets/validated_memory.csv), and prints
how often each word was right, how often jobs ran that were given a probability, and how many figures lie in
their range of 80 %, each source judged by the others. Rows are predicted as a stranger would write them,
without what was found out of their sources.

python validation/published/memory.py                    # the checkout's own rows
python validation/published/memory.py RUNS.csv ...       # and those of other tables, or of experiments with
                                                         # what was seen (memory_reports.json); recorded rows
                                                         # that are not among them stay as they are
python validation/published/memory.py --shown            # only print
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from validation.published.measured_experiments import memory_figures
from validation.published.memory_table import format_memory_table
from validation.published.predict import predict_row, shipped_tables
from validation.published.table import PublishedRun, read_runs
from zsim import Experiment
from zsim.api import simulate
from zsim.errors import ZsimError
from zsim.report.report import Report
from zsim.specs.experiment.load import change_experiment
from zsim.study.measured.prediction import RowResult
from zsim.validated.memory import (
    LEAST_LOAD,
    RAN,
    RAN_OUT,
    REPORT_ROLE,
    TABLE,
    MemoryRun,
    Outcome,
    estimate_memory_errors,
    memory_runs,
    read_memory,
)
from zsim.validated.verdict import Verdict, verdict_of

REPORTS = Path(__file__).parent / "memory_reports.json"
# What a row's `assumed` says and its experiment leaves out, for want of a key when it was written.
ASSUMED: dict[str, dict[str, Any]] = {
    "h3-lumen-mi300x-lora70b-0001": {  # frozen weights in fp8
        "strategy.distributed_optimizer": True,
        "strategy.fp8_param_gather": True,
    },
}
# Which figure is compared, of several: what tensors need first, what torch keeps last.
KINDS = ("active", "allocated", "reserved", "device")
OUTCOMES: dict[str, Outcome] = {"ok": RAN, "oom": RAN_OUT}
BINS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
NEAR = 0.15  # of the limit: where a verdict is in doubt


def main(arguments: Sequence[str]) -> None:
    if "--shown" not in arguments:
        known = {run.row_id: run for run in memory_runs()} if TABLE.exists() else {}
        given = [Path(name) for name in arguments]
        for run in rows_of([*shipped_tables(), REPORTS, *given]):
            known[run.row_id] = run
            print(run.row_id, f"{run.load:.3f}", run.outcome, run.error, flush=True)
        TABLE.write_text(format_memory_table(known[name] for name in sorted(known)), encoding="utf-8")
    print("\n".join(calibration_lines(read_memory(TABLE.read_text(encoding="utf-8")))))


# -- rows ---------------------------------------------------------------------------------------------------


def rows_of(paths: Iterable[Path]) -> Iterator[MemoryRun]:
    """The rows of tables (.csv) and of experiments (.json) that publish memory, or that it ran out."""
    own = {run.row_id for run in read_runs(shipped_tables()).runs}
    for path in paths:
        if path.suffix == ".json":
            yield from _of_experiments(path)
            continue
        runs = [run for run in read_runs([path]).runs if _says_memory(run)]
        if path not in shipped_tables():
            runs = [run for run in runs if run.row_id not in own]
        for run in runs:
            made = _of_result(run, predict_row(replace(run, is_strangers=True)))
            if made is not None:
                yield made


def _says_memory(run: PublishedRun) -> bool:
    figures = [f"mem_{kind}_gb" for kind in ("alloc", "active", "reserved")]
    is_device = "nvidia-smi" in run.text("mem_kind") and run.number("mem_other_gb")
    return bool(is_device or run.text("status") == "oom" or any(run.number(name) for name in figures))


def _of_result(run: PublishedRun, result: RowResult) -> MemoryRun | None:
    if result.predicted_load is None or result.validation is None or run.role not in ("report", "calibrate"):
        return None
    outcome = OUTCOMES.get(run.text("status"), "")
    measured = {} if outcome == RAN_OUT else result.measured_memory
    kind = next((name for name in KINDS if name in measured), "")
    return MemoryRun(
        row_id=run.row_id,
        source=run.source,
        role=run.role,
        framework=result.validation.features.framework,
        is_mixture=result.validation.features.is_mixture,
        load=result.predicted_load,
        exact=result.predicted_exact,
        retries=result.predicted_retries or 0.0,
        failures=result.predicted_failures or 0.0,
        outcome=outcome,
        kind=kind,
        error=log(measured[kind] / result.predicted_memory[kind]) if kind else None,
    )


def _of_experiments(path: Path) -> Iterator[MemoryRun]:
    """The rows of a list of `experiment`s with their `status` (ok, oom) and `measured_..._gb`."""
    for row in json.loads(path.read_text(encoding="utf-8")):
        measured = _measured(row)
        if row["status"] != "oom" and not measured and "reference" not in row:
            continue
        try:
            changes = {"simulation.known_to_fit": False, **ASSUMED.get(row["row_id"], {})}
            asked = change_experiment(Experiment(**row["experiment"]), changes)
            report = simulate(asked).report
        except ZsimError as error:
            print(f"{row['row_id']}: {error}", file=sys.stderr)
            continue
        yield _of_report(row, measured, report)


def _measured(row: dict[str, Any]) -> dict[str, int]:
    figures = {kind: row.get(f"measured_{kind}_gb") for kind in KINDS}
    return {kind: round(value * 1e9) for kind, value in figures.items() if value and row["status"] != "oom"}


def _of_report(row: dict[str, Any], measured: dict[str, int], report: Report) -> MemoryRun:
    allocator, predicted = report.allocator, memory_figures(report)
    kind = next((name for name in KINDS if name in measured), "")
    assert report.validation is not None
    load, exact = report.load_and_exact
    return MemoryRun(
        row_id=row["row_id"],
        source=row["source"],
        role="report",
        framework=report.validation.features.framework,
        is_mixture=report.validation.features.is_mixture,
        load=load,
        exact=exact,
        retries=0 if allocator is None else allocator.retries,
        failures=0 if allocator is None else allocator.failures,
        outcome=OUTCOMES[row["status"]],
        kind=kind,
        error=log(measured[kind] / predicted[kind]) if kind else None,
    )


# -- calibration --------------------------------------------------------------------------------------------


def judged(runs: Sequence[MemoryRun]) -> list[tuple[MemoryRun, Verdict]]:
    """Every run whose outcome was published, with the verdict on it by the runs of other sources."""
    others = _other_sources(runs)
    return [
        (
            run,
            verdict_of(
                run.load,
                run.framework,
                exact=run.exact or 0.0,
                is_short=run.runs_short,
                errors=_errors(run, others),
            ),
        )
        for run in runs
        if run.outcome
    ]


def _range_lines(runs: Sequence[MemoryRun]) -> Iterator[str]:
    """The errors of figures to which nothing is fitted, and how many lie in their range, by what the range is
    made from: jobs that use at least a quarter of their GPU."""
    figures = [
        run for run in runs if run.role == REPORT_ROLE and run.error is not None and run.load >= LEAST_LOAD
    ]
    others = _other_sources(figures)
    yield "| figures | rows | sources | error, rows | sources | in their range, rows | sources | its half |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for title, is_shown in (
        ("dense", lambda run: not run.is_mixture),
        ("mixtures of experts", lambda run: run.is_mixture),
        ("all", lambda run: True),
    ):
        by_source: dict[str, list[tuple[float, bool, float]]] = {}
        for run in filter(is_shown, figures):
            low, high = _errors(run, others).interval()
            need = exp(run.error or 0.0)
            found = abs(1 / need - 1), low <= need <= high, (high - low) / 2
            by_source.setdefault(run.source, []).append(found)
        rows = [row for found in by_source.values() for row in found]
        means = [[fmean(values) for values in zip(*found, strict=True)] for found in by_source.values()]
        (error, inside, half), (error_of_sources, inside_of_sources, _) = (
            [fmean(values) for values in zip(*table, strict=True)] for table in (rows, means)
        )
        yield (
            f"| {title} | {len(rows)} | {len(means)} | {error:.1%} | {error_of_sources:.1%} | {inside:.0%} | "
            f"{inside_of_sources:.0%} | {half:.0%} |"
        )


def _other_sources(runs: Sequence[MemoryRun]) -> dict[str, list[MemoryRun]]:
    """By source the runs of all others."""
    return {source: [run for run in runs if run.source != source] for source in {run.source for run in runs}}


def _errors(run: MemoryRun, others: dict[str, list[MemoryRun]]) -> Any:
    return estimate_memory_errors(run.framework, others[run.source], is_mixture=run.is_mixture)


def calibration_lines(runs: Sequence[MemoryRun]) -> list[str]:
    """How often each word was right, and how often jobs ran by the probability they were given."""
    found = judged(runs)
    near = [(run, verdict) for run, verdict in found if abs(log(run.load)) <= NEAR]
    lines = [
        f"{len(found)} verdicts of {len({run.source for run, _ in found})} sources; within {NEAR:.0%} of the "
        f"limit {len(near)} of {len({run.source for run, _ in near})}",
        "",
        "| word | jobs | ran | out of memory | likelier way right |",
        "|---|---:|---:|---:|---:|",
    ]
    words = ("fits", "fits barely", "runs short", "likely does not fit", "does not fit")
    lines += [
        *(_counts(word, [pair for pair in found if pair[1].word == word]) for word in words),
        _counts("all", found),
        _counts("near the limit", near),
        "",
        "| probability given | jobs | mean given | ran |",
        "|---|---:|---:|---:|",
    ]
    for low, high in pairwise(BINS):
        inside = [p for p in found if low <= p[1].probability < high or high == 1 == p[1].probability]
        if inside:
            given = sum(verdict.probability for _, verdict in inside) / len(inside)
            ran = sum(run.outcome == RAN for run, _ in inside) / len(inside)
            lines.append(f"| {low:.0%} to {high:.0%} | {len(inside)} | {given:.0%} | {ran:.0%} |")
    return [
        *lines,
        "",
        *_range_lines(runs),
        "",
        _share_line(runs),
        "",
        f"Brier score {brier(found):.3f}; of a plain yes or no at the limit {plain_brier(found):.3f}; "
        f"near the limit {brier(near):.3f} and {plain_brier(near):.3f}",
    ]


def uncertain_share(runs: Sequence[MemoryRun]) -> tuple[float, int, int]:
    """Of the bytes of runs to which nothing is fitted the share that is not a model state, the mean of
    sources, and the numbers of rows and of sources behind it.
    """
    shares: dict[str, list[float]] = {}
    for run in runs:
        if run.role == REPORT_ROLE and run.exact and run.load >= LEAST_LOAD:
            shares.setdefault(run.source, []).append(1 - run.exact / run.load)
    count = sum(map(len, shares.values()))
    return fmean(fmean(each) for each in shares.values()), count, len(shares)


def _share_line(runs: Sequence[MemoryRun]) -> str:
    share, rows, sources = uncertain_share(runs)
    return f"UNCERTAIN_SHARE {share:.2f}: mean of {sources} sources, {rows} rows"


def _counts(name: str, pairs: Sequence[tuple[MemoryRun, Verdict]]) -> str:
    ran = sum(run.outcome == RAN for run, _ in pairs)
    right = sum((run.outcome == RAN) == verdict.is_likely for run, verdict in pairs)
    return f"| {name} | {len(pairs)} | {ran} | {len(pairs) - ran} | {right} of {len(pairs)} |"


def brier(pairs: Sequence[tuple[MemoryRun, Verdict]]) -> float:
    """The mean squared difference of the probability and the outcome: 0 is perfect, 0.25 a coin."""
    return sum((verdict.probability - (run.outcome == RAN)) ** 2 for run, verdict in pairs) / len(pairs)


def plain_brier(pairs: Sequence[tuple[MemoryRun, Verdict]]) -> float:
    """The same for a yes where the peak is within the usable bytes, without a probability."""
    return sum(((run.load <= 1) != (run.outcome == RAN)) for run, _ in pairs) / len(pairs)


if __name__ == "__main__":
    main(sys.argv[1:])
