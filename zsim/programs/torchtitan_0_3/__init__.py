"""torchtitan from 0.3 on, which has a command line over registered functions, and saves what it means."""

from __future__ import annotations

from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.program import ProgramSource, TrainingProgram


class TorchtitanOfFunctions(TrainingProgram):
    """Its command line, which has the form of 0.2's, is told from that by the reader that both share."""

    name = "torchtitan-0.3"
    title = "torchtitan 0.3"
    kinds = ("fsdp2",)
    order = 60

    def recognises(self, source: ProgramSource) -> bool:
        """Whether it is the JSON that `--debug.save_config_file` writes."""
        if source.suffix != ".json":
            return False
        data = source.content
        return isinstance(data, dict) and "parallelism" in data and "training" in data

    def read(self, source: ProgramSource) -> TrainingFile:
        from zsim.programs.torchtitan.read import read_torchtitan

        return read_torchtitan(source.text)


PROGRAM = TorchtitanOfFunctions()
