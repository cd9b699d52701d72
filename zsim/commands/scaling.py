"""`zsim scaling`: one experiment on a growing number of GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zsim.commands.options import ExperimentOptions, Jobs, folder_option, print_file, takes_experiment
from zsim.errors import InputError


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
    from zsim.notebook.scalings import scaling as run_scaling

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
