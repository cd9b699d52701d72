"""`zsim goodput`: a run over days, with saves, failures and recovery."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zsim.commands.options import (
    Epochs,
    ExperimentOptions,
    Jobs,
    Samples,
    Tokens,
    answer,
    folder_option,
    json_option,
    print_file,
    takes_experiment,
)


@takes_experiment()
def goodput(
    options: ExperimentOptions,
    tokens: Tokens = None,
    samples: Samples = None,
    epochs: Epochs = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs that are drawn; else run.seeds.")] = None,
    json_: Annotated[Path | None, json_option("the answer")] = None,
    out: Annotated[Path | None, folder_option(help="Write goodput.html and goodput.json there.")] = None,
    jobs: Jobs = None,
) -> None:
    """Simulate a whole run: days and money to the last token, with saves, failures and recovery."""
    from zsim.study.whole_runs import simulate_run

    options, _ = options.add_length(tokens, samples, epochs)
    run = simulate_run(options.load(), seeds=seeds, jobs=jobs)
    answer(run.lines(), run.to_dict, json_)
    if out is not None:
        for path in run.save(out):
            print_file(path.suffix[1:], path)
    if code := run.verdict.exit_code:
        raise typer.Exit(code)
