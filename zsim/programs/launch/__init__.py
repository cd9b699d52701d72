"""Command lines that start a training, typed or in a script: a launcher, a program, and flags."""

from __future__ import annotations

from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.program import ProgramSource, TrainingProgram


class LaunchedProgram(TrainingProgram):
    """A launcher's flags are machines. What it starts belongs to the program of its file or flags."""

    name = "launch"
    title = "a launcher"
    order = 36  # behind torchtitan's script, before Megatron, which takes any script
    is_read = False  # as a program of its own, that an experiment could be of
    example = "accelerate launch --config_file fsdp.yaml train.py --per_device_train_batch_size 2"
    takes_options = True

    def recognises(self, source: ProgramSource) -> bool:
        """Whether a command line, or a script's last one, starts another training than Megatron's."""
        from zsim.programs.launch.commands import launched

        return source.arguments is None and launched(source) is not None

    def read(self, source: ProgramSource) -> TrainingFile:
        from zsim.programs.launch.commands import launched
        from zsim.programs.launch.read import read_launch

        launch = launched(source)
        assert launch is not None
        launch.settings = source.settings
        return read_launch(launch)


PROGRAM = LaunchedProgram()
