"""Facts about one key of a DeepSpeed JSON, for the reader, the resolver, notes and the exporter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from zsim.dataclass import dataclass
from zsim.specs.strategy.deepspeed.release import Release, Version

ANY = (0, 1, 2, 3)
STAGES_1_2 = (1, 2)
STAGE_3 = (3,)
SHARDED = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Key:
    """`effect`: the key's effect on time or memory, in a few words, and `stages`: where it has it; a key
    without an effect is accepted silently.

    `since`, `until`: the first release that knows the key, and the first that refuses it. `is_idle`: in which
    releases the key has no effect at any stage, and `idle`: why. `default`: its value if the file leaves it
    out, where that depends on stage and release. `is_ignored_by_mics`: MiCS_Optimizer and MiCS_Init do not
    pass it on. `is_exported`: written with its value, so that a release with other defaults behaves the same.
    `is_size`: a number of elements that studies vary. `is_measuring`: if enabled, DeepSpeed waits for the GPU
    in order to measure.
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
class NotSimulated:
    """Behaviour of DeepSpeed that zsim does not simulate: `what` it is, where `is_on(value)`."""

    what: str
    is_on: Callable[[Any], bool] = is_enabled


def keys_of(block: type[BaseModel]) -> Mapping[str, Key]:
    """Bare name -> Key, for every key of a block, in the order of its fields."""
    return {
        name: next((entry for entry in info.metadata if isinstance(entry, Key)), Key())
        for name, info in block.model_fields.items()
    }
