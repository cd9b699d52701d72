"""NeMo-RL, of which zsim simulates the update of the policy."""

from __future__ import annotations

from collections.abc import Mapping

from zsim.errors import InputError
from zsim.programs.marks import MarkedProgram, matching_row, row_of
from zsim.specs.formats.program import YAML_SUFFIXES, ProgramSource


class NemoRl(MarkedProgram):
    def recognises(self, source: ProgramSource) -> bool:
        """Whether the file has marks of its own, or the files that its `defaults` name have."""
        if super().recognises(source):
            return True
        data = source.content if source.suffix in YAML_SUFFIXES else None
        if not isinstance(data, Mapping) or not isinstance(data.get("defaults"), str):
            return False
        from zsim.programs.nemo_rl.read import extended_content

        try:
            marks = matching_row(extended_content(source))
        except InputError:
            return False
        return marks is not None and marks.name == self.name


PROGRAM = NemoRl(row_of("nemo-rl"))
