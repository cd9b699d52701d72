"""Typed tables of an experiment: `zsim.Fsdp2(replicate=8)` in place of a dict, with completion and checks.

Each is the table of the experiment file with the same keys (`zsim explain KEY` says what one means, and
`help(zsim.Fsdp2)` lists them). Dicts are taken wherever these are.
"""

from __future__ import annotations

from zsim.specs.experiment.faults import FaultsTable
from zsim.specs.experiment.jitter import JitterTable
from zsim.specs.experiment.run.run import TrainingRunTable
from zsim.specs.experiment.tables import CostTable, TrainerTable
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.messages import TypedTable
from zsim.specs.strategy.parallelism_table import ParallelismTable


class Training(TypedTable, TrainingTable):
    """Batch, precision, checkpointing: `zsim.Training(sequence_length=8192, micro_batch_size=1)`."""


class Parallelism(TypedTable, ParallelismTable):
    """Tensor, pipeline, context and expert degrees: `zsim.Parallelism(tensor=8, pipeline=4)`."""


class Trainer(TypedTable, TrainerTable):
    """The training loop around the model: the keys of `[trainer]`."""


class Faults(TypedTable, FaultsTable):
    """Slow or broken parts: the keys of `[faults]`."""


class Jitter(TypedTable, JitterTable):
    """Variation from step to step: the keys of `[jitter]`."""


class Cost(TypedTable, CostTable):
    """Prices and power: `zsim.Cost(gpu_hour_price=2.5)`."""


class Run(TypedTable, TrainingRunTable):
    """A run of days, with saves and failures: `zsim.Run(tokens="1T", checkpoint={"every": "30 min"})`."""
