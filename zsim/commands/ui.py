"""`zsim ui`: a local page to turn the settings of an experiment."""

from __future__ import annotations

from typing import Annotated

import typer

from zsim.commands.options import Cluster, ExperimentFile, Gpus, Model, Nodes, Set, experiment_from


def ui(
    experiment: ExperimentFile = None,
    model: Model = None,
    cluster: Cluster = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    set_: Set = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where it listens; 0: any free one.")] = 8050,
    host: Annotated[
        str, typer.Option(help="Another address than this machine's own lets others run simulations.")
    ] = "127.0.0.1",
) -> None:
    """Open a local page: turn the settings of an experiment, see what they do, take its files along.

    EXPERIMENT may be a DeepSpeed JSON, an Accelerate YAML or a torchtitan TOML too.
    """
    from zsim.ui.serve import require_dash, serve

    require_dash()
    serve(experiment_from(experiment, model, cluster, nodes, gpus, set_), host, port)
