"""What zsim knows of one key of a DeepSpeed JSON: for the reader, the resolver, notes and the exporter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from zsim.specs.strategy.deepspeed.release import Release, Version

ANY = (0, 1, 2, 3)
STAGES_1_2 = (1, 2)
STAGE_3 = (3,)
SHARDED = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Key:
    """`effect`: what the key does to time or memory, in a few words, and `stages`: where; a key without one
    changes neither and is taken without a word.

    `since`, `until`: the first release that knows the key, and the first that refuses it. `idle`: why, and
    `is_idle`: in which releases it does nothing at any stage. `default`: what it means where the file leaves
    it out and that depends on stage and release. `is_ignored_by_mics`: MiCS_Optimizer and MiCS_Init do not
    pass it on. `is_exported`: written with its value, so that a release with other defaults does the same.
    `is_size`: a number of elements that studies turn. `is_measuring`: where it is enabled, DeepSpeed waits
    for the GPU to measure.
    """

    effect: str = ""
    stages: tuple[int, ...] = ANY
    since: Version = (0, 0, 0)
    until: Version = (1, 0, 0)
    idle: str = ""
    is_idle: Callable[[Release], bool] = lambda _release: True
    default: Callable[[int, Release], Any] | None = None
    is_ignored_by_mics: bool = False
    is_exported: bool = False
    is_size: bool = False
    is_measuring: bool = False

    def is_known(self, release: Release) -> bool:
        return self.since <= release.number < self.until


def is_enabled(value: Any) -> bool:
    """`true`, or a block that says `enabled`."""
    return value.get("enabled") is True if isinstance(value, dict) else value is True


def is_any_enabled(value: Any) -> bool:
    """Whether a block, or one inside it, says `enabled`."""
    if isinstance(value, dict):
        return any(
            entry is True if key == "enabled" else is_any_enabled(entry) for key, entry in value.items()
        )
    return False


def is_present(value: Any) -> bool:
    return value is not None and value is not False


@dataclass(frozen=True, slots=True)
class NotSimulated:
    """What a block makes DeepSpeed do and zsim would have to pretend not to see, where `is_on(value)`."""

    what: str
    is_on: Callable[[Any], bool] = is_enabled


def keys_of(block: type[BaseModel]) -> Mapping[str, Key]:
    """Bare name -> Key, of every key of a block, in the order of its fields."""
    return {
        name: next((entry for entry in info.metadata if isinstance(entry, Key)), Key())
        for name, info in block.model_fields.items()
    }
