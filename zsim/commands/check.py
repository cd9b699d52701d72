"""`zsim check`: today's predictions against what was recorded, measured, or pinned."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zsim.commands.options import (
    AllowCode,
    answer,
    file_option,
    is_output,
    json_option,
    permission,
    print_file,
)
from zsim.errors import InputError
from zsim.files import check_file, write_atomically

if TYPE_CHECKING:
    from zsim.study.check.baseline import Baseline


def check(
    targets: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[CASE|TRACE|RUNS.csv]...",
            help="Recorded cases, traces, tables of measured runs, experiments, or folders of them; without "
            "any, what the baseline pins, or all of the source checkout (traces/, validation/).",
            show_default=False,
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What was pinned; a change past its tolerance is a miss."),
    ] = None,
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Pin what is found now into the baseline.")
    ] = False,
    tolerance: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]FRACTION", help="Of traces against their experiments, as in zsim compare."
        ),
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Some rows of each source of a table only.")] = False,
    write_experiments: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write every row of the tables as an experiment file, and check nothing.",
            show_default=False,
        ),
    ] = None,
    allow_code: AllowCode = False,
    json_: Annotated[Path | None, json_option("every row")] = None,
    junit: Annotated[Path | None, file_option(help="Write JUnit XML, as CI systems read it.")] = None,
    markdown: Annotated[
        bool,
        typer.Option(
            "--markdown", help="Print the errors of tables of measured runs by source, in Markdown."
        ),
    ] = False,
) -> None:
    """Is everything still predicted as it was measured, and as it was pinned?

    Exit code 1 names what moved past its tolerance. Inconclusive checks fail nothing and pass nothing.

    RUNS.csv is a table of your own runs, a row each. Its columns are row_id, source (optional), keys of the
    experiment file (model, cluster, nodes, training.micro_batch_size, strategy.kind ...) as --set takes them,
    and outcomes, which may be empty: step_seconds, tokens_per_second_per_gpu, gpu_bytes, fits.
    """
    from zsim.comparison.verdict import Tolerances
    from zsim.study.check.check import COUNTED, junit_xml, report_lines, run_check
    from zsim.study.check.targets import checkout
    from zsim.study.measured.error_summary import error_summaries, overall_error_summary, table_lines
    from zsim.study.progress import Counts

    if markdown and not targets:
        raise InputError("--markdown: expected a table of measured runs, RUNS.csv")
    if write_experiments is not None:
        _write_experiments(list(targets or []), write_experiments, json_)
        return
    pins, base = _baseline(baseline, bool(targets), update_baseline)
    paths = list(targets or [])
    if not paths and baseline is not None:
        paths = _pinned_paths(pins, base)
    elif not paths:
        base = checkout()
        paths = [base / "validation" / "published", base / "validation" / "curves", base / "traces"]
    with Counts(*COUNTED) as progress:
        report = run_check(
            paths,
            base,
            baseline=pins,
            is_fast=fast,
            tolerances=Tolerances.parse(tolerance) if tolerance else None,
            update=update_baseline,
            code=permission(allow_code),
            on_done=progress.update,
        )
    lines: Iterable[str]
    if markdown:
        rows = report.measured.rows
        lines = table_lines(error_summaries(rows), overall_error_summary(rows))
    else:
        lines = report_lines(report, is_long=bool(targets))
    answer(lines, report.to_dict, json_)
    if junit is not None:
        write_atomically(junit, junit_xml(report.rows))
        if not is_output(json_):
            print_file("junit", junit)
    if update_baseline and pins is not None:
        pins.write()
        if not is_output(json_):
            cases = f"{len(pins.cases)} case{'s' * (len(pins.cases) != 1)}"
            print_file("baseline", f"{pins.path}: {cases}")
    if report.verdict == "fail":
        raise typer.Exit(1)


def _write_experiments(tables: list[Path], folder: Path, json_: Path | None) -> None:
    """Write the rows of tables of measured runs as experiment files."""
    from zsim.study.measured.experiment_table import write_run_experiments

    if not tables:
        raise InputError("--write-experiments: expected tables of measured runs, RUNS.csv")
    files = write_run_experiments(tables, folder)
    words = f"{len(files):,} experiment{'s' * (len(files) != 1)} in {folder}"
    answer([words], lambda: {"written": {row: str(path) for row, path in files.items()}}, json_)


def _baseline(path: Path | None, has_targets: bool, update: bool) -> tuple[Baseline | None, Path]:
    """The baseline that applies, and the folder to which names of cases are relative."""
    from zsim.study.check.baseline import Baseline, read_baseline
    from zsim.study.check.targets import checkout

    if path is not None:
        if update:
            check_file(path)
        if update and not os.path.exists(path):
            return Baseline(path), path.parent
        return read_baseline(path), path.parent
    if has_targets:
        if update:
            raise InputError("--update-baseline: expected --baseline FILE, the file to write")
        return None, Path.cwd()
    root = checkout()
    shipped = root / "validation" / "baseline.json"
    return (read_baseline(shipped) if shipped.exists() else Baseline(shipped)), root


def _pinned_paths(pins: Baseline | None, base: Path) -> list[Path]:
    """The paths of all cases that a baseline names."""
    names = list(pins.cases) if pins is not None else []
    if not names:
        raise InputError("check: nothing given, and the baseline is empty; expected files to pin")
    return [base / name for name in names]
