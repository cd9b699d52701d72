"""DeepSpeed, as a job is resolved with it.

# [Note: tiling]
Memory-centric tiling makes linear layers `deepspeed.zero.TiledLinear`, fetched and freed tile by tile. It is
part of the model's code, not of DeepSpeed's configuration. Only outputs are split (`out_splits`). The
concatenation of the outputs is left out.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.activation_checkpoints import check_checkpoints, refuse_two_offloads
from zsim.frameworks.deepspeed.parallelism import SPLIT_LAYERS
from zsim.frameworks.deepspeed.settings.autotp import set_tensor_grain, uneven_shards_note
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig, TrainingValues
from zsim.frameworks.deepspeed.settings.deep_compile import allowed_bytes, check_deep_compile
from zsim.frameworks.deepspeed.settings.degrees import (
    check_degrees,
    disable_overlap_in_pipeline,
    merge_degrees,
)
from zsim.frameworks.deepspeed.settings.effects import describe_settings
from zsim.frameworks.deepspeed.settings.experts import check_experts, resolve_deepspeed_experts
from zsim.frameworks.deepspeed.settings.load import load_deepspeed_config
from zsim.frameworks.deepspeed.settings.resolve import add_leaf_modules, delay_update, drop_gradient_sums
from zsim.frameworks.deepspeed.settings.table import DeepSpeedTable
from zsim.frameworks.deepspeed.settings.unsimulated import refuse_unsimulated
from zsim.frameworks.deepspeed.settings.zeropp import check_even_nodes
from zsim.frameworks.torch.parallelism import UNSHARDED
from zsim.report.framework import FrameworkReport
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.framework_resolver import (
    ExtendedModel,
    FileSettings,
    FrameworkResolver,
    Resolution,
    StrategyRequest,
)
from zsim.specs.experiment.job import Job, strategy_label
from zsim.specs.experiment.placement import Placement
from zsim.specs.experiment.training.checkpointing import block_policies
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.model.spec import Block, Linear, ModelSpec, Module, Parameter
from zsim.specs.strategy.expert_library import TRANSFORMERS
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.style import ModelParallelStyle

_MOST_TILES = 20_000  # parameters of all blocks; 36,000 take 45 s of a core and more


class DeepSpeedResolver(FrameworkResolver[DeepSpeedTable, DeepSpeedConfig]):
    """DeepSpeed, whose JSON has values of the training too and is resolved before it."""

    has_lenders = True

    def degrees(
        self, table: DeepSpeedTable, requested: ParallelismTable
    ) -> tuple[ParallelismTable, ModelParallelStyle]:
        if table.config is None:
            return requested, SPLIT_LAYERS
        return merge_degrees(requested, table.config, table.config_name)

    def extend_model(
        self, table: DeepSpeedTable, model: ModelSpec, parallelism: ParallelismConfig
    ) -> ExtendedModel:
        if table.tile_numel is not None:
            model = tile_linears(model, table.tile_numel)
            numbers = {
                id(block): sum(len(module.parameters) for module in block.modules)
                for block in model.unique_blocks
            }
            number = sum(numbers[id(block)] for block in model.blocks)
            if number > _MOST_TILES:
                raise NotSimulatedError(
                    f"strategy.tile_numel: found {table.tile_numel:,}, with which the blocks have {number:,} "
                    f"parameters; zsim simulates at most {_MOST_TILES:,}, with larger tiles"
                )
        return ExtendedModel(model, parallelism)

    def resolve_file(
        self,
        table: DeepSpeedTable,
        training: TrainingTable,
        model: ModelSpec,
        cluster: Cluster,
        placement: Placement,
        parallelism: ParallelismConfig,
    ) -> FileSettings[DeepSpeedConfig]:
        config = _resolve_json(table, training, model, cluster, placement, parallelism)
        return FileSettings(config, set_tensor_grain(parallelism, config), config.notes)

    def split_experts(
        self, table: DeepSpeedTable, requested: ParallelismTable, model: ModelSpec
    ) -> ExpertSplit:
        split = resolve_deepspeed_experts(table, requested, model)
        return super().split_experts(table, requested, model) if split.library == TRANSFORMERS else split

    def check_experts(
        self, config: DeepSpeedConfig | None, split: ExpertSplit, parallelism: ParallelismConfig
    ) -> None:
        assert config is not None
        check_experts(config, split, parallelism)

    def describe_parts(
        self, config: DeepSpeedConfig | None, model: ModelSpec, parallelism: ParallelismConfig
    ) -> list[str]:
        note = uneven_shards_note(model, parallelism, config)
        return [note] if note else []

    def resolve(
        self, request: StrategyRequest[DeepSpeedTable, DeepSpeedConfig]
    ) -> Resolution[DeepSpeedConfig]:
        assert request.config is not None
        return Resolution(request.config, request.cluster)


def _resolve_json(
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
        precision, micro_batch_size = precision or cluster.default_precision, micro_batch_size or 1
    values = TrainingValues(
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        precision=precision,
        gradient_clipping=training.gradient_clipping,
        auto_precision=cluster.default_precision,
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
        optimizer_step=table.optimizer_step,
    )
    if table.config is not None and table.stage is not None and table.stage != resolved.zero.stage:
        raise InputError(
            f"strategy.stage: found {table.stage}, but {resolved.name} says zero_optimization.stage "
            f"{resolved.zero.stage}"
        )
    check_degrees(resolved, parallelism)
    resolved = disable_overlap_in_pipeline(resolved, parallelism)
    check_even_nodes(resolved, placement.gpus)
    refuse_two_offloads(resolved, training.checkpoint_offload)
    notes = check_checkpoints(resolved, parallelism, _num_checkpoints(training, model))
    resolved = replace(resolved, notes=(*resolved.notes, *notes))
    refuse_unsimulated(resolved)
    resolved = add_leaf_modules(resolved, table.leaf_modules, model.family)
    if not table.host_gradient_sums:
        resolved = drop_gradient_sums(resolved)
    if table.delayed_parameter_update:
        resolved = delay_update(resolved)
    for key, stage in (("fetches_one_by_one", 3), ("scatters_after_backward", 1)):
        if getattr(table, key) and resolved.stage != stage and key in table.model_fields_set:
            raise InputError(
                f"strategy.{key}: found true with stage {resolved.stage}, which has no such schedule; "
                f"expected stage {stage}"
            )
    if table.scatters_after_backward and resolved.stage == 1:
        _check_first_stage_1(resolved, replicas * parallelism.context, parallelism)
    if resolved.deep_compile is not None:
        check_deep_compile(resolved, parallelism)
        capacity = min(gpu.memory.capacity for gpu in cluster.gpus)
        limit = allowed_bytes(resolved.deep_compile, capacity, cluster.framework_memory.context)
        resolved = replace(resolved, deep_compile=replace(resolved.deep_compile, tensor_bytes=limit))
    return replace(
        resolved,
        zero_init=table.zero_init,
        fetches_one_by_one=table.fetches_one_by_one and resolved.stage == 3,
        scatters_after_backward=table.scatters_after_backward and resolved.stage == 1,
    )


def _check_first_stage_1(config: DeepSpeedConfig, ranks: int, parallelism: ParallelismConfig) -> None:
    """Raises InputError for what stage 1 before DeepSpeed 0.4 lacks, and for the assertion of
    `flatten_dense_tensors_sub_partition_aligned`."""
    where = "strategy.scatters_after_backward: found true with"
    if config.precision != "fp16":
        raise InputError(
            f"{where} {config.precision}, of which DeepSpeed before 0.4 has no ZeRO; expected fp16"
        )
    if config.zero.offload_optimizer is not None:
        raise InputError(f"{where} offload_optimizer, which the first stage 1 lacks; expected it left out")
    if parallelism.experts.ranks > 1:
        raise InputError(
            f"{where} experts that other ranks have, which the first stage 1 lacks; expected "
            "parallelism.expert 1"
        )
    bucket = config.zero.reduce_bucket_size
    if bucket < ranks:
        raise InputError(
            f"{config.name}: zero_optimization.reduce_bucket_size: found {bucket:,} with {ranks:,} "
            f"data-parallel ranks, of which each has a part; expected at least {ranks:,}"
        )


def _num_checkpoints(training: TrainingTable, model: ModelSpec) -> int:
    """The number of the model's blocks that are recomputed whole."""
    layers = len(model.blocks)
    policies = block_policies(training, layers)
    if policies:
        return policies.count("full")
    return layers // training.checkpoint_every if training.activation_checkpointing == "full" else 0


RESOLVER = DeepSpeedResolver()


class DeepSpeedReport(FrameworkReport[DeepSpeedConfig]):
    """ZeRO's stages and their additions."""

    title_alone = UNSHARDED
    strategy_names = (
        "ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3 + hpZ", "ZeRO-3 + qwZ", "ZeRO-3 + qgZ",
        "ZeRO-3 + hpZ + qwZ + qgZ", "MiCS",
    )  # fmt: skip
    offloading_names = ("ZeRO-1", "ZeRO-2", "ZeRO-3")
    sharded_builder = "deepspeed.zero.Init"
    sharded_builder_key = "zero_init"
    allocator_warning = 'DeepSpeed warns of "allocator cache flushes"'

    def strategy_name(self, job: Job, config: DeepSpeedConfig) -> str:
        return "MiCS" if config.zero.is_mics else re.sub(r" \+ hpZ \d+", " + hpZ", strategy_label(job))

    def resolved_strategy(self, job: Job, config: DeepSpeedConfig) -> dict[str, Any]:
        """The settings of the JSON with their origins and effects."""
        settings = {
            row.key: f"{row.value} ({row.origin})" + (f": {row.effect}" if row.effect else "")
            for row in describe_settings(config, job.num_nodes)
        }
        return {"stage": config.stage, "version": config.version, "file": config.name, "settings": settings}

    def file_settings(self, job: Job, config: DeepSpeedConfig) -> dict[str, str] | None:
        return {setting.key: setting.value for setting in describe_settings(config, job.num_nodes)}

    def doubts_overlap(self, job: Job, config: DeepSpeedConfig) -> bool:
        return job.num_nodes > 1

    def faster_offloading(self, job: Job, config: DeepSpeedConfig) -> tuple[DeepSpeedConfig, str] | None:
        """Pinned memory, where a configuration in the experiment leaves `pin_memory` out. The user's own file
        says what it does by what it leaves out, and files that offload mostly pin: those of transformers'
        documentation (docs/source/en/deepspeed.md) and of DeepSpeed's tutorials do.
        """
        table = job.experiment.strategy
        assert isinstance(table, DeepSpeedTable)
        if isinstance(table.config, str):
            return None
        blocks = {name: getattr(config.zero, name) for name in ("offload_optimizer", "offload_param")}
        stated = (table.config or {}).get("zero_optimization") or {}
        pinned = {
            name: block.model_copy(update={"pin_memory": True})
            for name, block in blocks.items()
            if block is not None and not block.pin_memory and "pin_memory" not in stated.get(name, ())
        }
        if not pinned:
            return None
        note = (
            f"pin_memory is left out of {' and '.join(pinned)}: pages are not pinned in DeepSpeed "
            f"{config.release}, and the range counts that they may be"
        )
        return replace(config, zero=config.zero.model_copy(update=pinned)), note


REPORT = DeepSpeedReport()


def tile_linears(model: ModelSpec, most_numel: int) -> ModelSpec:
    """The model with every linear layer of a block with more than `most_numel` weights cut along its outputs
    into equal tiles of at most `most_numel`."""
    return model.map_blocks(lambda block: _tile_block(block, most_numel))


def _tile_block(block: Block, most_numel: int) -> Block:
    tiles = {module.name: _tiles(module, most_numel) for module in block.modules}
    registration = block.registration
    if registration is not None:
        registration = tuple(tile.name for name in registration for tile in tiles[name])
    return Block(
        block.kind, tuple(tile for block_tiles in tiles.values() for tile in block_tiles), registration
    )


def _tiles(module: Module, most_numel: int) -> tuple[Module, ...]:
    op_spec = module.op_spec
    if not isinstance(op_spec, Linear) or module.numel <= most_numel:
        return (module,)
    splits = min(ceil(module.numel / most_numel), op_spec.out_features)
    tiles = []
    for number in range(splits):
        rows = op_spec.out_features * (number + 1) // splits - op_spec.out_features * number // splits
        parameters = tuple(
            Parameter(parameter.name, _shape(parameter, op_spec, rows)) for parameter in module.parameters
        )
        name = f"{module.name}.linears.{number}"
        is_reader = module.shares_input or number > 0
        tiles.append(Module(name, Linear(op_spec.in_features, rows), parameters, is_reader))
    return tuple(tiles)


def _shape(parameter: Parameter, op_spec: Linear, rows: int) -> tuple[int, ...]:
    """The tile's shape: outputs are the first dimension, in GPT-2's Conv1D the last."""
    if (
        parameter.shape == (op_spec.in_features, op_spec.out_features)
        and op_spec.in_features != op_spec.out_features
    ):
        return op_spec.in_features, rows
    return (rows, *parameter.shape[1:])
