"""Keys of other programs' files, each declared once: reader, writer, `zsim tune` and pages take it from
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from zsim.specs.experiment.job import Job
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.program import ConfigMapping


@dataclass(frozen=True, slots=True)
class ProgramKey:
    """A key of a program's file."""

    key: str
    """The key as the program has it, behind its section and a dot if it stands in one."""
    type: type | tuple[type, ...]
    """The types of its values."""
    meaning: str
    """What it sets, in a few words."""
    setting: str = ""
    """The dotted key of an experiment that it sets. Empty if it sets none by itself."""
    is_plain: bool = False
    """Whether it alone sets that, so that it is read and written by this declaration."""
    values: Mapping[Any, Any] | None = None
    """The program's values, with the experiment's for each, or None for one that leaves the setting open.
    Without a mapping both are the same.
    """
    default: Any = None
    """The program's value where the file does not have the key. None leaves the setting open."""
    is_default_stated: bool = False
    """The default counts as if the file had it, so that an experiment cannot say otherwise."""
    tuned: tuple[Any, ...] | None = None
    """The experiment's values that `zsim tune` may propose, () for any. None: it proposes none."""
    instruction: str = ""
    """How the program is told, where that is more than the key."""
    source: str = ""
    """Where this was read, and in which release."""
    kinds: tuple[str, ...] = ()
    """The strategies under which the program reads it. Empty: all."""
    treatment: Literal["read", "noted", "refused"] = "read"
    """A noted key changes the time or the memory a little, and zsim leaves it out and says so. A refused key
    makes another job of it, which zsim does not simulate.
    """
    neutral: tuple[Any, ...] = ()
    """Values of a noted or refused key that change nothing, besides null, false and what is empty."""
    _program_values: Mapping[Any, Any] = field(init=False, repr=False, compare=False)
    """The program's values by the experiment's."""

    def __post_init__(self) -> None:
        program_values = {setting: value for value, setting in (self.values or {}).items()}
        object.__setattr__(self, "_program_values", program_values)

    def is_neutral(self, value: Any) -> bool:
        """Whether a value is as good as none."""
        is_empty = value is None or value is False or value in ("", [], {})
        return is_empty or any(type(entry) is type(value) and entry == value for entry in self.neutral)

    def read(
        self,
        file: TrainingFile,
        values: Mapping[str, Any],
        parse: Callable[[ProgramKey, Any], Any] = lambda _, value: value,
    ) -> None:
        """Write the setting of a plain key into `file`, from the file's `values`.

        `parse` makes one of the program's values of what the file says.
        """
        assert self.is_plain
        is_stated = self.key in values
        if not is_stated and self.default is None:
            return
        value = parse(self, values.get(self.key, self.default))
        setting = value if self.values is None else self.values[value]
        if setting is not None:
            table = file.settings if is_stated or self.is_default_stated else file.defaults
            table[self.setting] = setting

    def write(self, job: Job) -> Any:
        """The program's value for a job."""
        table, _, name = self.setting.partition(".")
        return self.value_of(getattr(getattr(job, table), name))

    def value_of(self, setting: Any) -> Any:
        """The program's value for a value of the experiment."""
        if self.values is None:
            return setting
        return self._program_values[setting if setting in self._program_values else None]

    def mapping(self) -> ConfigMapping:
        """How `zsim tune` says that the program is told."""
        return ConfigMapping(
            self.setting, "file", self.instruction or self.key, self.source, self.tuned or (), self.kinds
        )


def declare(*rows: tuple[Any, ...], **shared: Any) -> tuple[ProgramKey, ...]:
    """Keys from rows of (key, type, meaning) or (key, type, meaning, setting), with what all rows share."""
    return tuple(ProgramKey(*row, **shared) for row in rows)


def index_keys(
    *keys: ProgramKey,
    refused: Iterable[tuple[str, str]] = (),
    noted: Iterable[tuple[str, str]] = (),
    types: tuple[type, ...] = (bool, str, dict),
    neutral: tuple[Any, ...] = (),
) -> dict[str, ProgramKey]:
    """Keys by their names, with those that are refused or noted, of (key, meaning) each. `neutral` are values
    of the noted ones that change nothing. A refused key is off where it is 0.
    """
    refusals = declare(
        *((name, types, meaning) for name, meaning in refused), treatment="refused", neutral=(0, 0.0)
    )
    notes = declare(*((name, types, meaning) for name, meaning in noted), treatment="noted", neutral=neutral)
    return {key.key: key for key in (*keys, *refusals, *notes)}


def tuned_mappings(keys: Iterable[ProgramKey]) -> tuple[ConfigMapping, ...]:
    """The rows of all keys that `zsim tune` may change."""
    return tuple(key.mapping() for key in keys if key.tuned is not None)
