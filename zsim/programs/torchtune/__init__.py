"""torchtune, whose recipes take a YAML of components (`tune run RECIPE --config FILE`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.specs.formats.program import YAML_SUFFIXES, ProgramSource, ValuesProgram

_COMPONENT = "_component_"


def has_components(data: Any) -> bool:
    """Whether a section of a file names a component of torchtune."""
    return isinstance(data, Mapping) and any(
        isinstance(section, Mapping) and str(section.get(_COMPONENT, "")).startswith("torchtune.")
        for section in data.values()
    )


class Torchtune(ValuesProgram):
    name = "torchtune"
    title = "torchtune"
    kinds = ("fsdp2", "ddp")
    order = 15
    suffixes = YAML_SUFFIXES
    file_nouns = ("torchtune YAML",)
    reads = "a torchtune YAML"
    yaml_marks = ("checkpointer", "batch_size")
    release = "torchtune 0.7.0 (bd2a0fc7)"
    recognised_by = "`_component_: torchtune...` in a section"

    def recognises(self, source: ProgramSource) -> bool:
        """Whether a YAML has a component of torchtune."""
        return source.suffix in YAML_SUFFIXES and has_components(source.content)


PROGRAM = Torchtune()
