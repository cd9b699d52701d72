"""FSDP2, as a job is resolved with it."""

from __future__ import annotations

from zsim.errors import InputError
from zsim.frameworks.fsdp2.settings import Fsdp2Config, Fsdp2Table
from zsim.frameworks.torch.expert_libraries import KEMPNERFORGE, TORCHTITAN
from zsim.frameworks.torch.fsdp_resolver import check_replicate, fsdp_dtypes, launch_ranks
from zsim.frameworks.torch.parallelism import TORCH
from zsim.frameworks.torch.split_checks import check_torch_split
from zsim.specs.experiment.framework_resolver import FrameworkResolver, Resolution, StrategyRequest
from zsim.specs.experiment.placement import Placement
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.style import ModelParallelStyle
from zsim.specs.strategy.training import TrainingConfig


class Fsdp2Resolver(FrameworkResolver[Fsdp2Table, Fsdp2Config]):
    """torch's `fully_shard`, with torchtitan's parallelism and experts."""

    padded_experts = KEMPNERFORGE

    def degrees(
        self, table: Fsdp2Table, requested: ParallelismTable
    ) -> tuple[ParallelismTable, ModelParallelStyle]:
        return requested, TORCH

    def split_experts(self, table: Fsdp2Table, requested: ParallelismTable, model: ModelSpec) -> ExpertSplit:
        if table.wrapping.startswith(("torchtitan", "blocks:")):
            return ExpertSplit(library=TORCHTITAN)
        return super().split_experts(table, requested, model)

    def expert_replicas(self, table: Fsdp2Table) -> int:
        """Replicas are those of hybrid sharding."""
        return table.replicate or 1

    def check_split(self, model: ModelSpec, training: TrainingConfig, parallelism: ParallelismConfig) -> None:
        check_torch_split(model, training, parallelism)

    def resolve(self, request: StrategyRequest[Fsdp2Table, Fsdp2Config]) -> Resolution[Fsdp2Config]:
        config = _resolve_fsdp2(request.table, request.training, request.ranks, request.placement)
        gpus_per_node = request.placement.gpus_per_node
        launch = request.cluster, gpus_per_node
        return Resolution(config, *launch_ranks(*launch, updates_on_cpu=config.cpu_offload))


def _resolve_fsdp2(
    table: Fsdp2Table, training: TrainingConfig, world_size: int, placement: Placement
) -> Fsdp2Config:
    replicate = table.replicate or 1
    check_replicate(replicate, world_size)
    shard = world_size // replicate
    reshard = table.reshard_after_forward
    group = None if reshard is None or isinstance(reshard, bool) else reshard
    if group is not None and (shard % group or not 1 < group < shard):
        raise InputError(
            f"strategy.reshard_after_forward: found group size {group}, expected a divisor of the {shard} "
            f"ranks that shard, larger than 1 and smaller than {shard}, or true or false"
        )
    param, reduce = fsdp_dtypes(table, training)
    if param == "fp8" and training.precision != "fp8":
        raise InputError(
            f"strategy.param_dtype: found 'fp8' with training.precision '{training.precision}', whose "
            f"products "
            f"read other weights; expected '{training.precision}', or precision 'fp8'"
        )
    if table.precompute_fp8_scales and param != "fp8":
        raise InputError(
            f"strategy.precompute_fp8_scales: found true with parameters that are gathered in {param}; "
            f"expected "
            "param_dtype 'fp8'"
        )
    return Fsdp2Config(
        reshard, replicate, table.wrapping, param, reduce, table.no_sync, cpu_offload=table.cpu_offload,
        precomputes_scales=table.precompute_fp8_scales,
        gpus_per_node=-(-world_size // len(placement.nodes)), job_gpus_per_node=placement.gpus_per_node,
    )  # fmt: skip


RESOLVER = Fsdp2Resolver()
