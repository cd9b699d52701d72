"""Typed tables of an experiment: `zsim.Fsdp2(replicate=8)` in place of a dict, with completion and checks.

Each is the table of the experiment file with the same keys (`zsim explain KEY` says what one means, and
`help(zsim.Fsdp2)` lists them). Dicts are taken wherever these are.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator

from zsim.errors import InputError
from zsim.frameworks.ddp.settings import DdpTable
from zsim.frameworks.deepspeed.settings.table import DeepSpeedTable
from zsim.frameworks.fsdp1.settings import Fsdp1Table
from zsim.frameworks.fsdp2.settings import Fsdp2Table
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.frameworks.reference.settings import ReferenceTable
from zsim.specs.experiment.faults import FaultsTable
from zsim.specs.experiment.jitter import JitterTable
from zsim.specs.experiment.run.run import TrainingRunTable
from zsim.specs.experiment.run_cost import CostTable
from zsim.specs.experiment.trainer import TrainerTable
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.messages import format_problems, mark_misplaced_booleans, problems_of
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.table import StrictTable


class _TypedTable(StrictTable):
    """A table whose mistakes are `InputError`s of one paragraph. A strategy's kind counts as given.

    It is built at once, so that a notebook shows the keys of its signature before it is first called.
    """

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.model_rebuild(force=True)

    @model_validator(mode="wrap")
    @classmethod
    def _refuse(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            table = handler(mark_misplaced_booleans(data, [cls]))
        except ValidationError as error:
            raise InputError(
                format_problems(cls.__name__.removesuffix("Settings"), problems_of(error, cls))
            ) from None
        if "kind" in cls.model_fields:
            table.__pydantic_fields_set__.add("kind")
        return table


class DdpSettings(_TypedTable, DdpTable):
    """Torch's DistributedDataParallel: `zsim.Ddp(bucket_cap_mb=50)`."""

    kind: Literal["ddp"] = Field(default="ddp", description="whose data parallelism")


class DeepSpeedSettings(_TypedTable, DeepSpeedTable):
    """DeepSpeed's ZeRO, a stage with its defaults or a configuration.

    `zsim.DeepSpeed(stage=3)` or `zsim.DeepSpeed(config="ds_config.json")`, where `config` may also be the
    file's content as a dict.
    """

    kind: Literal["deepspeed"] = Field(default="deepspeed", description="whose data parallelism")


class Fsdp1Settings(_TypedTable, Fsdp1Table):
    """Torch's FullyShardedDataParallel: `zsim.Fsdp1(sharding_strategy="SHARD_GRAD_OP")`."""

    kind: Literal["fsdp1"] = Field(default="fsdp1", description="whose data parallelism")


class Fsdp2Settings(_TypedTable, Fsdp2Table):
    """Torch's `fully_shard`. `zsim.Fsdp2(replicate=8)` is hybrid sharding (HSDP) with 8 replicas."""

    kind: Literal["fsdp2"] = Field(default="fsdp2", description="whose data parallelism")


class MegatronSettings(_TypedTable, MegatronTable):
    """Megatron-Core's data parallelism: `zsim.Megatron(distributed_optimizer=True)`."""

    kind: Literal["megatron"] = Field(default="megatron", description="whose data parallelism")


class ReferenceZeroSettings(_TypedTable, ReferenceTable):
    """ZeRO as in its paper, without a framework's additions: `zsim.ReferenceZero(stage=2)`."""

    kind: Literal["reference"] = Field(default="reference", description="whose data parallelism")


class TrainingSettings(_TypedTable, TrainingTable):
    """Batch, precision, checkpointing: `zsim.Training(sequence_length=8192, micro_batch_size=1)`."""


class ParallelismSettings(_TypedTable, ParallelismTable):
    """Tensor, pipeline, context and expert degrees: `zsim.Parallelism(tensor=8, pipeline=4)`."""


class TrainerSettings(_TypedTable, TrainerTable):
    """The training loop around the model: the keys of `[trainer]`."""


class FaultsSettings(_TypedTable, FaultsTable):
    """Slow or broken parts: the keys of `[faults]`."""


class JitterSettings(_TypedTable, JitterTable):
    """Variation from step to step: the keys of `[jitter]`."""


class CostSettings(_TypedTable, CostTable):
    """Prices and power: `zsim.Cost(gpu_hour_price=2.5)`."""


class RunSettings(_TypedTable, TrainingRunTable):
    """A run of days, with saves and failures: `zsim.Run(tokens="1T", checkpoint={"every": "30 min"})`."""


# Their public names: `zsim.Fsdp2` ...
Ddp = DdpSettings
DeepSpeed = DeepSpeedSettings
Fsdp1 = Fsdp1Settings
Fsdp2 = Fsdp2Settings
Megatron = MegatronSettings
ReferenceZero = ReferenceZeroSettings
Training = TrainingSettings
Parallelism = ParallelismSettings
Trainer = TrainerSettings
Faults = FaultsSettings
Jitter = JitterSettings
Cost = CostSettings
Run = RunSettings
