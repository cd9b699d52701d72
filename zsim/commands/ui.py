"""`zsim ui`: a local page for varying the settings of an experiment."""

from __future__ import annotations

from typing import Annotated

import typer

from zsim.commands.options import ExperimentOptions, takes_experiment


@takes_experiment(without=("allow_code",))
def ui(
    options: ExperimentOptions,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where it listens; 0: any free one.")] = 8050,
    host: Annotated[
        str, typer.Option(help="Another address than this machine's own lets others run simulations.")
    ] = "127.0.0.1",
) -> None:
    """Open a local page: change the settings of an experiment, see what they do, download its files.

    EXPERIMENT may be a DeepSpeed JSON, an Accelerate YAML or a torchtitan TOML too.
    """
    from zsim.ui.app import require_dash, serve

    require_dash()
    serve(options.load(), host, port)
