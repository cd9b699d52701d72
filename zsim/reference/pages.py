"""The reference as text: a page per kind of file in Markdown, and one entry for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from zsim.reference.files import FILES
from zsim.reference.keys import FileKey, keys_of
from zsim.specs.key_index import Concept

_WIDTH = 80
_ORIGIN_KEYS = ("source", "evidence", "measured_range", "spread")


def page_of(file: str) -> str:
    """The page of a kind of file: a section per table, a row per key."""
    kind = FILES[file]
    lines = [f"# {kind.title}", "", kind.purpose, ""]
    lines += [
        f"This page is made from the code (`zsim explain {file} --markdown`). A key that may be left",
        "out has a default, or its sentence says what is done where it is left out.",
        "",
        f"`zsim schema {file} > {file}.json` writes the same as JSON Schema. With `#:schema {file}.json` as",
        "the first line of a file, editors with taplo (VS Code's Even Better TOML) complete and check it.",
        "",
    ]
    if file == "experiment":
        lines += ["Where a key names no framework, all of them read it.", ""]
    lines += _sections(file)
    return "\n".join(lines)


def _sections(file: str) -> Iterator[str]:
    """A section per table. What stands in another section or on another page is said once, there."""
    elsewhere = FILES[file].pages
    tables: dict[str, list[FileKey]] = {}
    for key in keys_of(file):
        if not key.path.startswith(tuple(f"{table}." for table in elsewhere)):
            tables.setdefault(key.table, []).append(key)
    table_names: dict[tuple[str, ...], str] = {}
    origin_rows: list[str] = []
    for table, keys in tables.items():
        rows = tuple(_row(key) for key in keys)
        if not table:
            yield from _table("## Before the first table", rows)
            continue
        first_name = table_names.setdefault(rows, table)
        if first_name != table:
            yield from (f"## `[{table}]`", "", f"The keys of `[{first_name}]`.", "")
            continue
        has_origin = {key.name for key in keys}.issuperset(_ORIGIN_KEYS)
        if has_origin and not origin_rows:
            origin_rows = [_row(key) for key in keys if key.name in _ORIGIN_KEYS]
            yield from _table("## In every table of numbers", origin_rows)
        if has_origin:
            rows = tuple(row for row in rows if row not in origin_rows)
        note = "Also [where the numbers come from](#in-every-table-of-numbers)." if has_origin else ""
        yield from _table(f"## `[{table}]`", rows, note)
    for table, page in elsewhere.items():
        yield from (f"## `[{table}]`", "", f"The tables of a [{FILES[page].title}]({page}.md), in it.", "")


def _table(title: str, rows: Sequence[str], note: str = "") -> Iterator[str]:
    yield from (title, "", "| key | value | default | |", "|---|---|---|---|", *rows, "")
    if note:
        yield from (note, "")


def concept_lines(concept: Concept) -> Iterator[str]:
    """A concept for a terminal of 80 columns, before the entries of its keys."""
    yield from textwrap.wrap(f"{concept.name}: {concept.sentence}", _WIDTH, break_on_hyphens=False)
    if concept.see:
        yield f"  see: {', '.join(concept.see)}"


def entry_lines(key: FileKey) -> Iterator[str]:
    """One key for a terminal of 80 columns."""
    yield f"{key.path}   ({key.file} file)"
    for title, text in (
        ("", key.sentence),
        ("value", _value(key)),
        ("default", key.default),
        ("kinds", ", ".join(key.of)),
        ("read by", ", ".join(key.frameworks)),
        *(("in " + program, how) for program, how in key.elsewhere),
    ):
        if text:
            label = f"{title}: " if title else ""
            yield from textwrap.wrap(
                label + text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            )
    if key.is_required:
        yield "  must be given"


def table_lines(keys: Sequence[FileKey]) -> Iterator[str]:
    """The keys of a table for a terminal of 80 columns: a line each, the sentence cut short."""
    width = min(max(len(key.path) for key in keys), 44)
    for key in keys:
        sentence = textwrap.shorten(key.sentence, max(_WIDTH - width - 2, 20), placeholder=" ...")
        yield f"{key.path:<{width}}  {sentence}"


def _row(key: FileKey) -> str:
    notes = [key.sentence[:1].upper() + key.sentence[1:]] if key.sentence else []
    if key.of:
        notes.append(f"Of kind {', '.join(f'`{kind}`' for kind in key.of)}")
    if key.frameworks:
        notes.append(f"Read by {', '.join(f'`{name}`' for name in key.frameworks)}")
    notes += [f"{program}: `{how}`" for program, how in key.elsewhere]
    default = "must be given" if key.is_required else f"`{key.default}`" if key.default else ""
    cells = (f"`{key.name}`", _value(key, "`"), default, ". ".join(notes))
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _value(key: FileKey, quote: str = "") -> str:
    """Type and allowed values in one phrase."""
    if not key.allowed:
        return key.type
    is_limit = key.type in ("whole number", "number") or key.allowed[0].split(" ")[0] in (
        "above",
        "at",
        "below",
    )
    if is_limit:
        return f"{key.type}, {' and '.join(key.allowed)}"
    values = ", ".join(f"{quote}{value}{quote}" for value in key.allowed)
    return values if key.type == "one of" else f"{key.type.replace('one of', values)}"
