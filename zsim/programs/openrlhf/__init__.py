"""OpenRLHF, whose trainers take flags and no file."""

from __future__ import annotations

from zsim.specs.formats.program import TrainingProgram


class OpenRlhf(TrainingProgram):
    """Its commands are read by the launcher's folder, which knows them by the module that they start."""

    name = "openrlhf"
    title = "OpenRLHF"
    kinds = ("deepspeed",)
    release = "OpenRLHF 3c3be623"
    recognised_by = "`openrlhf.cli.train_sft` or `train_ppo_ray` in a command"


PROGRAM = OpenRlhf()
