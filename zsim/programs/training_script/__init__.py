"""People's own Python scripts and notebooks that train with the Trainer or TRL, read as text."""

from __future__ import annotations

from pathlib import Path

from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.program import ProgramSource, TrainingProgram


class TrainingScript(TrainingProgram):
    name = "training-script"
    title = "a Python script"
    order = 38
    is_read = False  # as a program of its own: an experiment is of the Trainer or of TRL
    is_script = True
    suffixes = (".py", ".ipynb")

    def recognises(self, source: ProgramSource) -> bool:
        return len(source.words) == 1 and source.suffix in self.suffixes

    def read(self, source: ProgramSource) -> TrainingFile:
        from zsim.programs.training_script.read import read_script

        return read_script(Path(source.text), source.settings)


PROGRAM = TrainingScript()
