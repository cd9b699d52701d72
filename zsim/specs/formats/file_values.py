"""The keys of a program's file with their declarations, of which everything is used, refused or named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zsim.errors import InputError, NotSimulatedError, did_you_mean
from zsim.specs.formats.program_key import ProgramKey
from zsim.specs.formats.safe_yaml import load_yaml
from zsim.specs.formats.training_file import TrainingFile

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


def silent_keys(names: str, *prefixes: str) -> SilentKeys:
    """The keys of a text with spaces between them, and all that begin with one of `prefixes`."""
    return SilentKeys(frozenset(names.split()), prefixes)


class FileValues:
    """The values of a program's file, looked up by key.

    A null counts as a key that is left out. `refuse` and `finish` refuse and name what the file has beyond
    the keys that are read.
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

    def has(self, key: str) -> bool:
        """Whether the file says something at a key."""
        return self.values.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

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
        """The keys and values below a key."""
        value = self.get(key, {})
        if isinstance(value, str) and value.lstrip().startswith("{"):  # as a command line has it
            value = load_yaml(value, f"{self.file.name}: {key}")
        if not isinstance(value, Mapping):
            raise self.error(key, "keys and values below it")
        return value

    def choose(self, key: str, default: str, options: Iterable[str]) -> str:
        """A word out of the program's own."""
        word, words = str(self.get(key, default)), list(options)
        if word not in words:
            raise InputError(
                f"{self.file.name}: {key}: found {word!r}, expected one of {', '.join(words)}"
                f"{did_you_mean(word, words)}"
            )
        return word

    def put(self, setting: str, value: Any, *keys: str) -> None:
        """Set a setting, as the program's default if the file has none of `keys`."""
        table = self.file.settings if any(self.has(key) for key in keys) else self.file.defaults
        table[setting] = value

    def assume(self, key: str, value: Any) -> Any:
        """The value of a key, or its program's default, of which a note says that it was taken."""
        if self.has(key):
            return self.values[key]
        shown = str(value).lower() if isinstance(value, bool) else value
        self.assumptions.append(f"{key} {shown}")
        return value

    def read(self, *keys: str) -> None:
        """Set the settings of plain keys."""
        present = {key: value for key, value in self.values.items() if value is not None}
        for key in keys:
            self.keys[key].read(self.file, present, self._parse)

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

    def refuse(self) -> None:
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
        unread = [
            name
            for name, value in self.values.items()
            if name not in self.keys and name not in self.silent and not _is_empty(value)
        ]
        if unread:
            words = ", ".join(unread)
            self.file.note(f"not read, since zsim does not know what they do: {words}", is_first=True)
        if self.assumptions:
            self.file.note(
                f"not in the file, so as {release or self.title} has it: {', '.join(self.assumptions)}"
            )


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})
