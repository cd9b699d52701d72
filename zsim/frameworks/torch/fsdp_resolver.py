"""The part that torch's two FSDPs have in common while a job and its `[training]` are resolved.

# [Note: FSDP's no_sync]
Gradients stay whole until the last micro-batch, and nothing synchronizes the replicas of the sharded group
before. The group's own ranks still gather parameters in every micro-batch, except where FSDP1 keeps them
gathered (torch 2.13 `_runtime_utils._should_free_in_backward`: without a reduction only strategies that
reshard after forward free them).
"""

from __future__ import annotations

from typing import TypeVar

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.torch.fsdp_table import FsdpTable
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.training.framework_training import FrameworkTraining, check_whole_layers
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.strategy.optimizers import OPTIMIZERS, Optimizer
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.table import StrategyConfig
from zsim.specs.strategy.training import TrainingConfig

THREADS_NOTE = (
    "the CPU's optimizer has one thread a rank, as torchrun starts it: OMP_NUM_THREADS or "
    "torch.set_num_threads give it more (cluster.offload.threads_per_rank)"
)


def fsdp_dtypes(table: FsdpTable, training: TrainingConfig) -> tuple[str, str]:
    """The types in which parameters are gathered and gradients reduced."""
    low = "bf16" if training.precision == "fp8" else training.precision
    return table.param_dtype or low, table.reduce_dtype or "fp32"


def check_replicate(replicate: int, world_size: int) -> None:
    """Raises InputError for replicas that do not divide the ranks."""
    if world_size % replicate:
        raise InputError(f"strategy.replicate: found {replicate}, expected a divisor of {world_size} GPUs")


def launch_ranks(
    cluster: Cluster, gpus_per_node: int, *, updates_on_cpu: bool
) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster with the threads that torchrun gives a rank whose states the CPU updates, and a note.

    Only where the cluster does not set them. torchrun sets OMP_NUM_THREADS to 1 where it starts several ranks
    on a node (torch 2.13 distributed/run.py). DeepSpeed's launcher leaves all cores to torch.
    """
    if not updates_on_cpu or gpus_per_node == 1 or cluster.offload.threads_per_rank is not None:
        return cluster, ()
    offload = cluster.offload.model_copy(update={"threads_per_rank": 1})
    return cluster.model_copy(update={"offload": offload}), (THREADS_NOTE,)


Table = TypeVar("Table", bound=FsdpTable)
Config = TypeVar("Config", bound=StrategyConfig)


class FsdpTraining(FrameworkTraining[Table, Config]):
    """Either FSDP, whose weights may be kept in 16 bits and whose ranks may differ."""

    has_stored_dtype = True
    has_uneven_batches = True
    has_references = True

    def check_reference(
        self, where: str, reference: str, table: Table, config: Config | None, parallelism: ParallelismConfig
    ) -> None:
        """A copy is sharded like the model (TRL 1.10 models/utils.py `prepare_fsdp`, torchtune 0.6
        recipes/full_dpo_distributed.py).
        """
        check_whole_layers(where, parallelism)
        if table.cpu_offload:
            raise NotSimulatedError(
                f"{where}: zsim does not simulate a reference whose shards are on the host; expected "
                "cpu_offload = false"
            )

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
