"""Published runs predicted as a stranger would write them: without what was found out of their sources.

    python -m validation.published.strangers [RUNS.csv ...] [--seconds N]

predicts the rows of the checkout's tables, and of the given ones, that are not in strangers.csv yet, and adds
them as they come: at most `MOST` of a source, in an order drawn once and source by source in turn, so that
any beginning of it is a sample. A row of which nothing was found out has one prediction, and its error is
taken from the table of validated runs. Delete strangers.csv to predict all again (about an hour).
`accuracy.py` makes the ranges and the first tables of docs/accuracy.md from it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from validation.published.job import row_experiment
from validation.published.predict import (
    is_recomputation_assumed,
    measured_seconds,
    predict_row,
    shipped_tables,
)
from validation.published.recorded import merge_runs, recorded_runs
from validation.published.shipped import format_validated_table
from validation.published.table import PublishedRun, read_runs
from validation.published.validation_rows import validated_run_of
from zsim.errors import NotSimulatedError
from zsim.validated.runs import TABLE as STUDIED
from zsim.validated.runs import ValidatedRun, read_validated

TABLE = Path(__file__).resolve().parent / "strangers.csv"
MOST = 30  # rows of a source; every source counts once, however many it has
_SEED = 1
_AT_ONCE = 10


def parse_options(description: str | None) -> argparse.Namespace:
    """The tables besides the checkout's, and the seconds after which no row is begun."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", type=Path, nargs="*")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after so many")
    return parser.parse_args()


def main() -> None:
    options = parse_options(__doc__)
    began = time.monotonic()
    runs = {run.row_id: run for run in strangers_runs()}
    chosen = sample(read_runs([*shipped_tables(), *options.tables]).runs)
    own = {run.row_id for run in read_runs(shipped_tables()).runs}
    studied = {
        run.row_id: run
        for run in merge_runs([run for run in _read(STUDIED) if run.row_id in own], recorded_runs())
    }
    todo = [run for run in chosen if run.row_id not in runs]
    print(f"{len(chosen)} rows, {len(todo)} to predict", flush=True)
    for number, run in enumerate(todo):
        if time.monotonic() - began > options.seconds:
            break
        found = stranger_run(run, studied)
        if found is not None:
            runs[run.row_id] = found
        if number % _AT_ONCE == 0:
            write(runs.values())
    write(runs.values())
    print(f"{len(runs)} rows in {TABLE}")


def _read(path: Path) -> Sequence[ValidatedRun]:
    return read_validated(path.read_text(encoding="utf-8"))


def strangers_runs(path: Path = TABLE) -> list[ValidatedRun]:
    """The runs predicted as a stranger would. Empty without a file."""
    return list(_read(path)) if path.exists() else []


def write(runs: Iterable[ValidatedRun], path: Path = TABLE) -> None:
    path.write_text(format_validated_table(sorted(runs, key=lambda run: run.row_id)), encoding="utf-8")


def join_strangers(runs: Iterable[ValidatedRun], strangers: Iterable[ValidatedRun]) -> list[ValidatedRun]:
    """The runs with the errors that strangers would make, and after them the strangers' that are not among
    them."""
    found = {run.row_id: run for run in strangers}
    joined = [
        run
        if (same := found.get(run.row_id)) is None
        else replace(
            run, stranger_error=same.stranger_error, input_fast=same.input_fast, input_slow=same.input_slow
        )
        for run in runs
    ]
    known = {run.row_id for run in joined}
    return [*joined, *(run for name, run in found.items() if name not in known)]


def sample(runs: Iterable[PublishedRun]) -> list[PublishedRun]:
    """At most `MOST` rows of each source whose step was published, one of every source in turn, in an order
    drawn once."""
    by_source: dict[str, dict[str, PublishedRun]] = {}
    for run in runs:
        if run.role != "trend" and run.text("tier") in ("A", "B", "") and measured_seconds(run):
            by_source.setdefault(run.source, {}).setdefault(run.row_id, run)
    drawn = []
    for source in sorted(by_source):
        rows = list(by_source[source].values())
        Random(f"{_SEED} {source}").shuffle(rows)
        drawn.append(rows[:MOST])
    return list(_in_turn(drawn))


def _in_turn(lists: Sequence[Sequence[PublishedRun]]) -> Iterator[PublishedRun]:
    for place in range(max(map(len, lists), default=0)):
        yield from (rows[place] for rows in lists if place < len(rows))


def stranger_run(run: PublishedRun, studied: Mapping[str, ValidatedRun]) -> ValidatedRun | None:
    """The row with both errors, as studied and as a stranger's, or None if it cannot be predicted so."""
    strangers = replace(run, is_strangers=True)
    known = studied.get(run.row_id)
    if known is not None and not is_recomputation_assumed(strangers) and is_read_alike(run):
        return replace(known, stranger_error=known.error)
    found = validated_run_of(strangers, predict_row(strangers))
    if found is None:
        return None
    if known is None:
        known = found if is_read_alike(run) else validated_run_of(run, predict_row(run))
    return replace(found, error=found.error if known is None else known.error, stranger_error=found.error)


def is_read_alike(run: PublishedRun) -> bool:
    """Whether nothing that was found out of the row's source changes its experiment."""
    try:
        alike, studied = (row_experiment(replace(run, is_strangers=word)) for word in (True, False))
    except NotSimulatedError:
        return False
    return alike.experiment == studied.experiment


if __name__ == "__main__":
    main()
