"""`zsim memory`: who holds a GPU's memory, and when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from zsim.commands.options import (
    Cluster,
    ExperimentFile,
    Gpus,
    Model,
    Nodes,
    Set,
    experiment_from,
    write_json,
)


def memory(
    experiment: ExperimentFile = None,
    model: Model = None,
    cluster: Cluster = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    set_: Set = None,
    limit: Annotated[int, typer.Option(min=0, help="How many rows of each table (0: all).")] = 12,
    json_: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write every owner as JSON ('-': standard output)."),
    ] = None,
) -> None:
    """Who holds a GPU's memory, and when: by phase, module and FSDP unit; no simulation."""
    from zsim.api import strategy_label
    from zsim.report.memory_lines import profile_lines
    from zsim.study.memory import profile_memory

    found = profile_memory(experiment_from(experiment, model, cluster, nodes, gpus, set_))
    content = {"capacity_bytes": found.capacity_bytes, "fits": found.fits, **found.profile.to_dict()}
    if json_ is not None and str(json_) == "-":
        print(json.dumps(content, indent=1))
    else:
        job = found.job
        print(f"{job.model.name} | {strategy_label(job)} | {job.cluster.name} | {job.world_size:,} GPUs\n")
        print("\n".join(profile_lines(found.profile, capacity_bytes=found.capacity_bytes, limit=limit)))
        if json_ is not None:
            print(f"\njson  {write_json(content, json_)}")
    if not found.fits:
        raise typer.Exit(1)
