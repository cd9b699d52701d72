"""The questions that a framework answers while a plan is made.

# [Note: frozen originals]
The frozen originals that PEFT keeps next to the trained copies of `modules_to_save`.

`ModulesToSaveWrapper` (PEFT 0.21.2 utils/other.py) deep-copies a module, trains the copy and freezes the
original, which stays a submodule that is never called. DDP, and ZeRO before stage 3, hold it completely.
ZeRO-3 shards it and never fetches it. FSDP shards it with the unit that it is in. zsim leaves out that FSDP
gathers it with that unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from zsim.cost.memory import quantisation_bytes, stored_bytes
from zsim.dtypes import DTYPE_BYTES
from zsim.plan.ops import Device, Memory
from zsim.plan.pipeline.run_actions import PipelineRuntime
from zsim.specs.model.spec import ModelSpec, Parameter
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.registry import role_of
from zsim.specs.strategy.table import StrategyConfig
from zsim.specs.strategy.training import TrainingConfig

if TYPE_CHECKING:
    from zsim.plan.hooks import Hooks
    from zsim.plan.moments import BetweenSteps, JobMoment
    from zsim.plan.stage import Stage


@dataclass(frozen=True, slots=True)
class FrozenStorage:
    """How a framework stores a frozen parameter."""

    dtype: str
    """The type of one that the model does not keep in a type of its own."""
    shards: int = 1
    """The number of ranks over which it is cut."""
    device: Device = "gpu"


def originals(models: Iterable[ModelSpec], storage: FrozenStorage) -> list[Memory]:
    """Memory of the originals in a rank's stages. [] if no module is copied."""
    trained_models = [model for model in models if model.trainable_numel < model.numel]
    parameters = [
        parameter
        for model in trained_models
        for _, parameter in model.named_parameters()
        if parameter.original_dtype
    ]
    if not parameters:
        return []
    size = sum(
        _numel(parameter, storage.shards) * DTYPE_BYTES[_dtype(parameter, storage.dtype)]
        for parameter in parameters
    )
    return [Memory("parameters", size, storage.device)]


def frozen_copy(models: Iterable[ModelSpec], storage: FrozenStorage) -> list[Memory]:
    """Memory of a frozen copy of all parameters in a rank's stages."""
    size = sum(
        stored_bytes(parameter, storage.dtype, _numel(parameter, storage.shards))
        + quantisation_bytes(parameter)
        for model in models
        for _, parameter in model.named_parameters()
    )
    return [Memory("parameters", size, storage.device)]


def _dtype(parameter: Parameter, default_dtype: str) -> str:
    return (
        parameter.stored_dtype or default_dtype
        if parameter.original_dtype == "as stored"
        else parameter.original_dtype
    )


def _numel(parameter: Parameter, shards: int) -> int:
    """Elements of the first rank's shard, which is cut by rows as in FSDP2. The others' shards differ by less
    than a row.
    """
    rows, *other_dimensions = parameter.shape or (1,)
    return -(-rows // shards) * prod(other_dimensions)


Config = TypeVar("Config", bound=StrategyConfig)


class FrameworkHooks(Generic[Config]):
    """The hooks of a framework, and what else of it a plan depends on.

    `HOOKS` in the module `hooks` of the framework's folder. The answers here are those of a framework without
    anything special.
    """

    is_independent_of_ranks = False
    """Whether the ops and the memory of a rank are the same for any number of data-parallel ranks
    above one.
    """

    def make(self, stage: Stage, config: Config) -> Hooks:
        """The hooks of a stage."""
        raise NotImplementedError

    def gathers_in_forward(self, config: Config) -> bool:
        """Whether a forward gathers the weights that it computes with."""
        return False

    def fuses_whole_layers(self, config: Config) -> bool:
        """Whether projections of one input are one product also in layers that no rank shares, under a
        `ParallelismConfig` that fuses them.
        """
        return False

    def pipeline(self, config: Config, parallelism: ParallelismConfig) -> PipelineRuntime:
        """The code that runs the steps of a pipeline's ranks, or of a rank without one."""
        return PipelineRuntime(parallelism)

    # -- memory beside that of the stages' hooks --------------------------------------------------------

    pages_optimizer_states = False
    """Whether the driver may move the states of a paged optimizer off the GPU. It may not where they lie in
    the framework's own partitions.
    """
    originals_note = ""
    """The sentence on what is left out of the frozen originals of trained copies."""

    def frozen_storage(self, config: Config, training: TrainingConfig, ranks: int) -> FrozenStorage:
        """How frozen parameters are stored among `ranks` data-parallel ranks."""
        return FrozenStorage(training.stored_dtype)

    def resident(self, config: Config, models: Sequence[ModelSpec]) -> list[Memory]:
        """The memory of a rank with these stages between steps, beside that of the stages' own hooks."""
        return []

    # -- outside the steady step ------------------------------------------------------------------------

    def is_offloaded(self, config: Config) -> bool:
        """Whether parameters, gradients, optimizer states or activation checkpoints are offloaded from the
        GPU.
        """
        return False

    def moments(self, state: BetweenSteps) -> Iterable[JobMoment]:
        """The memory that the job needs when it is not in its steady step."""
        return ()


def hooks_of(config: StrategyConfig) -> FrameworkHooks[Any]:
    """The hooks of the framework that a strategy is of."""
    return cast(FrameworkHooks[Any], role_of(config.kind, "hooks", "HOOKS"))
