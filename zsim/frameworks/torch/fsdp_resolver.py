"""The part that torch's two FSDPs have in common while a job is resolved."""

from __future__ import annotations

from zsim.errors import InputError
from zsim.frameworks.torch.fsdp_table import FsdpTable
from zsim.specs.cluster.cluster import Cluster
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
