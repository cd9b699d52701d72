"""The settings of a torchtitan file, looked up one by one."""

from __future__ import annotations

from typing import Any

from zsim.errors import InputError, did_you_mean
from zsim.programs.torchtitan.keys import KEYS
from zsim.specs.formats.program_key import ProgramKey
from zsim.specs.formats.training_file import TrainingFile


class TitanSettings:
    """Looks keys up and records whether the file gives them."""

    def __init__(self, file: TrainingFile, values: dict[str, Any]) -> None:
        self.file = file
        self.values = values

    def get(self, key: str, default: Any) -> Any:
        return self.values.get(key, default)

    def put(self, target: str, value: Any, *sources: str) -> None:
        """Set `target` to a value: as a setting if the file has any of `sources`, else as torchtitan's
        default.
        """
        is_explicit = any(source in self.values for source in sources)
        (self.file.settings if is_explicit else self.file.defaults)[target] = value

    def read(self, *keys: str) -> None:
        """Set the settings of plain keys."""
        for key in keys:
            KEYS[key].read(self.file, self.values, self._parse)

    def _parse(self, key: ProgramKey, value: Any) -> Any:
        if key.values is not None:
            self.choose(key.key, value, dict(key.values))
        return float(value) if key.type == (int, float) else value

    def choose(self, key: str, default: str, options: dict[str, Any]) -> Any:
        value = self.get(key, default)
        if value not in options:
            raise InputError(
                f"{self.file.name}: {key}: found {value!r}, expected one of {', '.join(options)}"
                f"{did_you_mean(str(value), options)}"
            )
        return options[value]
