"""`zsim scaling`: one experiment on a growing number of GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zsim.commands.options import (
    ExperimentOptions,
    Jobs,
    as_json,
    folder_option,
    print_file,
    takes_experiment,
    write_files,
)
from zsim.errors import InputError

if TYPE_CHECKING:
    from zsim.study.scaling.scaling import Mode


@takes_experiment(without=("nodes", "gpus"))
def scaling(
    asked: ExperimentOptions,
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
    from zsim.study.scaling.page import scaling_dict, scaling_page
    from zsim.study.scaling.scaling import parse_counts, run_scaling
    from zsim.study.scaling.text import scaling_lines
    from zsim.study.scaling.whole_runs import run_lines

    if strong and fill:
        raise InputError("--strong keeps the batch of all GPUs, --fill lets it grow; give one")
    mode: Mode = "fill" if fill else "strong" if strong else "weak"
    done = run_scaling(
        asked.load(),
        parse_counts(counts),
        mode,
        out / "points",
        global_batch=global_batch,
        grow=grow,
        jobs=jobs or os.cpu_count() or 1,
    )
    print("\n".join([*scaling_lines(done), *run_lines(done)]))
    if not done.runs:
        raise typer.Exit(130)
    print()
    pages = {"scaling.html": scaling_page(done), "scaling.json": as_json(scaling_dict(done))}
    for path in write_files(pages, out):
        print_file(path.suffix[1:], path)
    if done.is_stopped:
        print("stopped: the same command goes on")
        raise typer.Exit(130)
