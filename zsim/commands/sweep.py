"""`zsim sweep`: one experiment at many points."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zsim.commands.options import Jobs, Set, folder_option, print_file, settings

if TYPE_CHECKING:
    from zsim.study.sweep.sweep import Sweep
    from zsim.study.sweep.tables import Row

_BEST = 5


def sweep(
    study: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="The study: an experiment, and axes.")],
    out: Annotated[Path | None, folder_option(help="Where results go; STUDY-results without it.")] = None,
    jobs: Jobs = None,
    set_: Set = None,
    backend: Annotated[
        str, typer.Option(help="What runs them: loky (processes here), dask, or another of joblib's.")
    ] = "loky",
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A running Dask scheduler, tcp://HOST:PORT.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Finished points, to share between studies.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Only say which points there are.")] = False,
) -> None:
    """Simulate an experiment at every point of a study: results.csv, and results.parquet with pyarrow.

    Run it again to go on where it was stopped, and to get new points only.
    """
    from zsim.study.sweep.points import study_points
    from zsim.study.sweep.study_file import load_study
    from zsim.study.sweep.sweep import run_sweep

    loaded = load_study(study, settings(set_))
    if list_:
        points = study_points(loaded)
        for point in points:
            values = ", ".join(f"{key} = {value}" for key, value in point.values.items())
            print(f"{point.number:>6}  {values}" + (f"  ({point.error})" if point.error else ""))
        return
    folder = out or Path(f"{study.stem}-results")
    done = run_sweep(
        loaded, folder, jobs=jobs or os.cpu_count() or 1, backend=backend, scheduler=scheduler, cache=cache
    )
    _print(done)
    if done.is_stopped:
        raise typer.Exit(130)
    if done.failed == len(done.rows):  # probably a mistake in the study itself
        raise typer.Exit(1)


def _values(row: Row, keys: Sequence[str]) -> Iterator[str]:
    """The row's values of the keys; a label replaces the tables next to it."""
    if "label" in keys:
        yield str(row["label"])
    for key in keys:
        value = row[key]
        if key != "label" and not ("label" in keys and isinstance(value, dict)):
            yield (
                f"{key.rpartition('.')[2]} {value:g}"
                if isinstance(value, float)
                else (f"{key.rpartition('.')[2]} {value}")
            )


def _cells(row: Row, keys: Sequence[str]) -> list[str]:
    from zsim.units import format_bytes

    mfu = "-" if row["mfu_fraction"] is None else f"{row['mfu_fraction'] * 100:.1f}%"
    tokens, memory = row["tokens_per_second_per_gpu"] or 0.0, format_bytes(row["gpu_peak_bytes"])
    return [f"{tokens:,.0f}", mfu, memory, ", ".join(_values(row, keys))]


def _print(sweep: Sweep) -> None:
    """Print the states of the points, the fastest that fit, why others failed, and the files."""
    from zsim.report.views.text.plain import Column, table

    total = len(sweep.rows)
    fresh = sweep.done - sweep.known
    print(f"{sweep.done} of {total} points: {fresh} simulated, {sweep.known} known, {sweep.failed} failed")
    fitting = [row for row in sweep.rows if row["status"] == "ok" and row["fits"]]
    best = sorted(fitting, key=lambda row: -(row["tokens_per_second_per_gpu"] or 0.0))[:_BEST]
    if best:
        columns = [Column(title) for title in ("tokens/s/GPU", "MFU", "GPU memory")]
        columns.append(Column(f"fastest that fit, of {len(fitting)}", is_left=True))
        print("\n".join(["", *table(columns, [_cells(row, sweep.study.keys) for row in best])]))
    reasons: dict[str, int] = {}
    for row in sweep.rows:
        if row["status"] == "error":
            reasons[row["error"]] = reasons.get(row["error"], 0) + 1
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1])[:_BEST]:
        print(f"\n{count} failed: {reason}")
    print()
    for kind, path in sweep.files.items():
        print_file(kind, path)
    if "parquet" not in sweep.files:
        print("no results.parquet: it needs pyarrow (pip install zsim[parquet])")
    if sweep.is_stopped:
        print(f"stopped: {total - sweep.done} points are left; the same command goes on with them")
