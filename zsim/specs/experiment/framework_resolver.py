"""The questions that a framework answers while an experiment's strategy and its split are resolved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from zsim.errors import NotSimulatedError
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.placement import Placement
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.expert_library import ExpertLibrary
from zsim.specs.strategy.experts import Dispatcher, ExpertSplit
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.registry import role_of
from zsim.specs.strategy.requirement import alternatives
from zsim.specs.strategy.style import ModelParallelStyle
from zsim.specs.strategy.table import StrategyConfig, StrategyTable
from zsim.specs.strategy.training import TrainingConfig

Table = TypeVar("Table", bound=StrategyTable)
Config = TypeVar("Config", bound=StrategyConfig)


@dataclass(frozen=True, slots=True)
class StrategyRequest(Generic[Table, Config]):
    """A `[strategy]`, and the job that it is resolved for."""

    table: Table
    config: Config | None
    """The strategy, where the framework resolved it from a file of its own before the training."""
    training: TrainingConfig
    parallelism: ParallelismConfig
    cluster: Cluster
    placement: Placement
    has_adapters: bool
    """Whether low-rank adapters are trained."""

    @property
    def ranks(self) -> int:
        """Ranks that share one part of the model."""
        return self.placement.world_size // self.parallelism.model_ranks * self.parallelism.context


@dataclass(frozen=True, slots=True)
class Resolution(Generic[Config]):
    """A strategy resolved for a job."""

    config: Config
    cluster: Cluster
    """The cluster as the framework uses it."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FileSettings(Generic[Config]):
    """The settings of a framework's own file, resolved before the training."""

    config: Config | None
    """The strategy. None for a framework without a file."""
    parallelism: ParallelismConfig
    """The parallelism with what the file says of it."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExtendedModel:
    """A model as a framework's code builds it on the ranks of a job."""

    model: ModelSpec
    parallelism: ParallelismConfig
    notes: tuple[str, ...] = ()


class FrameworkResolver(Generic[Table, Config]):
    """A framework's part in resolving a job. `RESOLVER` in the module `resolver` of its folder.

    The answers here are those of a framework without anything special.
    """

    padded_experts: ExpertLibrary | None = None
    """The library that pads routed experts to the fullest. None if the framework runs none."""
    has_lenders: bool = False
    """Layers may share a block's parameters."""

    def degrees(
        self, table: Table, requested: ParallelismTable
    ) -> tuple[ParallelismTable, ModelParallelStyle]:
        """`[parallelism]` with the degrees of the framework's own file, and the style that they belong to.

        Raises InputError for degrees that the framework refuses.
        """
        raise NotImplementedError

    def extend_model(self, table: Table, model: ModelSpec, parallelism: ParallelismConfig) -> ExtendedModel:
        """The model with what the framework adds to it or pads.

        Raises for what the framework refuses or zsim lacks.
        """
        return ExtendedModel(model, parallelism)

    def resolve_file(
        self,
        table: Table,
        training: TrainingTable,
        model: ModelSpec,
        cluster: Cluster,
        placement: Placement,
        parallelism: ParallelismConfig,
    ) -> FileSettings[Config]:
        """The settings of a file of the framework's own, which settles parts of the training."""
        return FileSettings(None, parallelism)

    def split_experts(self, table: Table, requested: ParallelismTable, model: ModelSpec) -> ExpertSplit:
        """The split of the model's routed experts, which says whose code runs them.

        Raises NotSimulatedError for experts of transformers that are not simulated.
        """
        if model.family in ("llama4_text", "llama4"):
            raise NotSimulatedError(
                f"model '{model.name}': transformers' Llama 4 computes every expert for every token "
                "(`Llama4TextMoe.forward`), which zsim does not simulate; expected "
                f"{alternatives('split experts')}"
            )
        return ExpertSplit()

    def default_dispatcher(
        self, table: Table, requested: ParallelismTable, nodes_per_domain: int
    ) -> Dispatcher | None:
        """The dispatcher where nothing is said. None for the first of the style's dispatchers.

        `nodes_per_domain` is the number of nodes that one NVLink domain spans.
        """
        return None

    def expert_replicas(self, table: Table) -> int:
        """The number of replicas that the ranks with the same experts must fill."""
        return 1

    def check_experts(
        self, config: Config | None, split: ExpertSplit, parallelism: ParallelismConfig
    ) -> None:
        """Raises for what the framework refuses, or zsim lacks, with its layers of experts."""

    def check_layers(
        self, table: Table, model: ModelSpec, training: TrainingConfig, parallelism: ParallelismConfig
    ) -> list[str]:
        """Notes about settings of the layers. Raises for those that the framework refuses."""
        return []

    def check_split(self, model: ModelSpec, training: TrainingConfig, parallelism: ParallelismConfig) -> None:
        """Raises for parallelism that the framework refuses with this model and training."""

    def describe_parts(
        self, config: Config | None, model: ModelSpec, parallelism: ParallelismConfig
    ) -> list[str]:
        """Notes about unequal parts of tensor-parallel ranks. Raises for those that zsim lacks."""
        return []

    def resolve(self, request: StrategyRequest[Table, Config]) -> Resolution[Config]:
        """The strategy. Raises for what the framework refuses."""
        raise NotImplementedError


def resolver_of(kind: str) -> FrameworkResolver[Any, Any]:
    """The resolver of the framework of a kind."""
    return cast(FrameworkResolver[Any, Any], role_of(kind, "resolver", "RESOLVER"))
