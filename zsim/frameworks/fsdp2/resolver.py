"""FSDP2, as a job is resolved with it.

# [Note: plain kernels and DTensors]
FSDP2's parameters are DTensors. bitsandbytes' optimizers call operators of their own on them, and on plain
tensors of scales, which torch refuses ("got mixed torch.Tensor and DTensor", bitsandbytes 0.50.2 with torch
2.13). Its 32-bit operator "does not have a sharding strategy registered". DeepSpeed's FusedLion reads raw
pointers (csrc/adam/multi_tensor_apply.cuh of 0.19.8), and `data_ptr()` of a DTensor is 0 (torch 2.13).
Transformer Engine's FusedAdam takes the local tensors (pytorch/optimizers/fused_adam.py of 2.17).
"""

from __future__ import annotations

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.fsdp2.settings import Fsdp2Config, Fsdp2Table
from zsim.frameworks.torch.fsdp_resolver import FsdpTraining, check_replicate, fsdp_dtypes, launch_ranks
from zsim.frameworks.torch.parallelism import (
    AUTOMODEL,
    KEMPNERFORGE,
    TORCHTITAN,
    TORCHTITAN_DEEPEP,
    UNSHARDED,
    check_torch_split,
    context_style,
)
from zsim.report.framework import FrameworkReport
from zsim.specs.experiment.framework_resolver import FrameworkResolver, Resolution, StrategyRequest
from zsim.specs.experiment.job import Job, strategy_label
from zsim.specs.experiment.placement import Placement
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.fp8 import Fp8, Fp8Recipe
from zsim.specs.strategy.optimizers import Optimizer
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
        return requested, context_style(requested)

    def split_experts(self, table: Fsdp2Table, requested: ParallelismTable, model: ModelSpec) -> ExpertSplit:
        if table.wrapping.startswith(("torchtitan", "blocks:")):
            if requested.dispatcher == "deepep":
                return ExpertSplit(library=TORCHTITAN_DEEPEP, builds_map_with_masks=True)
            return ExpertSplit(library=TORCHTITAN)
        if table.wrapping == "automodel":
            return ExpertSplit(library=AUTOMODEL)
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
            f"products read other weights; expected '{training.precision}', or precision 'fp8'"
        )
    if table.precompute_fp8_scales and param != "fp8":
        raise InputError(
            f"strategy.precompute_fp8_scales: found true with parameters that are gathered in {param}; "
            "expected param_dtype 'fp8'"
        )
    if table.defer_all_reduce and (replicate == 1 or table.no_sync):
        contradiction = (
            "one replica" if replicate == 1 else "no_sync, which reduces nothing before the last micro-batch"
        )
        raise InputError(
            f"strategy.defer_all_reduce: found true with {contradiction}; expected it left out, or "
            "strategy.replicate above 1 and no_sync false"
        )
    if table.offload_states and table.cpu_offload:
        raise InputError(
            "strategy.offload_states: found true beside cpu_offload, which updates on the host; expected one "
            "of them"
        )
    return Fsdp2Config.resolve(
        table, replicate=replicate, param_dtype=param, reduce_dtype=reduce,
        defers_all_reduce=table.defer_all_reduce, precomputes_scales=table.precompute_fp8_scales,
        gpus_per_node=-(-world_size // len(placement.nodes)), job_gpus_per_node=placement.gpus_per_node,
    )  # fmt: skip


RESOLVER = Fsdp2Resolver()


class Fsdp2Training(FsdpTraining[Fsdp2Table, Fsdp2Config]):
    """DTensors, which may be gathered in fp8."""

    title = "FSDP2"
    unadapted_degrees = ("pipeline",)
    merging_strategy = "'fsdp2' with wrapping 'huggingface'"

    def synchronized_replicas(
        self, table: Fsdp2Table, config: Fsdp2Config | None, replicas: int, nodes: int
    ) -> int:
        """Replicas whose all-reduce is deferred wait for each other only in the last micro-batch."""
        if table.defer_all_reduce:
            return max(1, replicas // (table.replicate or 1))
        return super().synchronized_replicas(table, config, replicas, nodes)

    def check_stored_dtype(
        self, training: TrainingConfig, requested: TrainingTable, table: Fsdp2Table
    ) -> None:
        conflicts = {
            f"training.optimizer '{training.optimizer}'": training.optimizer in ("muon", "adamw-bf16"),
            "training.lora of another dtype": requested.lora is not None
            and requested.lora.dtype != training.stored_dtype,
            "strategy.param_dtype 'fp8'": table.param_dtype == "fp8",
        }
        for conflict, is_so in conflicts.items():
            if is_so:
                is_lora = conflict.startswith("training.lora")
                choice = f'dtype = "{training.stored_dtype}"' if is_lora else "another choice"
                raise NotSimulatedError(
                    f"training.stored_dtype: found '{training.stored_dtype}' with {conflict} under FSDP2, "
                    f"which is not simulated; expected 'fp32', or {choice} there"
                )

    def make_fp8(self, recipe: Fp8Recipe, table: Fsdp2Table) -> Fp8:
        return Fp8(recipe, recasts_weights=True, has_quantized_weights=table.param_dtype == "fp8")

    def check_recipe(self, recipe: Fp8Recipe, training: TrainingTable, table: Fsdp2Table) -> None:
        if recipe == "torchao-rowwise" and table.param_dtype == "fp8":
            raise InputError(
                "strategy.param_dtype: found 'fp8' with fp8_recipe 'torchao-rowwise', but torchao gathers in "
                "fp8 with one scale per tensor only; expected param_dtype 'bf16', or fp8_recipe "
                "'torchao-tensorwise'"
            )

    def check_optimizer(
        self,
        optimizer: Optimizer,
        training: TrainingTable,
        table: Fsdp2Table,
        config: Fsdp2Config | None,
    ) -> None:
        """See [Note: plain kernels and DTensors]."""
        if optimizer.library == "bitsandbytes":
            raise InputError(
                f"training.optimizer: torch refuses '{optimizer.name}' of {optimizer.source} under FSDP2, "
                "whose parameters are DTensors ('got mixed torch.Tensor and DTensor'); expected "
                "'adamw-8bit-torchao', or strategy 'fsdp1' or 'ddp'"
            )
        if optimizer.name == "lion":
            raise InputError(
                f"training.optimizer: 'lion' of {optimizer.source} writes where `data_ptr()` points, which "
                "of a DTensor, as FSDP2's parameters are, is 0; expected 'adamw', or strategy 'fsdp1' or "
                "'ddp'"
            )
        super().check_optimizer(optimizer, training, table, config)


TRAINING = Fsdp2Training()


class Fsdp2Report(FrameworkReport[Fsdp2Config]):
    """FSDP2, which is HSDP with several replicas."""

    title_alone = UNSHARDED
    strategy_names = ("FSDP2", "HSDP")
    offloading_names = ("FSDP2",)

    def strategy_name(self, job: Job, config: Fsdp2Config) -> str:
        return self.headline(job, config)

    def headline(self, job: Job, config: Fsdp2Config) -> str:
        return "HSDP" if config.replicate > 1 else strategy_label(job)


REPORT = Fsdp2Report()
