"""The keys of a program's file with their declarations, of which everything is used, refused or named."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, overload

from zsim.errors import InputError, NotSimulatedError, check_choice, did_you_mean, shorten
from zsim.specs.formats.config_file import TrainingFile, flatten
from zsim.specs.formats.program_key import ProgramKey
from zsim.specs.formats.safe_yaml import load_yaml
from zsim.specs.model.hub_names import hub_id_of_path, locate_model, missing_model, preset_of_folder
from zsim.units import format_setting

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
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class SilentKeys:
    """Keys that neither the time nor the memory of a step depends on, such as paths, logs and seeds."""

    names: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ()

    def __contains__(self, key: object) -> bool:
        return key in self.names or (bool(self.prefixes) and str(key).startswith(self.prefixes))

    def __or__(self, more: SilentKeys) -> SilentKeys:
        return SilentKeys(self.names | more.names, (*self.prefixes, *more.prefixes))


def silent_keys(names: str) -> SilentKeys:
    """The keys of a text with spaces between them. A star at the end stands for all that begin so."""
    prefixes = tuple(name[:-1] for name in names.split() if name.endswith("*"))
    return SilentKeys(frozenset(name for name in names.split() if not name.endswith("*")), prefixes)


class FileValues:
    """The values of a program's file, looked up by key.

    A null counts as a key that is left out. `refuse_declared` and `finish` refuse and name what the file has
    beyond the keys that are read.
    """

    def __init__(
        self,
        file: TrainingFile,
        values: Mapping[str, Any],
        keys: Mapping[str, ProgramKey],
        silent: SilentKeys,
        title: str,
    ) -> None:
        self.file = file
        self.values = {str(key): value for key, value in values.items()}
        self.keys = keys
        self.silent = silent
        self.title = title
        self.assumptions: list[str] = []
        self.is_nested = False
        """Whether keys are dotted names of tables in tables, whose values have the declared types. Those that
        no reader looks up are named.
        """
        self._looked_up: set[str] = set()

    @classmethod
    def nested(
        cls,
        file: TrainingFile,
        data: Mapping[str, Any],
        keys: Mapping[str, ProgramKey],
        idle: SilentKeys = SilentKeys(),
    ) -> Self:
        """The values of tables in tables. Empty tables are as if left out, and neither `idle` keys nor what
        stands below them has an effect on a step.
        """
        flat = {key: value for key, value in flatten(data) if value is not None and value != {}}
        silent = SilentKeys(idle.names, (*idle.prefixes, *(f"{key}." for key in idle.names)))
        values = cls(file, flat, keys, silent, file.program or "")
        values.is_nested = True
        return values

    def has(self, *keys: str) -> bool:
        """Whether the file says something at one of the keys, or below it."""
        return any(
            value is not None and any(name == key or name.startswith(f"{key}.") for key in keys)
            for name, value in self.values.items()
        )

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key. Raises InputError for one of another type than a nested key has."""
        self._looked_up.add(key)
        value = self.values.get(key)
        if value is None:
            return default
        return self._checked(self.keys[key], value) if self.is_nested else value

    def error(self, key: str, expected: str) -> InputError:
        """The error about a value of the wrong kind."""
        return InputError(f"{self.file.name}: {key}: found {self.values.get(key)!r}, expected {expected}")

    def lack(self, key: str, feature: str) -> NotSimulatedError:
        """The error about a value that makes another job of it."""
        value = self.values.get(key)
        words = "" if value is None or isinstance(value, Mapping | list) else f" {value!r}"
        return NotSimulatedError(
            f"{self.file.name}: {key}{words}: is of {self.title}, which zsim reads, but it does not simulate "
            f"{feature}"
        )

    def flag(self, key: str, default: bool = False) -> bool:
        """A truth, also in YAML's older words."""
        value = self.get(key)
        if value is None:
            return default
        word = str(value).lower()
        if word not in (*_TRUE, *_FALSE):
            raise self.error(key, "true or false")
        return word in _TRUE

    @overload
    def count(self, key: str, default: int, minimum: int = 1) -> int: ...
    @overload
    def count(self, key: str, default: None = None, minimum: int = 1) -> int | None: ...
    def count(self, key: str, default: int | None = None, minimum: int = 1) -> int | None:
        """A whole number, also as text or as a float without a fraction."""
        value = self.get(key)
        if value is None:
            return default
        number = self._number(key, value)
        if number != int(number) or number < minimum:
            raise self.error(key, f"a whole number of at least {minimum}")
        return int(number)

    def number(self, key: str, default: float | None = None) -> float | None:
        value = self.get(key)
        return default if value is None else self._number(key, value)

    def _number(self, key: str, value: Any) -> float:
        try:
            if isinstance(value, bool):
                raise ValueError
            number = float(value)
            int(number)  # refuses infinity and what is no number
        except (TypeError, ValueError, OverflowError):
            raise self.error(key, "a number") from None
        return number

    def words(self, key: str) -> tuple[str, ...]:
        """A list of words, also as one text with commas or spaces between them."""
        value = self.get(key)
        if value is None:
            return ()
        if isinstance(value, str):
            return tuple(value.replace(",", " ").split())
        if isinstance(value, list | tuple) and all(isinstance(word, str | int | float) for word in value):
            return tuple(str(word) for word in value)
        raise self.error(key, "a list of words")

    def table(self, key: str) -> Mapping[str, Any]:
        """The keys and values below a key, by dotted names where they are nested."""
        if self.is_nested:
            below = {name: value for name, value in self.values.items() if name.startswith(f"{key}.")}
            self._looked_up.update(below)
            return {name.removeprefix(f"{key}."): value for name, value in below.items()}
        value = self.get(key, {})
        if isinstance(value, str) and value.lstrip().startswith("{"):  # as a command line has it
            value = load_yaml(value, f"{self.file.name}: {key}")
        if not isinstance(value, Mapping):
            raise self.error(key, "keys and values below it")
        return value

    @overload
    def choose(self, key: str, default: str, options: Mapping[str, Any]) -> Any: ...
    @overload
    def choose(self, key: str, default: str, options: Sequence[str]) -> str: ...
    def choose(self, key: str, default: str, options: Mapping[str, Any] | Sequence[str]) -> Any:
        """A word out of the program's own, or what stands for it."""
        word, words = str(self.get(key, default)), list(options)
        check_choice(f"{self.file.name}: {key}: found {word!r}, ", word, words)
        return options[word] if isinstance(options, Mapping) else word

    def put(self, setting: str, value: Any, *keys: str) -> None:
        """Set a setting, as the program's default if the file has none of `keys`."""
        table = self.file.settings if any(self.has(key) for key in keys) else self.file.defaults
        table[setting] = value

    def assume(self, key: str, value: Any) -> Any:
        """The value of a key, or its program's default, of which a note says that it was taken."""
        if self.has(key):
            return self.values[key]
        self.assumptions.append(f"{key} {format_setting(value)}")
        return value

    def read(self, *keys: str) -> None:
        """Set the settings of plain keys."""
        self._looked_up.update(keys)
        present = {key: value for key, value in self.values.items() if value is not None}
        for key in keys:
            self.keys[key].read(self.file, present, self._checked if self.is_nested else self._parse)

    def ignore(self, *keys: str) -> None:
        """Count keys, and what stands below them, as looked up."""
        for key in keys:
            self._looked_up.add(key)
            self._looked_up.update(name for name in self.values if name.startswith(f"{key}."))

    def read_model(self, key: str) -> None:
        """Take the model that a declared key names: a folder here, a preset, or one in the Hub's cache."""
        name = self.get(key)
        if name is None:
            return
        model = locate_model(name, [Path(self.file.name).parent])
        if model is None and (
            model := locate_model(name, (), hub_id_of_path(name)) or preset_of_folder(name)
        ):
            self.file.note(f"{key}: '{name}' is not here; by its name it is {model} (--model says otherwise)")
        if model is not None:
            self.file.defaults["model"] = model
        else:
            self.file.missing["model"] = missing_model(key, name)

    def _parse(self, key: ProgramKey, value: Any) -> Any:
        if key.key not in self.values or self.values[key.key] is None:
            return value
        if key.type is bool:
            return self.flag(key.key)
        if key.type is int:
            return self.count(key.key)
        if key.type is float:
            return self.number(key.key)
        if key.values is not None:
            return self.choose(key.key, "", [str(word) for word in key.values])
        return value

    def _checked(self, key: ProgramKey, value: Any) -> Any:
        """A value of the declared type, and one of the declared words where there are any."""
        types = key.type if isinstance(key.type, tuple) else (key.type,)
        if float in types and int not in types and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if float in types and isinstance(value, str) and _is_number(value):
            value = float(value)  # YAML 1.1 takes 1e-4, without a point, as a word
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            expected = " or ".join(_NOUNS[kind] for kind in types)
            raise InputError(
                f"{self.file.name}: {key.key}: found {shorten(repr(value))}, expected {expected}"
            )
        if key.values is not None and value not in key.values:
            words = [str(word) for word in key.values]
            raise NotSimulatedError(
                f"{self.file.name}: {key.key}: zsim does not simulate {shorten(repr(value))}; expected "
                f"{', '.join(words)}{did_you_mean(str(value), words)}"
            )
        return value

    def refuse(self, key: str, feature: str, *neutral: Any) -> None:
        """Raises NotSimulatedError if the file has a key with another value than false or `neutral`."""
        value = self.values.get(key)
        self._looked_up.add(key)
        if value and value not in neutral:
            raise NotSimulatedError(
                f"{self.file.name}: {key}: found {shorten(repr(value))}: zsim does not simulate {feature} yet"
            )

    def refuse_declared(self) -> None:
        """Raises NotSimulatedError for the first key that makes another job of it."""
        for name, key in self.keys.items():
            if key.treatment == "refused" and not key.is_neutral(self.values.get(name)):
                raise self.lack(name, key.meaning)

    def finish(self, release: str = "") -> None:
        """Name the keys that are left out, first those that are known to matter, and the defaults taken."""
        noted = [
            f"{name} ({key.meaning})"
            for name, key in self.keys.items()
            if key.treatment == "noted" and not key.is_neutral(self.values.get(name))
        ]
        if noted:
            self.file.note(f"left out, though a step depends on it: {', '.join(noted)}", is_first=True)
        if unread := self._unread():
            weighty = [name for name in unread if _WEIGHTY.search(name.lower())]
            ordered = dict.fromkeys((*weighty, *unread))
            names = ", ".join(f"{name}{self._hint(name)}" for name in ordered)
            self.file.note(f"not read: {names}", is_first=not self.is_nested)
        if self.assumptions:
            self.file.note(
                f"not in the file, so as {release or self.title} has it: {', '.join(self.assumptions)}"
            )

    def _unread(self) -> list[str]:
        """The keys that could matter, and that no reader knows or looked up."""
        read = self._looked_up if self.is_nested else self.keys
        return [
            name
            for name, value in self.values.items()
            if name not in read and name not in self.silent and (self.is_nested or not _is_empty(value))
        ]

    def _hint(self, key: str) -> str:
        """The declared key that an unknown one is a misspelling of, in brackets. Empty if there is none."""
        if key in self.keys:
            return ""
        section, _, name = key.rpartition(".")
        names = [entry.rpartition(".")[2] for entry in self.keys if entry.rpartition(".")[0] == section]
        hint = did_you_mean(name, names).strip("; ")
        return f" ({hint})" if hint else ""


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) is not None


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})
