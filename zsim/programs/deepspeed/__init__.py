"""DeepSpeed's own launcher and the JSON of a script that calls `deepspeed.initialize`."""

from __future__ import annotations

from zsim.specs.formats.program import TrainingProgram


class DeepSpeedProgram(TrainingProgram):
    """The JSON is `strategy.config` itself, which the framework reads, and no training file beside it."""

    name = "deepspeed"
    title = "DeepSpeed"
    kinds = ("deepspeed",)
    order = 10
    suffixes = (".json",)
    file_nouns = ("DeepSpeed JSON",)
    writes = "a DeepSpeed JSON"


PROGRAM = DeepSpeedProgram()
