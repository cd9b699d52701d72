"""Facts about one key of a DeepSpeed JSON, for the reader, the resolver, notes and the exporter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from zsim.frameworks.deepspeed.settings.release import Release, Version

ANY = (0, 1, 2, 3)
STAGES_1_2 = (1, 2)
STAGE_3 = (3,)
SHARDED = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Key:
    """Facts about a key. A key without an effect is accepted silently."""

    effect: str = ""
    """The key's effect on time or memory, in a few words."""
    stages: tuple[int, ...] = ANY
    """The stages at which the key has its effect."""
    since: Version = (0, 0, 0)
    """The first release that knows the key."""
    until: Version = (1, 0, 0)
    """The first release that refuses the key."""
    idle: str = ""
    """The reason why the key has no effect in the releases of `is_idle`."""
    is_idle: Callable[[Release], bool] = lambda _release: True
    """Whether the key has no effect at any stage, by release."""
    default: Callable[[int, Release], Any] | None = None
    """The key's value if the file leaves it out, where that depends on stage and release."""
    is_ignored_by_mics: bool = False
    """MiCS_Optimizer and MiCS_Init do not pass the key on."""
    is_exported: bool = False
    """The key is written with its value, so that a release with other defaults behaves the same."""
    is_size: bool = False
    """The key is a number of elements that studies vary."""
    is_measuring: bool = False
    """If the key is enabled, DeepSpeed waits for the GPU in order to measure."""

    def is_known(self, release: Release) -> bool:
        return self.since <= release.number < self.until


def is_enabled(value: Any) -> bool:
    """Whether a value is `true`, or a block with `enabled: true`."""
    return value.get("enabled") is True if isinstance(value, dict) else value is True


def is_any_enabled(value: Any) -> bool:
    """Whether a block, or one nested in it, has `enabled: true`."""
    if isinstance(value, dict):
        return any(
            entry is True if key == "enabled" else is_any_enabled(entry) for key, entry in value.items()
        )
    return False


def is_present(value: Any) -> bool:
    return value is not None and value is not False


@dataclass(frozen=True, slots=True)
class UnsimulatedBehavior:
    """Behaviour of DeepSpeed that zsim does not simulate."""

    what: str
    """The behaviour, in a few words."""
    is_on: Callable[[Any], bool] = is_enabled
    """Whether a value of the key asks for it."""


def keys_of(block: type[BaseModel]) -> Mapping[str, Key]:
    """Bare name -> Key, for every key of a block, in the order of its fields."""
    return {
        name: next((entry for entry in info.metadata if isinstance(entry, Key)), Key())
        for name, info in block.model_fields.items()
    }
