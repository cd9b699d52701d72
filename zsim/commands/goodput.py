"""`zsim goodput`: a run over days, with saves, failures and recovery."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from zsim import garbage_collection
from zsim.commands.options import (
    ExperimentOptions,
    Jobs,
    answer,
    as_json,
    folder_option,
    json_option,
    print_file,
    takes_experiment,
    write_files,
)


@takes_experiment()
def goodput(
    asked: ExperimentOptions,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs that are drawn; else run.seeds.")] = None,
    json_: Annotated[Path | None, json_option("the answer")] = None,
    out: Annotated[Path | None, folder_option(help="Write goodput.html and goodput.json there.")] = None,
    jobs: Jobs = None,
) -> None:
    """Simulate a whole run: days and money to the last token, with saves, failures and recovery."""
    from zsim.goodput.goodput import simulate_run
    from zsim.goodput.page import goodput_page
    from zsim.goodput.text import goodput_lines

    with garbage_collection.paused():
        run = simulate_run(asked.load(), seeds=seeds, jobs=jobs or os.cpu_count() or 1)
    answer(goodput_lines(run), run.to_dict, json_)
    if out is not None:
        pages = {"goodput.html": goodput_page(run), "goodput.json": as_json(run.to_dict())}
        for path in write_files(pages, out):
            print_file(path.suffix[1:], path)
    if not run.prepared.first.result.report.fits:
        raise typer.Exit(1)
