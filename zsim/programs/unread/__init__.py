"""Files of programs that zsim does not read: each is refused by the name of its program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.errors import NotSimulatedError
from zsim.programs.marks import MarkedProgram, marks_of, matching_row
from zsim.specs.experiment.programs import readable_programs
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.program import ProgramSource


class UnreadProgram(MarkedProgram):
    """All programs of the table of marks that have no folder of their own."""

    name = "unread"
    title = "a program that is not read"
    is_read = False

    def recognises(self, source: ProgramSource) -> bool:
        marks = marks_of(source)
        return marks is not None and marks.name not in readable_programs()

    def has_tables(self, tables: Mapping[str, Any]) -> bool:
        marks = matching_row(tables)
        return marks is not None and marks.name not in readable_programs()

    def read(self, source: ProgramSource) -> TrainingFile:
        marks = marks_of(source)
        assert marks is not None
        advice = (
            marks.advice or "write an experiment file with its settings (docs/files.md lists what is read)"
        )
        raise NotSimulatedError(
            f"{source.text}: is a file of {marks.title}, which zsim does not read: {advice}"
        )


PROGRAM = UnreadProgram()
