"""`zsim plan`: the plan of a rank, without a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zsim.commands.options import (
    ExperimentOptions,
    format_json,
    is_output,
    json_option,
    takes_experiment,
    write_json,
)


@takes_experiment()
def plan(
    options: ExperimentOptions,
    json_: Annotated[Path | None, json_option("the plan")] = None,
    limit: Annotated[int, typer.Option(min=0, help="How many ops to list (0: all).")] = 60,
    rank: Annotated[
        int | None, typer.Option(help="Only this rank's program (pipeline ranks differ).")
    ] = None,
) -> None:
    """Print the work of a rank: ops, bytes, streams. Nothing is simulated."""
    from zsim.api import make_plan
    from zsim.report.views.text.plan import plan_to_dict, print_plan

    rank_plan = make_plan(options.load())
    if is_output(json_):
        print(format_json(plan_to_dict(rank_plan, rank)), end="")
        return
    files = {"json": write_json(plan_to_dict(rank_plan, rank), json_)} if json_ is not None else {}
    print_plan(rank_plan, limit=limit, rank=rank, files=files)
