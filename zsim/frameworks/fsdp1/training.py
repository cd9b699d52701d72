"""FSDP1's part in `[training]`."""

from __future__ import annotations

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.fsdp1.settings import Fsdp1Config, Fsdp1Table
from zsim.frameworks.torch.fsdp_training import FsdpTraining
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.strategy.optimizers import Optimizer
from zsim.specs.strategy.parallelism import ParallelismConfig


class Fsdp1Training(FsdpTraining[Fsdp1Table, Fsdp1Config]):
    """Flat parameters, which are vectors and may not be parametrized."""

    title = "FSDP1"
    has_autocast = True

    def check_optimizer(
        self,
        optimizer: Optimizer,
        training: TrainingTable,
        table: Fsdp1Table,
        config: Fsdp1Config | None,
    ) -> None:
        if optimizer.name == "muon":
            raise InputError(
                "training.optimizer: torch's Muon takes matrices only, and FSDP1's flat parameters are "
                "vectors; expected strategy 'fsdp2' or 'ddp', or another optimizer"
            )
        super().check_optimizer(optimizer, training, table, config)

    def synchronized_replicas(
        self, table: Fsdp1Table, config: Fsdp1Config | None, replicas: int, nodes: int
    ) -> int:
        """See [Note: FSDP's no_sync] of `zsim.frameworks.torch.fsdp_training`."""
        if table.no_sync and table.sharding_strategy not in ("FULL_SHARD", "HYBRID_SHARD"):
            return 1
        if table.no_sync and table.sharding_strategy == "HYBRID_SHARD":
            return max(1, replicas // (table.replicate or nodes))
        return super().synchronized_replicas(table, config, replicas, nodes)

    def check_partial_training(
        self, key: str, table: Fsdp1Table, config: Fsdp1Config | None, parallelism: ParallelismConfig
    ) -> None:
        super().check_partial_training(key, table, config, parallelism)
        if table.cpu_offload and key == "training.lora":
            raise NotSimulatedError(
                f"{key}: not simulated with FSDP1 and strategy.cpu_offload yet; expected strategy 'fsdp2'"
            )

    def check_merged_adapters(self, where: str, config: Fsdp1Config | None) -> None:
        raise InputError(
            f"{where}, which PEFT parametrizes in every forward; under FSDP1 torch stops at it "
            "('Output 0 of View is a view and its base or another view of its base has been modified "
            "inplace'); expected strategy 'fsdp2' or 'ddp'"
        )


TRAINING = Fsdp1Training()
