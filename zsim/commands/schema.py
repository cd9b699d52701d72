"""`zsim schema`: the JSON Schema of a kind of file, by which editors complete and check it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zsim.commands.options import answer, as_json, json_option


def schema(
    file: Annotated[str, typer.Argument(help="experiment, study, topology or gpu.")] = "experiment",
    json_: Annotated[Path | None, json_option("the schema")] = None,
) -> None:
    """JSON Schema of a file that zsim reads, for editors: every key, its type, values and meaning.

    In VS Code (Even Better TOML) and other editors with taplo, `#:schema ./experiment.schema.json` as the
    first line of a TOML file completes its keys.
    """
    from zsim.reference import schema_of

    found = schema_of(file)
    answer([as_json(found).rstrip("\n")] if json_ is None else [], lambda: found, json_)
