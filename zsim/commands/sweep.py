"""`zsim sweep` and `zsim scaling`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zsim.commands.options import (
    AllowCode,
    ExperimentOptions,
    Jobs,
    Set,
    folder_option,
    permission,
    print_file,
    settings,
    takes_experiment,
)
from zsim.errors import InputError


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
    allow_code: AllowCode = False,
    list_: Annotated[bool, typer.Option("--list", help="Only say which points there are.")] = False,
) -> None:
    """Simulate an experiment at every point of a study: results.csv, and results.parquet with pyarrow.

    Run it again to go on where it was stopped, and to get new points only.
    """
    if list_:
        from zsim.study.sweep.points import study_points
        from zsim.study.sweep.study_file import load_study

        points = study_points(load_study(study, settings(set_), permission(allow_code)))
        for point in points:
            values = ", ".join(f"{key} = {value}" for key, value in point.values.items())
            print(f"{point.number:>6}  {values}" + (f"  ({point.error})" if point.error else ""))
        return
    from zsim.study.sweep.sweep import sweep as run_sweep

    folder = out or Path(f"{study.stem}-results")
    done = run_sweep(
        study, overrides=settings(set_), out=folder, jobs=jobs, backend=backend, scheduler=scheduler,
        cache=cache, code=permission(allow_code),
    )  # fmt: skip
    print(f"{done}\n")
    for kind, path in done.files.items():
        print_file(kind, path)
    if "parquet" not in done.files:
        print("no results.parquet: it needs pyarrow (pip install zsim[parquet])")
    if done.is_stopped:
        print(f"stopped: {len(done.rows) - done.done} points are left; the same command goes on with them")
        raise typer.Exit(130)
    if done.failed == len(done.rows):  # probably a mistake in the study itself
        raise typer.Exit(1)


@takes_experiment(without=("nodes", "gpus"))
def scaling(
    options: ExperimentOptions,
    counts: Annotated[
        str, typer.Option("--gpus", metavar="COUNTS", help="8..16384 (doubling), 8..4096:4, or 8,24,64.")
    ] = "8..1024",
    strong: Annotated[
        bool, typer.Option("--strong/--weak", help="The same batch in all, or on every GPU.")
    ] = False,
    fill: Annotated[
        bool,
        typer.Option(
            help="On every GPU the largest micro-batch that fits and that torch's allocator does not hold up."
        ),
    ] = False,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of all GPUs (--strong); else the experiment's.")
    ] = None,
    grow: Annotated[
        str | None,
        typer.Option(metavar="DEGREE", help="tensor, pipeline or context: grows in place of the replicas."),
    ] = None,
    out: Annotated[Path, folder_option(help="Where scaling.html, scaling.json and the points go.")] = Path(
        "scaling"
    ),
    jobs: Jobs = None,
) -> None:
    """How far from linear on more GPUs, where it bends, and what the reason is."""
    from zsim.study.scaling.result import scaling as run_scaling

    if strong and fill:
        raise InputError("--strong keeps the batch of all GPUs, --fill lets it grow; give one")
    result = run_scaling(
        options.load(), counts, mode="fill" if fill else "strong" if strong else "weak", jobs=jobs,
        global_batch=global_batch, grow=grow, cache=out / "points",
    )  # fmt: skip
    print(result)
    if not result.runs:
        raise typer.Exit(130)
    print()
    for path in result.save(out):
        print_file(path.suffix[1:], path)
    if result.is_stopped:
        print("stopped: the same command goes on")
        raise typer.Exit(130)
