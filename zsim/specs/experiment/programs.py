"""The programs whose files zsim reads and writes, and the settings that can be expressed in each.

A program is a folder of `zsim.programs` with a `PROGRAM`, or one that the table of marks there has.
Core looks it up by its name and names none.
For one key of an experiment, or for all keys with the prefix before a star, a row of its `keys` gives the
values that the program accepts, where they are set, and how. A setting without a row cannot be expressed in
that program. An experiment without a program can use every setting, and the rows of the default program are
those that need more than files.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from zsim.specs.formats.program import ConfigMapping, TrainingProgram
from zsim.specs.strategy.registry import values_in_folders

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

_PACKAGE = "zsim.programs"


@cache
def _programs_by_folder() -> Mapping[str, TrainingProgram]:
    """The programs by the name of their folder, in their order."""
    programs: dict[str, TrainingProgram] = importlib.import_module(f"{_PACKAGE}.marks").marked_programs()
    programs = {**programs, **values_in_folders(_PACKAGE, "PROGRAM")}
    return dict(sorted(programs.items(), key=lambda entry: (entry[1].order, entry[0])))


def role_of(folder: str, module: str, name: str, default: Any = None) -> Any:
    """`name` in `module` of a program's folder, for the base class of that role to type. `default`, if it is
    not None, where the folder has no such module, or the module no such name.
    """
    (package,) = importlib.import_module(_PACKAGE).__path__
    if default is not None and not (Path(package) / folder / f"{module}.py").exists():
        return default
    role_module = importlib.import_module(f"{_PACKAGE}.{folder}.{module}")
    return getattr(role_module, name) if default is None else getattr(role_module, name, default)


def programs() -> tuple[TrainingProgram, ...]:
    """All programs, in their order."""
    return tuple(_programs_by_folder().values())


def listed_programs() -> tuple[TrainingProgram, ...]:
    """The programs in the order of lists of files, in which scripts are last."""
    return tuple(sorted(programs(), key=lambda program: program.is_script))


def roles_of(module: str, name: str, default: Any) -> tuple[tuple[TrainingProgram, Any], ...]:
    """(program, its role) of all programs, in their order."""
    return tuple(
        (program, role_of(folder, module, name, default)) for folder, program in _programs_by_folder().items()
    )


@cache
def readable_programs() -> Mapping[str, TrainingProgram]:
    """The programs whose files zsim reads, by their name."""
    return {program.name: program for program in programs() if program.is_read}


class _ProgramName:
    """Annotation of a key with the name of a program. Programs are looked up only when a file names one."""

    def __get_pydantic_core_schema__(self, source: Any, handler: object) -> CoreSchema:
        from pydantic_core import SchemaValidator, core_schema

        return core_schema.no_info_plain_validator_function(
            lambda value: SchemaValidator(_names_schema()).validate_python(value)
        )

    def __get_pydantic_json_schema__(self, schema: object, handler: Any) -> Any:
        return handler(_names_schema())


def _names_schema() -> CoreSchema:
    from pydantic_core import core_schema

    return core_schema.literal_schema(sorted(readable_programs()))


Program = Annotated[str, _ProgramName()]


@cache
def config_mappings(name: str) -> Sequence[ConfigMapping]:
    """The rows of the program of this name."""
    folder = next(folder for folder, program in _programs_by_folder().items() if program.name == name)
    rows: Sequence[ConfigMapping] = role_of(folder, "keys", "CONFIG_MAPPINGS", ())
    return rows


_ZSIM_FILE = ConfigMapping("*", "file", "", "zsim export")


def program_of(program: str | None, kind: str) -> str | None:
    """`program` if it supports the strategy. Without one, the program that alone runs a strategy of this
    kind. Else None.
    """
    if program is None:
        return next((entry.name for entry in programs() if kind in entry.default_kinds), None)
    return program if kind in readable_programs()[program].kinds else None


def default_mappings() -> Sequence[ConfigMapping]:
    """The rows of experiments without a program: settings that no file written by zsim holds."""
    return config_mappings(next(program.name for program in programs() if program.is_default))


def find_config_mapping(program: str | None, kind: str, key: str, value: Any) -> ConfigMapping | None:
    """How a program is configured with a value of a dotted key. None if it cannot be. An empty table sets
    nothing.
    """
    if isinstance(value, Mapping) and not value:
        return _ZSIM_FILE
    program = program_of(program, kind)
    rows = default_mappings() if program is None else config_mappings(program)
    mapping = next((row for row in rows if row.matches(kind, key, value)), None)
    return _ZSIM_FILE if mapping is None and program is None else mapping
