"""`zsim compare`: a simulated step against a recorded one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zsim.commands.options import (
    AllowCode,
    Set,
    answer,
    file_option,
    is_output,
    json_option,
    permission,
    print_file,
    settings,
)


def compare(
    simulated: Annotated[
        Path, typer.Argument(metavar="SIMULATED", help="A trace, or an experiment TOML to simulate now.")
    ],
    recorded: Annotated[
        Path,
        typer.Argument(metavar="RECORDED", help="A trace: a rank's file or a folder of ranks; or a TOML."),
    ],
    set_: Set = None,
    rank: Annotated[int | None, typer.Option(help="Whose times are compared; else the first rank's.")] = None,
    tolerance: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]FRACTION",
            help="0.02 for all, or step=, time=, memory=, overlap=; again for more.",
        ),
    ] = None,
    allow_code: AllowCode = False,
    json_: Annotated[Path | None, json_option("everything")] = None,
    out: Annotated[Path | None, file_option(help="Write one HTML page with both timelines.")] = None,
) -> None:
    """Two traces: are the calls the same, are times and bytes near, and what differs most.

    Exit code 1: something is past its tolerance. Times measured beside foreign load are inconclusive.
    """
    from zsim.comparison.compare import compare as compare_traces
    from zsim.comparison.verdict import Tolerances
    from zsim.study.check.targets import load_trace

    tolerances, code = Tolerances.parse(tolerance) if tolerance else None, permission(allow_code)
    comparison = compare_traces(
        load_trace(simulated, settings(set_), code),
        load_trace(recorded, code=code),
        tolerances=tolerances,
        rank=rank,
        names=(str(simulated), str(recorded)),
    )
    answer([str(comparison)], comparison.to_dict, json_)
    if out is not None:
        comparison.write_html(out)
        if not is_output(json_):
            print_file("page", out)
    if comparison.verdict == "fail":
        raise typer.Exit(1)
