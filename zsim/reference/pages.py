"""The reference as text: a page per kind of file in Markdown, and one entry for the terminal."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from zsim.reference.files import FILES, INHERITED
from zsim.reference.keys import FileKey, keys_of
from zsim.specs.key_index import Concept

_WIDTH = 80
_ORIGIN_KEYS = ("source", "evidence", "measured_range", "spread")


def page_of(file: str) -> str:
    """The page of a kind of file: a section per table, an entry per key."""
    kind = FILES[file]
    lines = [f"# {kind.title}", "", kind.purpose, "", *_INTRODUCTION]
    if file == "experiment":
        lines += _EXPERIMENT_INTRODUCTION
    elif file in ("topology", "gpu"):
        lines += ["In a file that `extends` another, keys left out are as there.", ""]
    lines += _sections(file)
    return "\n".join(lines)


_INTRODUCTION = (
    'Defaults are bold. Quantities have units: `"2 us"`, `"80 GiB"`, `"400 Gb/s"`, `"989 TFLOP/s"`, `"7 W"`.',
    "Numbers are above 0 unless another bound is shown.",
    "[Completion in an editor](experiment.md#in-an-editor): `zsim schema`.",
    "",
)
_EXPERIMENT_INTRODUCTION = (
    "`zsim explain KEY` prints an entry, with the name of the setting in other programs ([by",
    "program](../files.md)). Where nothing is said about frameworks, all read the key.",
    "",
    "## In an editor",
    "",
    "`zsim schema experiment > experiment.json` writes this page as JSON Schema. With",
    "`#:schema experiment.json` as the first line of a TOML file, editors with taplo (Even Better TOML in VS",
    "Code) complete and check it. Likewise `topology`, `gpu` and `study`.",
    "",
)


def _sections(file: str) -> Iterator[str]:
    """A section per table. What stands in another section or on another page is said once, there."""
    elsewhere = FILES[file].pages
    tables: dict[str, list[FileKey]] = {}
    for key in keys_of(file):
        if not key.path.startswith(tuple(f"{table}." for table in elsewhere)):
            tables.setdefault(key.table, []).append(key)
    table_names: dict[tuple[str, ...], str] = {}
    origin_tables: list[str] = []
    for table, keys in tables.items():
        readers = _usual_readers(keys)
        rows = tuple(_row(key, readers) for key in keys)
        title = f"## `[{table}]`" if table else "## Before the first table"
        first_name = table_names.setdefault(rows, table)
        if first_name != table:
            yield from (title, "", f"The keys of `[{first_name}]`.", "")
            continue
        if {key.name for key in keys}.issuperset(_ORIGIN_KEYS):
            origin_keys = [key for key in keys if key.name in _ORIGIN_KEYS]
            keys = [key for key in keys if key.name not in _ORIGIN_KEYS]
            if not origin_tables:
                yield from ("## Sources of numbers", "", *(_row(key, ()) for key in origin_keys), "")
            origin_tables.append(f"`[{table}]`")
        yield from (title, "")
        if readers:
            yield from (f"Read by {_quoted(readers)}, unless a key says otherwise.", "")
        kinds = dict.fromkeys(key.of for key in keys)
        all_kinds = {name for kind in kinds for name in kind}
        for kind in kinds:
            if set(kind) != all_kinds:
                yield from (f"### Kind {_quoted(kind)}", "")
            yield from (*(_row(key, readers) for key in keys if key.of == kind), "")
    if origin_tables:
        yield f"[Sources of numbers](#sources-of-numbers) are keys of {', '.join(origin_tables)} as well."
        yield ""
    for table, page in elsewhere.items():
        yield from (f"## `[{table}]`", "", f"The tables of a [{FILES[page].title}]({page}.md), in it.", "")


def _usual_readers(keys: Sequence[FileKey]) -> tuple[str, ...]:
    """The frameworks that read most keys of a table, or () where all frameworks do."""
    readers, num_keys = Counter(key.frameworks for key in keys).most_common(1)[0]
    return readers if 2 * num_keys > len(keys) else ()


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
        *(("in " + ", ".join(programs), how) for how, programs in _programs_by_spelling(key).items()),
    ):
        if text:
            label = f"{title}: " if title else ""
            yield from textwrap.wrap(
                label + text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            )
    if key.is_required:
        yield "  must be given"


def _programs_by_spelling(key: FileKey) -> dict[str, list[str]]:
    """The programs that write the setting alike, by how they write it."""
    programs: dict[str, list[str]] = {}
    for program, how in key.elsewhere:
        programs.setdefault(how, []).append(program)
    return programs


def table_lines(keys: Sequence[FileKey]) -> Iterator[str]:
    """The keys of a table for a terminal of 80 columns: a line each, the sentence cut short."""
    width = min(max(len(key.path) for key in keys), 44)
    for key in keys:
        sentence = textwrap.shorten(key.sentence, max(_WIDTH - width - 2, 20), placeholder=" ...")
        yield f"{key.path:<{width}}  {sentence}"


def _row(key: FileKey, readers: tuple[str, ...]) -> str:
    """A key as an entry of the list of a table whose keys `readers` read."""
    meaning, _, otherwise = key.sentence.partition("; left out: ")
    notes = [meaning[:1].upper() + meaning[1:]]
    if otherwise and otherwise != INHERITED:
        notes.append(f"Default: {otherwise.replace('; left out: ', '; default: ')}")
    if key.frameworks != readers:
        notes.append(f"Read by {_quoted(key.frameworks)}" if key.frameworks else "Read by all")
    return f"- `{key.name}` ({_short_value(key)}): {'. '.join(notes)}".replace("\n", " ")


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


_SHORT_TYPES = {
    "list of whole number": "list of integers",
    "list of text": "list",
    "whole number": "integer",
    "true or false": "boolean",
    "bytes per second": "bandwidth",
    "FLOP per second": "FLOP/s",
    " by name": ", by name",
}
_SHORT_LIMITS = {"above": ">", "at least": "≥", "at most": "≤", "below": "<"}
_BOUND_OF_SANITY = 1e5  # larger limits guard against nonsense, and tell a reader nothing


def _short_value(key: FileKey) -> str:
    """Type, allowed values and default in few words: the default in bold."""
    kind = key.type.partition(", as in")[0]
    for long, short in _SHORT_TYPES.items():
        kind = kind.replace(long, short)
    limits: dict[str, str] = {}
    values = []
    for text in key.allowed:
        word = next((word for word in _SHORT_LIMITS if text.startswith(f"{word} ")), None)
        if word is None:
            values.append(text)
        elif float(text.removeprefix(word).replace(",", "")) <= _BOUND_OF_SANITY:
            limits[word] = text.removeprefix(word).strip()
    if "at least" in limits and "at most" in limits:
        kind += f", {limits['at least']} to {limits['at most']}"
    else:
        shown_limits = {word: limit for word, limit in limits.items() if (word, limit) != ("above", "0")}
        kind += ",".join(f" {_SHORT_LIMITS[word]} {limit}" for word, limit in shown_limits.items())
    if values:
        shown = ", ".join(f"**`{value}`**" if value == key.default else f"`{value}`" for value in values)
        kind = kind.replace("one of", shown)
    if key.is_required:
        return f"{kind}; required"
    if not key.default or key.default in values:
        return kind
    return f"**{key.default}**" if key.default in ("true", "false") else f"{kind}; **{key.default}**"


def _value(key: FileKey) -> str:
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
    values = ", ".join(key.allowed)
    return values if key.type == "one of" else f"{key.type.replace('one of', values)}"
