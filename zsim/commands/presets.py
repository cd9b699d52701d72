"""`zsim presets`: the models and clusters that ship with zsim."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from zsim.commands.options import answer, json_option, offered


def presets(
    name: Annotated[
        str | None,
        typer.Argument(help="A model: its details.", show_default=False, autocompletion=offered("models")),
    ] = None,
    json_: Annotated[Path | None, json_option("the presets")] = None,
) -> None:
    """The models and clusters that ship with zsim, and what is validated of them."""
    from zsim.specs.presets import topology_preset_names
    from zsim.study.model_presets import model_preset, model_presets

    if name is not None:
        one = model_preset(name)
        answer(one.details(), one.to_dict, json_)
        return
    models = model_presets()

    def lines() -> Iterator[str]:
        yield "models, and published runs of models of their size with zsim's mean error:"
        yield from (one.row() for one in models)
        yield "\nclusters: " + _wrapped(topology_preset_names())
        yield from _without_a_run()

    answer(
        lines(),
        lambda: {
            "models": [one.to_dict() for one in models],
            "clusters": list(topology_preset_names()),
        },
        json_,
    )


def _without_a_run() -> Iterator[str]:
    from zsim.study.published.regimes import without_a_run

    yield "\nNo published run says how far zsim is off on these:"
    for what, names in without_a_run().items():
        yield f"{what + ':':<12}" + _wrapped(names, 12)


def _wrapped(names: Sequence[str], indent: int = 10) -> str:
    return ("\n" + " " * indent).join(textwrap.wrap(", ".join(names), 78 - indent, break_on_hyphens=False))
