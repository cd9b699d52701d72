"""Keys of a file with tables in tables, by their dotted names. A note names those that no reader looks up."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zsim.errors import InputError, NotSimulatedError, did_you_mean
from zsim.specs.formats.config_file import flatten
from zsim.specs.formats.program_key import ProgramKey
from zsim.specs.formats.training_file import TrainingFile
from zsim.specs.model.hub_names import hub_id_of_path, locate_model, missing_model, preset_of_folder

_NOUNS: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    str: "a word",
    bool: "true or false",
    list: "a list",
    dict: "keys and values below it",
}
# Parts of names of keys that usually change a step's time or memory, which notes name first.
_WEIGHTY = re.compile(
    r"parallel|shard|offload|checkpoint|recompute|batch|seq|length|dtype|precision|fp8|lora|peft|quant|compil"
    r"|optim|attn|attention|liger|fused|pack|token_len|expert|pipeline|tensor|context|accum|_size$"
)


class NestedKeys:
    """The values of a file, looked up one by one.

    Null and empty tables are as if left out.
    """

    def __init__(
        self,
        file: TrainingFile,
        data: Mapping[str, Any],
        keys: Mapping[str, ProgramKey],
        idle: Sequence[str] = (),
    ) -> None:
        self.file = file
        self.keys = keys
        self.idle = tuple(idle)
        """Keys without effect on a step. All that stands below one of them has none either."""
        self._looked_up: set[str] = set()
        self.values = {key: value for key, value in flatten(data) if value is not None and value != {}}

    def has(self, *keys: str) -> bool:
        """Whether the file has one of the keys, or anything below one of them."""
        return any(name == key or name.startswith(f"{key}.") for key in keys for name in self.values)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a declared key. Raises InputError for one of another type."""
        self._looked_up.add(key)
        if key not in self.values:
            return default
        return self._checked(self.keys[key], self.values[key])

    def table(self, key: str) -> dict[str, Any]:
        """All values below a key, by their names without it."""
        below = {name: value for name, value in self.values.items() if name.startswith(f"{key}.")}
        self._looked_up.update(below)
        return {name.removeprefix(f"{key}."): value for name, value in below.items()}

    def count(self, key: str, default: int = 1) -> int:
        """The whole number of a declared key, at least 1."""
        number = self.get(key, default)
        if number < 1:
            raise InputError(
                f"{self.file.name}: {key}: found {number}, expected a whole number of at least 1"
            )
        return int(number)

    def read(self, *keys: str) -> None:
        """Set the settings of plain keys."""
        for key in keys:
            self._looked_up.add(key)
            self.keys[key].read(self.file, self.values, self._checked)

    def read_model(self, key: str) -> None:
        """Take the model that a declared key names: a folder here, a preset, or one in the Hub's cache."""
        name = self.get(key)
        if name is None:
            return
        folders = [Path(self.file.name).parent]
        model = locate_model(name, folders)
        if model is None and (
            model := locate_model(name, (), hub_id_of_path(name)) or preset_of_folder(name)
        ):
            self.file.note(f"{key}: '{name}' is not here; by its name it is {model} (--model says otherwise)")
        if model is not None:
            self.file.defaults["model"] = model
        else:
            self.file.missing["model"] = missing_model(key, name)

    def refuse(self, key: str, feature: str, *neutral: Any) -> None:
        """Raises NotSimulatedError if the file has a key with another value than false or `neutral`."""
        value = self.values.get(key)
        self._looked_up.add(key)
        if value and value not in neutral:
            raise NotSimulatedError(
                f"{self.file.name}: {key}: found {_shown(value)}: zsim does not simulate {feature} yet"
            )

    def ignore(self, *keys: str) -> None:
        """Count keys, and what stands below them, as looked up."""
        for key in keys:
            self._looked_up.add(key)
            self._looked_up.update(name for name in self.values if name.startswith(f"{key}."))

    def note_unread(self) -> None:
        """Add a note with every key that could matter and was not looked up, the weightiest first."""
        unread = [
            key
            for key in self.values
            if key not in self._looked_up and not any(_is_below(key, idle) for idle in self.idle)
        ]
        if unread:
            weighty = [key for key in unread if _WEIGHTY.search(key.lower())]
            lighter = [key for key in unread if key not in weighty]
            names = [f"{key}{self._hint(key)}" for key in (*weighty, *lighter)]
            self.file.note(f"not read: {', '.join(names)}")

    def _hint(self, key: str) -> str:
        """The declared key that an unknown one is a misspelling of, in brackets. Empty if there is none."""
        if key in self.keys:
            return ""
        section, _, name = key.rpartition(".")
        names = [entry.rpartition(".")[2] for entry in self.keys if entry.rpartition(".")[0] == section]
        hint = did_you_mean(name, names).strip("; ")
        return f" ({hint})" if hint else ""

    def _checked(self, key: ProgramKey, value: Any) -> Any:
        """A value of the declared type, and one of the declared words where there are any."""
        types = key.type if isinstance(key.type, tuple) else (key.type,)
        if float in types and int not in types and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if float in types and isinstance(value, str) and _is_number(value):
            value = float(value)  # YAML 1.1 takes 1e-4, without a point, as a word
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            expected = " or ".join(_NOUNS[kind] for kind in types)
            raise InputError(f"{self.file.name}: {key.key}: found {_shown(value)}, expected {expected}")
        if key.values is not None and value not in key.values:
            words = [str(word) for word in key.values]
            raise NotSimulatedError(
                f"{self.file.name}: {key.key}: zsim does not simulate {_shown(value)}; expected "
                f"{', '.join(words)}{did_you_mean(str(value), words)}"
            )
        return value


def _is_below(key: str, idle: str) -> bool:
    return key == idle or key.startswith(f"{idle}.")


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) is not None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
