"""FSDP1, as a job is resolved with it."""

from __future__ import annotations

from zsim.errors import InputError
from zsim.frameworks.fsdp1.settings import Fsdp1Config, Fsdp1Table
from zsim.frameworks.torch.fsdp_resolver import FsdpTraining, check_replicate, fsdp_dtypes, launch_ranks
from zsim.frameworks.torch.parallelism import DATA_PARALLEL, KEMPNERFORGE, ULYSSES, UNSHARDED
from zsim.report.framework import FrameworkReport
from zsim.specs.experiment.framework_resolver import FrameworkResolver, Resolution, StrategyRequest
from zsim.specs.experiment.job import Job, strategy_label
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.strategy.optimizers import Optimizer
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.style import ModelParallelStyle


class Fsdp1Resolver(FrameworkResolver[Fsdp1Table, Fsdp1Config]):
    """torch's `FullyShardedDataParallel`, beside which Ulysses alone splits models."""

    padded_experts = KEMPNERFORGE

    def degrees(
        self, table: Fsdp1Table, requested: ParallelismTable
    ) -> tuple[ParallelismTable, ModelParallelStyle]:
        is_ulysses = requested.context > 1 and requested.tensor == requested.pipeline == 1
        return requested, ULYSSES if is_ulysses else DATA_PARALLEL

    def resolve(self, request: StrategyRequest[Fsdp1Table, Fsdp1Config]) -> Resolution[Fsdp1Config]:
        placement = request.placement
        config = _resolve_fsdp1(request, len(placement.nodes))
        launch = request.cluster, placement.gpus_per_node
        return Resolution(config, *launch_ranks(*launch, updates_on_cpu=config.cpu_offload))


def _resolve_fsdp1(request: StrategyRequest[Fsdp1Table, Fsdp1Config], num_nodes: int) -> Fsdp1Config:
    """The table with its defaults. Adapters are units of their own unless the table says otherwise, as
    transformers' Trainer (4.39 and later, `_fsdp_qlora_plugin_updates`) and torchtune
    (`lora_fsdp_wrap_policy`, up to 0.4) wrap them.
    """
    table = request.table
    is_hybrid = "HYBRID" in table.sharding_strategy
    replicate = table.replicate or (num_nodes if is_hybrid else 1)
    if replicate > 1 and not is_hybrid:
        raise InputError(
            f"strategy.replicate: {table.sharding_strategy} has no replicas; expected HYBRID_SHARD or "
            "_HYBRID_SHARD_ZERO2"
        )
    check_replicate(replicate, request.ranks)
    param, reduce = fsdp_dtypes(table, request.training)
    wrapping = table.wrapping or ("peft" if request.has_adapters else "huggingface")
    return Fsdp1Config.resolve(
        table, replicate=replicate, wrapping=wrapping, param_dtype=param, reduce_dtype=reduce
    )


RESOLVER = Fsdp1Resolver()


class Fsdp1Training(FsdpTraining[Fsdp1Table, Fsdp1Config]):
    """Flat parameters, which are vectors and may not be parametrized."""

    title = "FSDP1"
    has_autocast = True
    unadapted_degrees = ("tensor", "pipeline")

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
        """See [Note: FSDP's no_sync] of `zsim.frameworks.torch.fsdp_resolver`."""
        if table.no_sync and table.sharding_strategy not in ("FULL_SHARD", "HYBRID_SHARD"):
            return 1
        if table.no_sync and table.sharding_strategy == "HYBRID_SHARD":
            return max(1, replicas // (table.replicate or nodes))
        return super().synchronized_replicas(table, config, replicas, nodes)

    def check_merged_adapters(self, where: str, config: Fsdp1Config | None) -> None:
        raise InputError(
            f"{where}, which PEFT parametrizes in every forward; under FSDP1 torch stops at it "
            "('Output 0 of View is a view and its base or another view of its base has been modified "
            "inplace'); expected strategy 'fsdp2' or 'ddp'"
        )


TRAINING = Fsdp1Training()


class Fsdp1Report(FrameworkReport[Fsdp1Config]):
    """The sharding strategies, of which the full one goes without saying."""

    title_alone = UNSHARDED
    strategy_names = ("FSDP1", "FSDP1 SHARD_GRAD_OP")
    offloading_names = ("FSDP1",)

    def strategy_name(self, job: Job, config: Fsdp1Config) -> str:
        return "HSDP" if config.replicate > 1 else strategy_label(job).removesuffix(" FULL_SHARD")


REPORT = Fsdp1Report()
