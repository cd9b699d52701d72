"""The strategy of a job: its `[strategy]` table resolved for the ranks that data parallelism shards over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.ddp.settings import DdpConfig, DdpTable
from zsim.frameworks.deepspeed.parallelism import SPLIT_LAYERS
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig, TrainingValues
from zsim.frameworks.deepspeed.settings.degrees import (
    check_degrees,
    disable_overlap_in_pipeline,
    merge_degrees,
)
from zsim.frameworks.deepspeed.settings.experts import resolve_deepspeed_experts
from zsim.frameworks.deepspeed.settings.load import load_deepspeed_config
from zsim.frameworks.deepspeed.settings.resolve import add_leaf_modules, delay_update
from zsim.frameworks.deepspeed.settings.table import DeepSpeedTable
from zsim.frameworks.deepspeed.settings.unsimulated import refuse_unsimulated
from zsim.frameworks.deepspeed.settings.zeropp import check_even_nodes
from zsim.frameworks.fsdp1.settings import Fsdp1Config, Fsdp1Table
from zsim.frameworks.fsdp2.settings import Fsdp2Config, Fsdp2Table
from zsim.frameworks.megatron.expert_libraries import MEGATRON as MEGATRON_EXPERTS
from zsim.frameworks.megatron.expert_libraries import MEGATRON_FUSED
from zsim.frameworks.megatron.parallelism import MEGATRON, NANOTRON
from zsim.frameworks.megatron.settings.config import MegatronConfig, is_core, resolve_megatron
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.frameworks.reference.settings import ReferenceConfig, ReferenceTable
from zsim.frameworks.torch.expert_libraries import KEMPNERFORGE, TORCHTITAN
from zsim.frameworks.torch.parallelism import DATA_PARALLEL, TORCH
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.placement import Placement
from zsim.specs.experiment.tables import Experiment
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.model.expert_layer import has_experts
from zsim.specs.model.prediction import add_prediction_layers
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.expert_library import TRANSFORMERS
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.style import ModelParallelStyle
from zsim.specs.strategy.table import StrategyTable
from zsim.specs.strategy.training import Precision, TrainingConfig

_PREDICTIONS = "strategy.mtp_layers"


def requested_parallelism(experiment: Experiment) -> tuple[ParallelismTable, ModelParallelStyle]:
    """`[parallelism]` with the degrees of the strategy's own file, and whose tensor and pipeline parallelism
    it is.

    Raises InputError for degrees that torchtitan refuses
    with DDP (v0.2.2 `parallelize_llama`).
    """
    table, parallelism = experiment.strategy, experiment.parallelism
    if isinstance(table, MegatronTable):
        return parallelism, NANOTRON if table.engine == "nanotron" else MEGATRON
    if isinstance(table, DeepSpeedTable):
        if table.config is None:
            return parallelism, SPLIT_LAYERS
        return merge_degrees(parallelism, table.config, table.config_name)
    for key, degree in (("tensor", parallelism.tensor), ("context", parallelism.context)):
        if isinstance(table, DdpTable) and degree > 1:
            raise InputError(
                f"parallelism.{key}: found {degree} with strategy 'ddp', which torchtitan takes for data "
                "parallelism alone; expected strategy 'fsdp2', with `replicate` for its replicas"
            )
    return parallelism, TORCH if isinstance(table, Fsdp2Table | DdpTable) else DATA_PARALLEL


def resolve_experts(model: ModelSpec, table: StrategyTable, requested: ParallelismTable) -> ExpertSplit:
    """How a strategy runs the model's routed experts. `requested` has their degrees.

    Models without experts all have the same value. Raises for what the strategy's code does not support with
    experts.
    """
    if not has_experts(model):
        return ExpertSplit()
    if requested.expert_padding:
        return _padded_experts(table)
    if isinstance(table, DeepSpeedTable):
        split = resolve_deepspeed_experts(table, requested, model)
        if split.library != TRANSFORMERS:
            return split
    if isinstance(table, MegatronTable) and table.engine == "megatron":
        return ExpertSplit(
            dispatcher="all-gather",
            library=MEGATRON_FUSED if table.moe_permute_fusion else MEGATRON_EXPERTS,
            kernel="streams" if table.moe_grouped_gemm else "loop",
            gate_in_fp32=table.moe_router_dtype is not None,
            has_auxiliary_loss=table.moe_aux_loss,
            pads_to_capacity=table.moe_pad_to_capacity,
            overlaps_shared=table.overlap_shared_experts,
            quantised_padding=_quantised_padding(table),
            builds_map_with_masks=not (table.enable_experimental and table.moe_permute_fusion),
        )
    is_titan = isinstance(table, Fsdp2Table) and table.wrapping.startswith(("torchtitan", "blocks:"))
    if model.family == "llama4_text" and not is_titan:
        raise NotSimulatedError(
            f"model '{model.name}': transformers' Llama 4 computes every expert for every token "
            "(`Llama4TextMoe.forward`), which zsim does not simulate; expected strategy 'megatron', or "
            "'fsdp2' with wrapping 'torchtitan'"
        )
    return ExpertSplit(library=TORCHTITAN if is_titan else TRANSFORMERS)


def expert_replicas(table: StrategyTable) -> int:
    """The number of replicas that the ranks with the same experts must fill.

    It is that of hybrid sharding, or the number of instances of Megatron's distributed optimizer
    (Megatron-Core 0.16.1 core/parallel_state.py: "Expert data parallel size should be divisible by partial
    DistOpt shard factor").
    """
    if isinstance(table, MegatronTable):
        return table.optimizer_instances
    return table.replicate or 1 if isinstance(table, Fsdp2Table) else 1


def _quantised_padding(table: MegatronTable) -> Literal["map", "copies"]:
    """`TEGroupedMLP` and `SequentialMLP` copy what the map leaves (Megatron-Core 0.16.1
    core/transformer/moe/experts.py).
    """
    return "map" if table.moe_router_padding else "copies"


def _padded_experts(table: StrategyTable) -> ExpertSplit:
    """Experts padded to the size of the fullest (kempnerforge/model/moe.py at 5666d0d1)."""
    if isinstance(table, DeepSpeedTable | MegatronTable):
        raise InputError(
            f"parallelism.expert_padding: found true with strategy '{table.kind}', which pads no expert to "
            "the fullest; expected it left out, or strategy 'fsdp2', 'fsdp1' or 'ddp'"
        )
    return ExpertSplit(library=KEMPNERFORGE, has_auxiliary_loss=True)


def resolve_strategy(
    table: StrategyTable, training: TrainingConfig, ranks: int, cluster: Cluster, num_nodes: int
) -> tuple[DdpConfig | Fsdp1Config | Fsdp2Config | MegatronConfig | ReferenceConfig, Cluster]:
    """A table other than DeepSpeed's, resolved for `ranks` ranks that share one part of the model, and the
    cluster.

    Under the reference engine the cluster has that engine's own collectives.
    """
    if isinstance(table, DdpTable):
        strategy = DdpConfig(
            bucket_cap_bytes=round(table.bucket_cap_mb * 2**20),
            first_bucket_cap_bytes=2**20 if table.bucket_cap_mb == 25 else round(table.bucket_cap_mb * 2**20),
            gradient_as_bucket_view=table.gradient_as_bucket_view,
            no_sync=table.no_sync,
        )
        return strategy, cluster
    if isinstance(table, Fsdp2Table):
        return replace(_resolve_fsdp2(table, training, ranks), gpus_per_node=-(-ranks // num_nodes)), cluster
    if isinstance(table, MegatronTable):
        capabilities = [gpu.compute_capability for gpu in cluster.gpus if gpu.compute_capability is not None]
        return resolve_megatron(table, training, ranks, max(capabilities, default=None)), cluster
    if isinstance(table, ReferenceTable):
        return _resolve_reference(table, training, cluster)
    assert isinstance(table, Fsdp1Table)
    return _resolve_fsdp1(table, training, ranks, num_nodes), cluster


def apply_launcher_threads(
    strategy: object, cluster: Cluster, gpus_per_node: int
) -> tuple[Cluster, list[str]]:
    """The cluster with the threads that a rank's launcher gives it, where the cluster does not set them, and
    a note about them.

    torchrun sets OMP_NUM_THREADS to 1 where it starts several ranks on a node (torch 2.13
    distributed/run.py). DeepSpeed's launcher leaves all cores to torch.
    """
    is_torch_offload = isinstance(strategy, Fsdp1Config | Fsdp2Config) and strategy.cpu_offload
    if not is_torch_offload or gpus_per_node == 1 or cluster.offload.threads_per_rank is not None:
        return cluster, []
    offload = cluster.offload.model_copy(update={"threads_per_rank": 1})
    note = (
        "the CPU's optimizer has one thread a rank, as torchrun starts it: OMP_NUM_THREADS or "
        "torch.set_num_threads give it more (cluster.offload.threads_per_rank)"
    )
    return cluster.model_copy(update={"offload": offload}), [note]


def default_precision(cluster: Cluster) -> Precision:
    """bf16 where all GPUs have it, else fp16."""
    return "bf16" if all(gpu.peak.bf16 is not None for gpu in cluster.gpus) else "fp16"


def resolve_deepspeed(
    table: DeepSpeedTable,
    training: TrainingTable,
    model: ModelSpec,
    cluster: Cluster,
    placement: Placement,
    parallelism: ParallelismConfig,
) -> DeepSpeedConfig:
    """The resolved DeepSpeed JSON of the user, or of a stage with defaults. If both give a stage, it must be
    equal.
    """
    replicas = placement.world_size // parallelism.model_ranks
    config: str | Path | dict[str, Any]
    if table.config is None:
        if table.stage is None:
            raise InputError("strategy: deepspeed needs 'stage' or 'config'")
        config = {"zero_optimization": {"stage": table.stage}}
    else:
        config = table.config
    precision, micro_batch_size = training.precision, training.micro_batch_size
    if table.config is None:
        precision, micro_batch_size = precision or default_precision(cluster), micro_batch_size or 1
    values = TrainingValues(
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        precision=precision,
        gradient_clipping=training.gradient_clipping,
        auto_precision=default_precision(cluster),
    )
    resolved = load_deepspeed_config(
        config,
        version=table.version,
        world_size=replicas * parallelism.context,
        replicas=replicas,
        gpus_per_node=placement.gpus_per_node,
        hidden_size=model.hidden_size,
        training=values,
        name=table.config_name,
    )
    if table.config is not None and table.stage is not None and table.stage != resolved.zero.stage:
        raise InputError(
            f"strategy.stage: found {table.stage}, but {resolved.name} says zero_optimization.stage "
            f"{resolved.zero.stage}"
        )
    check_degrees(resolved, parallelism)
    resolved = disable_overlap_in_pipeline(resolved, parallelism)
    check_even_nodes(resolved, placement.gpus)
    refuse_unsimulated(resolved)
    resolved = add_leaf_modules(resolved, table.leaf_modules, model.family)
    if table.delayed_parameter_update:
        resolved = delay_update(resolved)
    if table.fetches_one_by_one and resolved.stage != 3:
        raise InputError(
            f"strategy.fetches_one_by_one: found true with stage {resolved.stage}, which fetches no "
            "parameters; expected stage 3"
        )
    return replace(resolved, zero_init=table.zero_init, fetches_one_by_one=table.fetches_one_by_one)


def _fsdp_dtypes(table: Fsdp1Table | Fsdp2Table, training: TrainingConfig) -> tuple[str, str]:
    low = "bf16" if training.precision == "fp8" else training.precision
    return table.param_dtype or low, table.reduce_dtype or "fp32"


def _check_replicate(replicate: int, world_size: int) -> None:
    if world_size % replicate:
        raise InputError(f"strategy.replicate: found {replicate}, expected a divisor of {world_size} GPUs")


def _resolve_fsdp2(table: Fsdp2Table, training: TrainingConfig, world_size: int) -> Fsdp2Config:
    replicate = table.replicate or 1
    _check_replicate(replicate, world_size)
    shard = world_size // replicate
    reshard = table.reshard_after_forward
    group = None if reshard is None or isinstance(reshard, bool) else reshard
    if group is not None and (shard % group or not 1 < group < shard):
        raise InputError(
            f"strategy.reshard_after_forward: found group size {group}, expected a divisor of the {shard} "
            f"ranks that shard, larger than 1 and smaller than {shard}, or true or false"
        )
    param, reduce = _fsdp_dtypes(table, training)
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
    )  # fmt: skip


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
    strategy = ReferenceConfig(
        table.stage,
        table.param_dtype or low,
        table.reduce_dtype or table.param_dtype or low,
        table.bucket_bytes,
        table.prefetch,
        table.max_reductions_in_flight,
        table.keep_gathered,
        is_gloo,
        table.optimizer_place,
        table.parameter_place,
    )
    return strategy, cluster


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
    _check_replicate(replicate, world_size)
    param, reduce = _fsdp_dtypes(table, training)
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


def apply_multi_token_prediction(
    model: ModelSpec, table: MegatronTable, parallelism: ParallelismConfig
) -> tuple[ModelSpec, ParallelismConfig]:
    """The model with its layers of multi-token prediction, and the stages with those layers on the last.

    Raises InputError where Megatron has none, NotSimulatedError for what zsim lacks.
    """
    count = table.mtp_layers
    if table.engine != "megatron" or not is_core(table.version):
        raise InputError(
            f"{_PREDICTIONS}: found {count}; only Megatron-Core has multi-token prediction, expected 0"
        )
    if model.learned_positions:  # core 0.16.1 training/arguments.py, `position_embedding_type`
        raise InputError(
            f"{_PREDICTIONS}: found {count} with '{model.name}', whose positions are learned; Megatron has "
            "multi-token prediction with rotary positions or none, expected 0"
        )
    unsupported = {
        "Megatron-FSDP": table.fsdp_sharding is not None,
        "overlap_expert_parallel": table.overlap_expert_parallel,
        f"schedule '{parallelism.schedule}'": parallelism.pipeline > 1 and parallelism.is_v_schedule,
        "a captured module": model.captured is not None,
        "an encoder": model.has_encoder,
    }
    for name, is_given in unsupported.items():
        if is_given:
            raise NotSimulatedError(
                f"{_PREDICTIONS}: found {count} with {name}, beside which zsim does not simulate it yet"
            )
    stages = parallelism.layers_per_stage
    if stages:
        parallelism = replace(parallelism, layers_per_stage=(*stages[:-1], stages[-1] + count))
    return add_prediction_layers(model, count), parallelism
