"""The part in `[training]` that torch's two FSDPs have in common.

# [Note: FSDP's no_sync]
Gradients stay whole until the last micro-batch, and nothing synchronizes the replicas of the sharded group
before. The group's own ranks still gather parameters in every micro-batch, except where FSDP1 keeps them
gathered (torch 2.13 `_runtime_utils._should_free_in_backward`: without a reduction only strategies that
reshard after forward free them).
"""

from __future__ import annotations

from typing import TypeVar

from zsim.errors import NotSimulatedError
from zsim.frameworks.torch.fsdp_table import FsdpTable
from zsim.specs.experiment.training.framework_training import FrameworkTraining
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.strategy.optimizers import OPTIMIZERS, Optimizer
from zsim.specs.strategy.table import StrategyConfig

Table = TypeVar("Table", bound=FsdpTable)
Config = TypeVar("Config", bound=StrategyConfig)


class FsdpTraining(FrameworkTraining[Table, Config]):
    """Either FSDP, whose weights may be kept in 16 bits and whose ranks may differ."""

    has_stored_dtype = True
    has_uneven_batches = True

    def check_optimizer(
        self, optimizer: Optimizer, training: TrainingTable, table: Table, config: Config | None
    ) -> None:
        if table.cpu_offload and not optimizer.is_torch_list:
            names = ", ".join(name for name, candidate in OPTIMIZERS.items() if candidate.is_torch_list)
            raise NotSimulatedError(
                f"training.optimizer: '{optimizer.name}' with strategy.cpu_offload is not simulated; "
                f"expected torch's {names}"
            )

    def synchronized_replicas(self, table: Table, config: Config | None, replicas: int, nodes: int) -> int:
        """See [Note: FSDP's no_sync]."""
        return max(1, replicas // (table.replicate or 1)) if table.no_sync else replicas
