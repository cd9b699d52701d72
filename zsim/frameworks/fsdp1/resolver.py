"""FSDP1, as a job is resolved with it."""

from __future__ import annotations

from zsim.errors import InputError
from zsim.frameworks.fsdp1.settings import Fsdp1Config, Fsdp1Table
from zsim.frameworks.torch.expert_libraries import KEMPNERFORGE
from zsim.frameworks.torch.fsdp_resolver import check_replicate, fsdp_dtypes, launch_ranks
from zsim.frameworks.torch.parallelism import DATA_PARALLEL
from zsim.specs.experiment.framework_resolver import FrameworkResolver, Resolution, StrategyRequest
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.style import ModelParallelStyle
from zsim.specs.strategy.training import TrainingConfig


class Fsdp1Resolver(FrameworkResolver[Fsdp1Table, Fsdp1Config]):
    """torch's `FullyShardedDataParallel`, whose data parallelism is simulated alone."""

    padded_experts = KEMPNERFORGE

    def degrees(
        self, table: Fsdp1Table, requested: ParallelismTable
    ) -> tuple[ParallelismTable, ModelParallelStyle]:
        return requested, DATA_PARALLEL

    def resolve(self, request: StrategyRequest[Fsdp1Table, Fsdp1Config]) -> Resolution[Fsdp1Config]:
        placement = request.placement
        config = _resolve_fsdp1(request.table, request.training, request.ranks, len(placement.nodes))
        launch = request.cluster, placement.gpus_per_node
        return Resolution(config, *launch_ranks(*launch, updates_on_cpu=config.cpu_offload))


def _resolve_fsdp1(
    table: Fsdp1Table, training: TrainingConfig, world_size: int, num_nodes: int
) -> Fsdp1Config:
    is_hybrid = "HYBRID" in table.sharding_strategy
    replicate = table.replicate or (num_nodes if is_hybrid else 1)
    if replicate > 1 and not is_hybrid:
        raise InputError(
            f"strategy.replicate: {table.sharding_strategy} has no replicas; expected HYBRID_SHARD or "
            "_HYBRID_SHARD_ZERO2"
        )
    check_replicate(replicate, world_size)
    param, reduce = fsdp_dtypes(table, training)
    return Fsdp1Config(
        table.sharding_strategy,
        replicate,
        table.wrapping,
        table.backward_prefetch,
        table.forward_prefetch,
        table.limit_all_gathers,
        param,
        reduce,
        table.no_sync,
        table.cpu_offload,
        table.before_torch_2,
        table.use_orig_params,
    )


RESOLVER = Fsdp1Resolver()
