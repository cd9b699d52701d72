"""`zsim sensitivity`: which numbers a step depends on, and what a target would take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

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


@takes_experiment()
def sensitivity(
    asked: ExperimentOptions,
    spread: Annotated[float, typer.Option(help="How far a number is turned, each way.")] = 0.2,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="What would have to be true: step_seconds=, mfu=, tokens_per_second_per_gpu=, or fits.",
        ),
    ] = None,
    resource: Annotated[
        list[str] | None, typer.Option(help="For --target: only these, e.g. 'network bandwidth'.")
    ] = None,
    out: Annotated[Path, folder_option(help="Where sensitivity.html, .json and the points go.")] = Path(
        "sensitivity"
    ),
    jobs: Jobs = None,
) -> None:
    """Turn every number of the hardware and the framework: what the step depends on.

    With --target also the least of each resource that reaches it, by simulation; with [run] also what the
    days of the whole run depend on: failures, detection, start-up, the store, saves, spares.
    """
    from zsim.specs.experiment.resolve import resolve
    from zsim.study.sensitivity.page import (
        sensitivity_dict,
        sensitivity_page,
    )
    from zsim.study.sensitivity.requirements import (
        check_resources,
        left_out,
        memory_to_fit,
        parse_target,
        requirements,
    )
    from zsim.study.sensitivity.sensitivity import run_sensitivity
    from zsim.study.sensitivity.text import requirement_lines, sensitivity_lines
    from zsim.study.sensitivity.whole_runs import run_bar_lines, run_sensitivity_of

    experiment = asked.load()
    if target == "fits":
        print(memory_to_fit(experiment))
        return
    without: dict[str, str] = {}
    if target is not None:  # an invalid target is reported before anything is simulated
        wanted = parse_target(target, resolve(experiment))
        check_resources(wanted, resource or ())
        without = left_out(wanted)
    workers = jobs or os.cpu_count() or 1
    found = run_sensitivity(experiment, out / "points", spread=spread, jobs=workers)
    print("\n".join(sensitivity_lines(found)))
    needs = []
    if target is not None and not found.is_stopped:
        needs = requirements(experiment, target, resource, jobs=workers)
        print("\n".join(["", *requirement_lines(needs, target, without)]))
    whole = None
    if experiment.run is not None and not found.is_stopped:
        whole = run_sensitivity_of(experiment, jobs=workers)
        print("\n".join(run_bar_lines(whole)))
    study = found, needs, target or "", without, whole
    content = as_json(sensitivity_dict(*study))
    pages = {"sensitivity.html": sensitivity_page(*study), "sensitivity.json": content}
    print()
    for path in write_files(pages, out):
        print_file(path.suffix[1:], path)
    if found.is_stopped:
        print("stopped: the same command goes on")
        raise typer.Exit(130)
