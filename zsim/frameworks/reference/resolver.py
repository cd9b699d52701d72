"""The reference engine, as a job is resolved with it."""

from __future__ import annotations

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.reference.settings import ReferenceConfig, ReferenceTable
from zsim.frameworks.torch.parallelism import DATA_PARALLEL, KEMPNERFORGE, UNSHARDED
from zsim.report.framework import FrameworkReport
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.framework_resolver import FrameworkResolver, Resolution, StrategyRequest
from zsim.specs.experiment.training.framework_training import FrameworkTraining
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.style import ModelParallelStyle
from zsim.specs.strategy.training import TrainingConfig


class ReferenceResolver(FrameworkResolver[ReferenceTable, ReferenceConfig]):
    """The reference engine, which knows data parallelism alone."""

    padded_experts = KEMPNERFORGE

    def degrees(
        self, table: ReferenceTable, requested: ParallelismTable
    ) -> tuple[ParallelismTable, ModelParallelStyle]:
        return requested, DATA_PARALLEL

    def resolve(
        self, request: StrategyRequest[ReferenceTable, ReferenceConfig]
    ) -> Resolution[ReferenceConfig]:
        return Resolution(*_resolve_reference(request.table, request.training, request.cluster))


def _resolve_reference(
    table: ReferenceTable, training: TrainingConfig, cluster: Cluster
) -> tuple[ReferenceConfig, Cluster]:
    """The reference engine has its own reduce-scatter, which replaces gloo's all-reduce, and AdamW only."""
    if training.optimizer != "adamw":
        raise InputError(
            f"training.optimizer: found '{training.optimizer}', expected 'adamw': the reference engine has "
            "no other"
        )
    if table.parameter_place != "device" and table.stage != 3:
        raise InputError(
            f"strategy.parameter_place: found '{table.parameter_place}' with stage {table.stage}, which "
            "shards no parameters; expected stage 3 or 'device'"
        )
    if table.stage == 0 and table.optimizer_place == "nvme":
        raise InputError("strategy.optimizer_place: found 'nvme' with stage 0, expected stage 1, 2 or 3")
    costs = cluster.collectives
    is_gloo = costs.backend == "gloo"
    if is_gloo:
        cluster = cluster.model_copy(
            update={"collectives": costs.model_copy(update={"reduce_scatter": "native"})}
        )
    low = "bf16" if training.precision == "fp8" else training.precision
    param_dtype = table.param_dtype or low
    strategy = ReferenceConfig.resolve(
        table,
        param_dtype=param_dtype,
        reduce_dtype=table.reduce_dtype or param_dtype,
        emulates_reduce_scatter=is_gloo,
    )
    return strategy, cluster


RESOLVER = ReferenceResolver()


_GRADIENT_SHARDING_STAGE = 2  # from which on gradients are reduced in every micro-batch


class ReferenceTraining(FrameworkTraining[ReferenceTable, ReferenceConfig]):
    """It trains every parameter, with the same step on every rank."""

    title = "the reference engine"
    even_batch_reason = "the reference engine runs the same step on every rank"

    def synchronized_replicas(
        self, table: ReferenceTable, config: ReferenceConfig | None, replicas: int, nodes: int
    ) -> int:
        return replicas if table.stage >= _GRADIENT_SHARDING_STAGE else 1

    def check_partial_training(
        self,
        key: str,
        table: ReferenceTable,
        config: ReferenceConfig | None,
        parallelism: ParallelismConfig,
    ) -> None:
        raise NotSimulatedError(
            f"{key}: the reference engine trains every parameter; expected another strategy"
        )


TRAINING = ReferenceTraining()


class ReferenceReport(FrameworkReport[ReferenceConfig]):
    """The paper's stages."""

    title_alone = UNSHARDED
    strategy_names = tuple(f"ZeRO stage {stage}, the reference engine" for stage in range(4))


REPORT = ReferenceReport()
