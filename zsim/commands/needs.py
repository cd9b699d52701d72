"""`zsim needs`: how much more of one resource would hide offloading, or how far more of it helps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zsim.commands.options import ExperimentOptions, answer, json_option, takes_experiment


@takes_experiment()
def needs(
    options: ExperimentOptions,
    resource: Annotated[
        list[str] | None,
        typer.Option(help="drives, drive bandwidth, pcie, host memory or cpu; all of them without."),
    ] = None,
    json_: Annotated[Path | None, json_option("the needs")] = None,
) -> None:
    """How much more of what would hide the offloading, found by simulation."""
    from zsim.notebook.sensitivities import needs as find_needs

    result = find_needs(options.load(), resource)
    answer(result.lines(), result.to_dict, json_)
