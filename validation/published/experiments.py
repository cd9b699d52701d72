"""Is every published row what its experiment file says?

python validation/published/experiments.py [RUNS.csv] [--processes N] [--fast]

Writes the rows as experiment files, loads and simulates each as `zsim run` does, and compares with the
prediction of `zsim check`: seconds and bytes must be equal, to the last digit. Exit code 1 names the rows
that differ. All 1,257 rows take about 25 minutes of one processor.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import zsim
from validation.published.experiment_files import write_experiments
from validation.published.predict import predict_row, shipped_tables
from validation.published.table import PublishedRun, read_runs
from zsim.specs.experiment.load import load_experiment
from zsim.study.check.check import sample


def difference(run: PublishedRun, folder: Path) -> str | None:
    """How the prediction from the row's file differs from the row's own; None if they are equal."""
    row, path = predict_row(run), write_experiments([run], folder).files.get(run.row_id)
    if path is None:
        return None if row.status == "skipped" else f"{run.row_id}: predicted, but not written"
    try:
        report = zsim.simulate(load_experiment(path)).report
    except zsim.ZsimError as error:
        return None if row.status == "skipped" else f"{run.row_id}: {error}"
    if row.predicted_seconds is None:
        return f"{run.row_id}: simulated, but not predicted ({row.reason})"
    held, framework = (
        report.peaks["gpu"].total,
        row.predicted_memory["device"] - row.predicted_memory["reserved"],
    )
    allocated = max(held, report.startup_bytes) - framework
    pairs = {"seconds": (report.step_seconds, row.predicted_seconds)}
    if "last rank" not in run.text("mem_kind"):  # a report's peaks are of the fullest rank
        pairs["bytes"] = (allocated, row.predicted_memory["allocated"])
    found = [
        f"{name}: {mine!r}, the table's {there!r}" for name, (mine, there) in pairs.items() if mine != there
    ]
    return f"{run.row_id}: {'; '.join(found)}" if found else None


def differences(runs: Iterable[PublishedRun], processes: int) -> Iterable[str]:
    """The differences of all rows, in order."""
    with tempfile.TemporaryDirectory(prefix="zsim-rows-") as folder:
        rows = list(runs)
        folders = [Path(folder)] * len(rows)
        if processes == 1:
            found = list(map(difference, rows, folders))
        else:
            with ProcessPoolExecutor(processes) as pool:
                found = list(pool.map(difference, rows, folders, chunksize=4))
    return [text for text in found if text is not None]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tables", nargs="*", type=Path, help="tables of published runs; else the shipped ones"
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--fast", action="store_true", help="some rows of each source")
    options = parser.parse_args()
    runs = read_runs(options.tables or shipped_tables()).runs
    runs = sample(runs) if options.fast else runs
    found = list(differences(runs, options.processes))
    for text in found:
        print(text)
    print(f"{len(runs):,} rows, {len(found):,} differ from their experiment files")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
