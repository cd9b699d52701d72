"""`zsim sensitivity` and `zsim needs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zsim.commands.options import (
    ExperimentOptions,
    Jobs,
    answer,
    folder_option,
    json_option,
    print_file,
    takes_experiment,
)


@takes_experiment()
def sensitivity(
    options: ExperimentOptions,
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

    With --target also the least of each resource that reaches it, by simulation. With [run] also what the
    days of the whole run depend on: failures, detection, start-up, the store, saves, spares.
    """
    from zsim.study.sensitivity.requirements import memory_to_fit
    from zsim.study.sensitivity.result import sensitivity as find_sensitivity

    experiment = options.load()
    if target == "fits":
        print(memory_to_fit(experiment))
        return
    result = find_sensitivity(
        experiment, spread=spread, target=target, resources=resource or (), jobs=jobs, cache=out / "points"
    )
    print(f"{result}\n")
    for path in result.save(out):
        print_file(path.suffix[1:], path)
    if result.is_stopped:
        print("stopped: the same command goes on")
        raise typer.Exit(130)


@takes_experiment()
def needs(
    options: ExperimentOptions,
    resource: Annotated[
        list[str] | None,
        typer.Option(help="drives, drive bandwidth, pcie, c2c, host memory or cpu; all of them without."),
    ] = None,
    json_: Annotated[Path | None, json_option("the needs")] = None,
) -> None:
    """How much more of what would hide the offloading, found by simulation."""
    from zsim.study.needs import needs as find_needs

    result = find_needs(options.load(), resource)
    answer(result.lines(), result.to_dict, json_)
