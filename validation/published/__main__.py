"""Predict tables of published runs, and compare with the measurements.

python -m validation.published [RUNS.csv ...] [--json FILE] [--write-experiments DIR] [--fast] [--markdown]
                               [--baseline FILE] [--update-baseline]

The columns are those of this folder's tables, see README.md beside this file. Without a table the checkout's
own ones are predicted, and held to validation/baseline.json. Exit code 1 names what moved past its tolerance,
2 says what is wrong with a table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from validation.published.check import check_published
from validation.published.experiment_files import write_experiments
from validation.published.predict import shipped_tables
from validation.published.regimes import regime_table
from validation.published.table import read_runs
from zsim.commands.options import answer, is_output, print_file
from zsim.errors import InputError, ZsimError
from zsim.files import CHECKOUT, check_file
from zsim.study.check.baseline import Baseline, read_baseline
from zsim.study.check.check import CheckReport, report_lines, sample
from zsim.study.measured.error_summary import error_summaries, overall_error_summary, table_lines
from zsim.validated.runs import validated_runs

BASELINE = CHECKOUT / "validation" / "baseline.json"


def markdown_lines(report: CheckReport) -> list[str]:
    """The validated runs by framework and number of nodes, then the errors by source."""
    rows = report.measured.rows
    return [
        *regime_table(validated_runs()),
        "",
        *table_lines(error_summaries(rows), overall_error_summary(rows)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.write_experiments is not None:
            runs = read_runs(options.tables or shipped_tables()).runs
            folder = options.write_experiments
            written = write_experiments(sample(runs) if options.fast else runs, folder)
            answer(written.lines(folder), written.to_dict, options.json)
            return 0
        return _check(options)
    except ZsimError as error:
        print(f"validation.published: {error}", file=sys.stderr)
        return 2


def _check(options: argparse.Namespace) -> int:
    pins, base = _baseline(options)
    report = check_published(
        options.tables or shipped_tables(),
        base,
        baseline=pins,
        is_fast=options.fast,
        update=options.update_baseline,
    )
    lines: Iterable[str] = report_lines(report, is_long=bool(options.tables))
    answer(markdown_lines(report) if options.markdown else lines, report.to_dict, options.json)
    if options.update_baseline and pins is not None:
        pins.write()
        if not is_output(options.json):
            print_file("baseline", pins.path)
    return int(report.verdict == "fail")


def _baseline(options: argparse.Namespace) -> tuple[Baseline | None, Path]:
    """The baseline that applies, and the folder to which names of tables are relative."""
    path: Path | None = options.baseline
    if path is None and options.tables:
        if options.update_baseline:
            raise InputError("--update-baseline: expected --baseline FILE, the file to write")
        return None, Path.cwd()
    if path is None:
        return read_baseline(BASELINE), CHECKOUT
    if options.update_baseline:
        check_file(path)
        if not path.exists():
            return Baseline(path), path.parent
    return read_baseline(path), path.parent


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m validation.published",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tables", nargs="*", type=Path, metavar="RUNS.csv")
    switches: Mapping[str, str] = {
        "--fast": "some rows of each source only",
        "--markdown": "print the errors by source in Markdown",
        "--update-baseline": "pin what is found now into the baseline",
    }
    files: Mapping[str, str] = {
        "--json": "write every row as JSON; - for standard output",
        "--write-experiments": "write every row as an experiment file, and check nothing",
        "--baseline": "what was pinned; a change past its tolerance is a miss",
    }
    for name, sentence in switches.items():
        parser.add_argument(name, action="store_true", help=sentence)
    for name, sentence in files.items():
        parser.add_argument(
            name, type=Path, metavar="DIR" if "experiments" in name else "FILE", help=sentence
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
