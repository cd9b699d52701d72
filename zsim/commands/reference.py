"""`zsim explain`, `zsim schema` and `zsim presets`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from zsim.commands.options import answer, complete_keys, complete_presets, format_json, json_option


def explain(
    key: Annotated[
        str | None,
        typer.Argument(
            help="A key, a table, a kind of file, or what another program calls it; none: the tables.",
            autocompletion=complete_keys,
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="A whole file's reference as Markdown.")
    ] = False,
    json_: Annotated[Path | None, json_option("the entries")] = None,
) -> None:
    """Meaning, type, values and default of a key of an experiment, a study, a topology or a GPU file.

    A word that names a method, or a setting of another program, finds the keys that it means: `zsim explain
    qlora`.
    """
    from zsim.errors import InputError
    from zsim.reference import FILES, keys_of, page_of
    from zsim.reference.keys import explained_keys
    from zsim.reference.pages import concept_lines, entry_lines, table_lines
    from zsim.specs.key_index import concept_of

    if markdown:
        if key is None or key not in FILES:
            raise InputError(f"--markdown: found {key!r}, expected one of {', '.join(FILES)}")
        answer([page_of(key).rstrip("\n")], lambda: [asdict(entry) for entry in keys_of(key)], json_)
        return
    if key is None:
        answer(_tables(), lambda: [asdict(entry) for file in FILES for entry in keys_of(file)], json_)
        return
    concept = None if key in FILES else concept_of(key)
    entries = keys_of(key) if key in FILES else explained_keys(key, concept)
    is_few = len(entries) <= 3
    lines = (line for entry in entries for line in entry_lines(entry)) if is_few else table_lines(entries)
    answer(
        lines if concept is None else chain(concept_lines(concept), lines),
        lambda: [asdict(entry) for entry in entries],
        json_,
    )


def _tables() -> Iterator[str]:
    """The tables of every kind of file."""
    from zsim.reference import FILES, keys_of

    for file, kind in FILES.items():
        yield from textwrap.wrap(f"{kind.title} ({file}): {kind.purpose}", 80, break_on_hyphens=False)
        tables = dict.fromkeys(key.table for key in keys_of(file))
        text = ", ".join(f"[{table}]" for table in tables if table and (file == "gpu" or "gpu." not in table))
        if text:
            yield from textwrap.wrap(
                text, 80, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
            )
    yield "`zsim explain TABLE` lists its keys, `zsim explain KEY` says what one means."


def schema(
    file: Annotated[str, typer.Argument(help="experiment, study, topology or gpu.")] = "experiment",
    json_: Annotated[Path | None, json_option("the schema")] = None,
) -> None:
    """JSON Schema of a file that zsim reads, for editors: every key, its type, values and meaning.

    In VS Code (Even Better TOML) and other editors with taplo, `#:schema ./experiment.schema.json` as the
    first line of a TOML file completes its keys.
    """
    from zsim.reference import schema_of

    json_schema = schema_of(file)
    answer([format_json(json_schema).rstrip("\n")] if json_ is None else [], lambda: json_schema, json_)


def presets(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A model or a cluster: its details.",
            show_default=False,
            autocompletion=complete_presets,
        ),
    ] = None,
    json_: Annotated[Path | None, json_option("the presets")] = None,
) -> None:
    """The models and clusters that ship with zsim, and what is validated of them."""
    from zsim.specs.presets import topology_preset_names
    from zsim.study.presets import model_preset, model_presets

    if name in topology_preset_names():
        from zsim.study.topologies.topologies import describe_preset, preset_lines

        facts = describe_preset(name)
        answer(preset_lines(facts), lambda: facts, json_)
        return
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
    from zsim.study.presets import list_unvalidated

    yield "\nNo published run says how far zsim is off on these:"
    for category, names in list_unvalidated().items():
        yield f"{category + ':':<12}" + _wrap_names(names, 12)


def _wrap_names(names: Sequence[str], indent: int = 10) -> str:
    return ("\n" + " " * indent).join(textwrap.wrap(", ".join(names), 78 - indent, break_on_hyphens=False))
