"""`zsim needs`: how much more of one resource would hide the offloading, or up to where it helps."""

from __future__ import annotations

import textwrap
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
    file_option,
    is_output,
    print_json,
    write_json,
)


def needs(
    experiment: ExperimentFile = None,
    model: Model = None,
    cluster: Cluster = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    set_: Set = None,
    resource: Annotated[
        list[str] | None,
        typer.Option(help="drives, drive bandwidth, pcie, host memory or cpu; all of them without."),
    ] = None,
    json_: Annotated[
        Path | None, file_option("--json", help="Write the needs as JSON ('-': standard output).")
    ] = None,
) -> None:
    """How much more of what would hide the offloading, found by simulation."""
    from zsim.study.needs import offload_needs

    found = offload_needs(experiment_from(experiment, model, cluster, nodes, gpus, set_), resource)
    content = [need.to_dict() for need in found]
    if is_output(json_):
        print_json(content)
        return
    for need in found:
        print(textwrap.fill(need.sentence(), 80, subsequent_indent="  ", break_on_hyphens=False))
    if json_ is not None:
        print(f"json  {write_json(content, json_)}")
