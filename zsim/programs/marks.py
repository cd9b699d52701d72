"""Programs by the keys of their files. The table is `marks.toml` beside this module."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
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
    """Where its files were read, and in which release."""
    marks: tuple[tuple[str, ...], ...]
    """Lists of dotted keys. A file is the program's if it has all keys of one."""
    advice: str = ""
    """What helps instead of the file, for programs that are not read."""
    reads: str = ""
    """The file that is read, with an article. What follows is as `TrainingProgram` has it."""
    kinds: tuple[str, ...] = ()
    release: str = ""
    recognised_by: str = ""

    def match(self, data: Mapping[Any, Any]) -> bool:
        return any(all(_has(data, key) for key in keys) for keys in self.marks)


class MarkedProgram(ValuesProgram):
    """A program whose files are recognised by its row in the table, which may say all else of it."""

    order = 5  # before programs whose keys others also have

    def __init__(self, marks: Marks | None = None) -> None:
        if marks is not None:
            self.name, self.title, self.kinds = marks.name, marks.title, tuple(marks.kinds)
            self.reads, self.file_nouns = marks.reads, (marks.reads.partition(" ")[2],)
            self.release, self.recognised_by = marks.release, marks.recognised_by

    @property
    def folder(self) -> str:
        """The name of the folder beside this module that has its reader."""
        return self.name.replace("-", "_")

    @property
    def package(self) -> str:
        return f"{__package__}.{self.folder}"

    def recognises(self, source: ProgramSource) -> bool:
        marks = marks_of(source)
        return marks is not None and marks.name == self.name

    def has_tables(self, tables: Mapping[str, Any]) -> bool:
        marks = matching_row(tables)
        return marks is not None and marks.name == self.name


@cache
def table() -> tuple[Marks, ...]:
    """All rows."""
    rows = tomllib.loads((Path(__file__).parent / "marks.toml").read_text(encoding="utf-8"))["program"]
    return tuple(Marks(**{**row, "marks": tuple(map(tuple, row["marks"]))}) for row in rows)


def marked_programs() -> dict[str, MarkedProgram]:
    """The programs of which the table says all, by their folders."""
    rows = [MarkedProgram(marks) for marks in table() if marks.reads]
    return {program.folder: program for program in rows}


def marks_of(source: ProgramSource) -> Marks | None:
    """The row of a file's program, or None for a file that has no program's marks."""
    if source.arguments is not None or source.suffix not in _SUFFIXES:
        return None
    data = source.content
    return matching_row(data) if isinstance(data, Mapping) else None


def matching_row(data: Mapping[Any, Any]) -> Marks | None:
    """The first row that has a list of keys which are all in the content of a file."""
    return next((row for row in table() if row.match(data)), None)


def _has(data: Any, key: str) -> bool:
    """Whether the dotted key is in nested tables, whatever its value."""
    for part in key.split("."):
        names = {str(name): name for name in data} if isinstance(data, Mapping) else {}
        if part not in names:
            return False
        data = data[names[part]]
    return True
