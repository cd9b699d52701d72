"""The file that a framework has for its strategy, which `strategy.config` names or holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.specs.strategy.registry import kinds_with, role_of


class ConfigFile:
    """A framework's own file.

    `CONFIG_FILE` in the module `config_file` of the framework's folder. Other programs' files, of which the
    strategy is a part, are in `zsim.programs`.
    """

    noun: str
    """The file in sentences."""
    keys: tuple[str, ...] = ("strategy.config",)
    """Keys of an experiment that make its strategy the framework's."""

    def change(
        self, table: dict[str, Any], changes: Mapping[str, Any], overrides: Mapping[str, Any]
    ) -> dict[str, Any]:
        """`[strategy]` with the content of the file as `config`, with the dotted keys of `changes` set in it.

        `overrides` are all that change the experiment.
        """
        raise NotImplementedError

    def require(self, path: str | Path) -> None:
        """Raises InputError for a file that is not of this kind."""
        raise NotImplementedError


def config_kind() -> str:
    """The kind of strategy that has a file of its own."""
    return kinds_with("config_file")[0]


def config_file_of(kind: str) -> ConfigFile:
    """The file of the framework of a kind."""
    file: ConfigFile = role_of(kind, "config_file", "CONFIG_FILE")
    return file


def change_config(
    strategy: Any, changes: Mapping[str, Any], overrides: Mapping[str, Any], *, prefix: str
) -> dict[str, Any]:
    """`[strategy]` with `changes` of the file that it names. Each stands behind `prefix` in the overrides.

    Raises InputError for a strategy that has no file.
    """
    table: dict[str, Any] = dict(strategy) if isinstance(strategy, Mapping) else {}
    kind = config_kind()
    file = config_file_of(kind)
    if (requested := table.get("kind", kind)) != kind:
        raise InputError(
            f"--set {prefix}{next(iter(changes))}: is a key of {file.noun}, but strategy.kind is "
            f"'{requested}'; set {' or '.join(file.keys)} too, for kind '{kind}'"
        )
    return file.change({**table, "kind": kind}, changes, overrides)
