"""The reference engine's part in `[training]`."""

from __future__ import annotations

from zsim.errors import NotSimulatedError
from zsim.frameworks.reference.settings import ReferenceConfig, ReferenceTable
from zsim.specs.experiment.training.framework_training import FrameworkTraining
from zsim.specs.strategy.parallelism import ParallelismConfig

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
