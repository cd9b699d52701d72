"""Published storage systems and fleets by name, which the tables of `[run]` extend."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from zsim.errors import InputError, did_you_mean
from zsim.resources import PRESETS
from zsim.specs.cluster.files import read_toml
from zsim.specs.cluster.table import Table
from zsim.specs.messages import raise_input_error

_Preset = TypeVar("_Preset", bound=Table)


def preset_names(file: str) -> tuple[str, ...]:
    """Names in a file of presets, sorted."""
    return tuple(sorted(read_toml(PRESETS / file)))


def apply_preset(table: _Preset, file: str, where: str) -> _Preset:
    """The table, with the numbers of the preset that it names for all keys that it leaves out.

    Keys that are set in addition to a preset make it "assumed". Raises InputError for an unknown preset.
    """
    name: str | None = getattr(table, "preset", None)
    if name is None:
        return table
    presets = read_toml(PRESETS / file)
    if name not in presets:
        raise InputError(
            f"{where}.preset: unknown '{name}'{did_you_mean(name, presets)}; expected one of "
            f"{', '.join(sorted(presets))}"
        )
    user_values = {key: getattr(table, key) for key in table.model_fields_set if key != "preset"}
    try:
        preset_table = type(table).model_validate(presets[name])
    except ValidationError as error:
        raise_input_error(error, file, type(table))
    if user_values:
        user_values.setdefault(
            "source", f"{preset_table.source}; changed by the user: {', '.join(sorted(user_values))}"
        )
        user_values.setdefault("evidence", "assumed")
    return preset_table.model_copy(update={**user_values, "preset": name})
