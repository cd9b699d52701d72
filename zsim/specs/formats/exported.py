"""The files of one configuration."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Exported:
    """`files` is {name: text}; `missing` is {name: why that file cannot say this configuration}; `notes` are
    what the training script must do because no file can."""

    files: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
