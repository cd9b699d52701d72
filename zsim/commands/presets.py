"""`zsim presets`: the models and clusters that ship with zsim."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from zsim.commands.options import answer, completion_of, json_option


def presets(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A model: its details.", show_default=False, autocompletion=completion_of("models")
        ),
    ] = None,
    json_: Annotated[Path | None, json_option("the presets")] = None,
) -> None:
    """The models and clusters that ship with zsim, and what is validated of them."""
    from zsim.specs.presets import topology_preset_names
    from zsim.study.model_presets import model_preset, model_presets

    if name is not None:
        preset = model_preset(name)
        answer(preset.details(), preset.to_dict, json_)
        return
    models = model_presets()

    def lines() -> Iterator[str]:
        yield "models, and published runs of models of their size with zsim's mean error:"
        yield from (preset.row() for preset in models)
        yield "\nclusters: " + _wrap_names(topology_preset_names())
        yield from _unvalidated_lines()

    answer(
        lines(),
        lambda: {
            "models": [preset.to_dict() for preset in models],
            "clusters": list(topology_preset_names()),
        },
        json_,
    )


def _unvalidated_lines() -> Iterator[str]:
    from zsim.study.unvalidated import list_unvalidated

    yield "\nNo published run says how far zsim is off on these:"
    for category, names in list_unvalidated().items():
        yield f"{category + ':':<12}" + _wrap_names(names, 12)


def _wrap_names(names: Sequence[str], indent: int = 10) -> str:
    return ("\n" + " " * indent).join(textwrap.wrap(", ".join(names), 78 - indent, break_on_hyphens=False))
