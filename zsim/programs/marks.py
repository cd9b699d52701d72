"""Programs by the keys of their files. The table is `marks.toml` beside this module."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from zsim.specs.formats.program import ProgramSource, ValuesProgram

_SUFFIXES = (".yaml", ".yml", ".json", ".toml")


@dataclass(frozen=True, slots=True)
class Marks:
    """A row of the table."""

    name: str
    title: str
    read_at: str
    """The release in which its files were read, and behind ", " where."""
    marks: tuple[tuple[str | list[str], ...], ...]
    """Lists of dotted keys. A file is the program's if it has all keys of one, and one of each list in it."""
    advice: str = ""
    """What helps instead of the file, for programs that are not read."""
    reads: str = ""
    """The file that is read, with an article. What follows is as `TrainingProgram` has it."""
    kinds: tuple[str, ...] = ()
    recognised_by: str = ""
    order: int = 0
    """Where it is asked behind the rows that have none."""
    folder: str = ""
    """The folder that has its reader, where it is not called by its name."""
    suffixes: tuple[str, ...] = ()
    yaml_marks: tuple[str, ...] = ()

    def match(self, data: Any) -> bool:
        """Whether the content of a file has one of the lists."""
        return isinstance(data, Mapping) and any(
            all(any(_has(data, key) for key in ([part] if isinstance(part, str) else part)) for part in keys)
            for keys in self.marks
        )


class MarkedProgram(ValuesProgram):
    """A program whose files are recognised by its row in the table, which may say all else of it."""

    order = 5  # before programs whose keys others also have

    def __init__(self, marks: Marks | None = None) -> None:
        self.row = marks
        if marks is None:
            return
        self.name, self.title, self.kinds, self.reads = marks.name, marks.title, marks.kinds, marks.reads
        self.file_nouns = (marks.reads.partition(" ")[2],) if marks.reads else ()
        self.release, self.recognised_by = marks.read_at.partition(", ")[0], marks.recognised_by
        self.suffixes, self.yaml_marks = marks.suffixes, marks.yaml_marks
        self.order = marks.order or self.order

    @property
    def folder(self) -> str:
        """The name of the folder beside this module that has its reader."""
        return (self.row.folder if self.row else "") or self.name.replace("-", "_")

    @property
    def package(self) -> str:
        return f"{__package__}.{self.folder}"

    def recognises(self, source: ProgramSource) -> bool:
        if self.row is not None and self.row.order:
            return source.suffix in self.suffixes and self.row.match(source.content)
        marks = marks_of(source)
        return marks is not None and marks.name == self.name

    def has_tables(self, tables: Mapping[str, Any]) -> bool:
        marks = matching_row(tables)
        return marks is not None and marks.name == self.name


@cache
def table() -> tuple[Marks, ...]:
    """All rows."""
    rows = tomllib.loads((Path(__file__).parent / "marks.toml").read_text(encoding="utf-8"))["program"]
    tuples: Iterable[dict[str, Any]] = (
        {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        for row in rows
    )
    return tuple(Marks(**row) for row in tuples)


def row_of(name: str) -> Marks:
    """The row of a program."""
    return next(row for row in table() if row.name == name)


def marked_programs() -> dict[str, MarkedProgram]:
    """The programs of which the table says all, by their folders."""
    rows = [MarkedProgram(marks) for marks in table() if marks.kinds]
    return {program.folder: program for program in rows}


def marks_of(source: ProgramSource) -> Marks | None:
    """The row of a file's program, or None for a file that has no program's marks."""
    if source.arguments is not None or source.suffix not in _SUFFIXES:
        return None
    return matching_row(source.content)


def matching_row(data: Any) -> Marks | None:
    """The first row without an `order` that has a list of keys which are all in the content of a file."""
    return next((row for row in table() if not row.order and row.match(data)), None)


def _has(data: Any, mark: str) -> bool:
    """Whether the dotted key is in nested tables, with a text of the mark's where it says some."""
    if mark.startswith("!"):
        return not _has(data, mark[1:])
    key, equals, texts = mark.partition("=")
    values = [data]
    for part in key.split("."):
        tables = [value for value in values if isinstance(value, Mapping)]
        values = [value for table in tables for name, value in table.items() if part in ("*", str(name))]
    if not equals:
        return bool(values)
    patterns = (texts or "*").split("|")
    return any(isinstance(value, str) and fnmatchcase(value, text) for value in values for text in patterns)
