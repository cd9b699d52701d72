"""Other programs, whose files and command lines people have: what each of them tells core of itself."""

from __future__ import annotations

import importlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Self

from zsim.errors import InputError
from zsim.reading import parse_json, parse_toml, read_text
from zsim.specs.formats.config_file import TrainingFile, read_file
from zsim.specs.formats.safe_yaml import load_yaml

ConfigLocation = Literal["file", "script"]
YAML_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class ConfigMapping:
    """How a program is configured with values of one key of an experiment."""

    key: str
    """Dotted key of an experiment. A star at its end stands for all keys with that prefix."""
    location: ConfigLocation
    """The program's file, or a change of the script that it runs."""
    instruction: str
    """The program's own key, option or code."""
    source: str
    """Where this was read, and in which release."""
    values: tuple[Any, ...] = ()
    """The values that can be expressed. Empty: any value."""
    kinds: tuple[str, ...] = ()
    """The strategies under which they can be expressed. Empty: all."""

    def matches(self, kind: str, key: str, value: Any) -> bool:
        is_key = key.startswith(self.key[:-1]) if self.key.endswith("*") else key == self.key
        is_value = not self.values or any(
            type(choice) is type(value) and choice == value for choice in self.values
        )
        return is_key and is_value and (not self.kinds or kind in self.kinds)


def mappings(release: str, *rows: tuple[Any, ...]) -> tuple[ConfigMapping, ...]:
    """Rows of (key, location, instruction, source in the release, and the values and kinds, if not all)."""
    return tuple(ConfigMapping(row[0], row[1], row[2], f"{release}, {row[3]}", *row[4:]) for row in rows)


@dataclass(frozen=True)
class ProgramSource:
    """A file of another program, or a command line: as `strategy.config` names it."""

    text: str
    """The path or the command line. It is empty for a list of arguments."""
    arguments: tuple[str, ...] | None = None
    """The list of arguments, where it is one."""
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Values of the experiment by dotted key, for those that a script leaves open."""

    @classmethod
    def make(cls, path: str, content: Mapping[str, Any]) -> Self:
        """A file whose content is known, from elsewhere than its path."""
        source = cls(path)
        source.__dict__["content"] = content
        return source

    @property
    def suffix(self) -> str:
        """The ending of the file's name. Empty for a command line, whose last word may be a path too."""
        has_options = any(word.startswith("-") or "=" in word for word in self.words)
        return "" if len(self.words) > 1 and has_options else Path(self.text).suffix.lower()

    @cached_property
    def words(self) -> list[str]:
        """The words of a command line. A path is one word."""
        if os.path.isfile(self.text):  # False, too, for a command line too long to be a path
            return [self.text]
        try:
            return shlex.split(self.text)
        except ValueError:
            return [self.text]

    @cached_property
    def content(self) -> Any:
        """The content of a YAML, JSON or TOML, or None where it cannot be read.

        Raises InputError for a JSON that no program has, of numbers or nesting without end.
        """
        path = Path(self.text)
        try:
            text = read_text(path)
            if self.suffix == ".json":
                return parse_json(text, path)
            if self.suffix == ".toml":
                return parse_toml(text, path)
        except (OSError, ValueError):
            return None
        try:
            return load_yaml(text, self.text)
        except InputError:
            return None


class TrainingProgram:
    """A program whose files or command lines zsim reads or writes, as its folder in `zsim.programs` describes
    it.

    `PROGRAM` of the folder, in which are `keys` (`CONFIG_MAPPINGS`: the settings that it can be told) and,
    where zsim writes its file, `write` (`WRITER`).
    """

    name: str
    """Its name in the key `program` of an experiment."""
    title: str
    """Its name in sentences."""
    kinds: tuple[str, ...] = ()
    """The kinds of strategy that it can train with."""
    default_kinds: tuple[str, ...] = ()
    """The kinds of strategy that nothing else runs, so that an experiment of this kind is the program's."""
    order: int = 100
    """Programs are listed, and asked whether a file is theirs, in this order, and by name where it is the
    same.
    """
    is_read: bool = True
    """Whether zsim reads its files."""
    is_default: bool = False
    """Whether its settings are those of an experiment that comes from no program's file."""
    is_script: bool = False
    """Whether its file is a script, which lists of files name last."""
    is_launcher: bool = False
    """Whether its file starts the others, which are written before it."""
    suffixes: tuple[str, ...] = ()
    """Endings of files that are no experiment of zsim's."""
    file_nouns: tuple[str, ...] = ()
    """The kinds of its files, for lists of files. The first is the usual one."""
    reads: str = ""
    """The file that its reader expects, with an article."""
    writes: str = ""
    """The file that its writer makes, with an article."""
    example: str = ""
    """A command line that it reads."""
    takes_options: bool = False
    """Whether options may follow the name of its file."""
    takes_any_options: bool = False
    """Whether options that no program recognises are read as its."""
    yaml_marks: tuple[str, ...] = ()
    """Keys at the top level of a YAML of which no other program has all, for texts without a name."""
    release: str = ""
    """The release whose code says what its keys mean and what is left out."""
    recognised_by: str = ""
    """The marks of its files, in words."""
    script_settings: tuple[str, ...] = ()
    """Keys of an experiment that its file says, and all other programs leave to the script."""

    def recognises(self, source: ProgramSource) -> bool:
        """Whether a file or a command line has marks that this program alone has."""
        return False

    def is_default_reader(self, source: ProgramSource) -> bool:
        """Whether it reads files of this ending in which no program recognises marks."""
        return False

    def names_file(self, path: Path) -> bool:
        """Whether a file given in place of an experiment is this program's, by its name."""
        return path.suffix.lower() in self.suffixes

    def has_tables(self, tables: Mapping[str, Any]) -> bool:
        """Whether the tables of a TOML are this program's."""
        return False

    def read(self, source: ProgramSource) -> TrainingFile:
        """The settings in a file or a command line.

        Raises InputError for what the program would refuse, NotSimulatedError for what zsim does not
        simulate.
        """
        raise NotImplementedError

    @property
    def package(self) -> str:
        """The package of the program's folder."""
        return type(self).__module__

    def reading_module(self) -> ModuleType:
        """The module `read` of the program's folder, which is imported when a file is read."""
        return importlib.import_module(f"{self.package}.read")


class ValuesProgram(TrainingProgram):
    """A program whose file has values by key. The module `read` of its folder reads them (`read_values`)."""

    def read(self, source: ProgramSource) -> TrainingFile:
        return read_file(source.text, self.reading_module().read_values)
