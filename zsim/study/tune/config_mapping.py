"""The choices that the program's configuration file can express, and those that need a change of the training
script.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zsim.specs.experiment.programs import NAMES, find_config_mapping, program_of
from zsim.study.tune.base import Base
from zsim.study.tune.candidates import Candidate
from zsim.study.tune.settings import value_of


def script_changes(candidate: Candidate) -> Iterator[str]:
    """The candidate's changes that no file can express, e.g. "training.cross_entropy = fused: ..."."""
    base = candidate.base
    program = base.program
    if program is not None and program_of(program, base.kind) is None:
        yield f"strategy.kind = {base.kind}: another strategy than {NAMES[program]}'s file has"
    for key, value in candidate.overrides.items():
        instruction = script_change(base, key, value)
        if instruction:
            yield f"{key} = {str(value).lower() if isinstance(value, bool) else value}: {instruction}"


def file_settings(candidate: Candidate) -> Iterator[str]:
    """Sentences on where the program's files express the candidate's changes of [training]."""
    base = candidate.base
    program = program_of(base.program, base.kind)
    for key, value in candidate.overrides.items():
        mapping = find_config_mapping(program, base.kind, key, value)
        is_changed = key.startswith("training.") and value != value_of(base, {}, key)
        if program is not None and is_changed and mapping is not None and mapping.location == "file":
            yield f"{NAMES[program]} is told {key} = {value} by {mapping.instruction}"


def script_change(base: Base, key: str, value: Any) -> str:
    """How the script must change for the key to have this value, or "" if no change is needed."""
    if value == value_of(base, {}, key):
        return ""
    mapping = find_config_mapping(base.program, base.kind, key, value)
    return mapping.instruction if mapping is not None and mapping.location == "script" else ""
