"""Megatron, and the engines with its data parallelism, as a job is resolved with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.megatron import parallelism as styles
from zsim.frameworks.megatron.kernels import MEGATRON, MEGATRON_FUSED
from zsim.frameworks.megatron.settings.config import (
    MegatronConfig,
    check_distributed_checkpoints,
    check_megatron_layout,
    is_core,
    is_core_since,
    resolve_megatron,
)
from zsim.frameworks.megatron.settings.experts import (
    check_overlap,
    check_router_padding,
    norms_note,
    shared_overlap_note,
)
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.frameworks.torch.fsdp_resolver import launch_ranks
from zsim.frameworks.torch.parallelism import UNSHARDED
from zsim.operations.hyper_connection import AlternatingUpdate
from zsim.operations.operation import operations_of
from zsim.report.framework import FrameworkReport
from zsim.specs.experiment.framework_resolver import (
    ExtendedModel,
    FrameworkResolver,
    Resolution,
    StrategyRequest,
)
from zsim.specs.model.prediction import add_prediction_layers
from zsim.specs.model.spec import Embedding, Linear, Loss, ModelSpec, Module, Parameter
from zsim.specs.strategy.experts import Dispatcher, ExpertSplit
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.requirement import alternatives
from zsim.specs.strategy.style import ModelParallelStyle
from zsim.specs.strategy.training import TrainingConfig


class MegatronResolver(FrameworkResolver[MegatronTable, MegatronConfig]):
    """Megatron, nanotron and InternEvo."""

    def degrees(
        self, table: MegatronTable, requested: ParallelismTable
    ) -> tuple[ParallelismTable, ModelParallelStyle]:
        return requested, styles.NANOTRON if table.engine == "nanotron" else styles.MEGATRON

    def extend_model(
        self, table: MegatronTable, model: ModelSpec, parallelism: ParallelismConfig
    ) -> ExtendedModel:
        notes = _prediction_notes(model, table)
        if table.mtp_layers:
            model, parallelism = apply_multi_token_prediction(model, table, parallelism)
        unpadded_size = model.vocab_size
        model = pad_vocabulary(model, table.vocabulary_multiple * parallelism.tensor)
        if model.vocab_size != unpadded_size:
            notes += (f"Megatron pads the vocabulary of {unpadded_size:,} to {model.vocab_size:,}",)
        return ExtendedModel(model, parallelism, notes)

    def split_experts(
        self, table: MegatronTable, requested: ParallelismTable, model: ModelSpec
    ) -> ExpertSplit:
        """`TEGroupedMLP` and `SequentialMLP` copy what a padded map of rows leaves (Megatron-Core 0.16.1
        core/transformer/moe/experts.py).
        """
        if table.engine != "megatron":
            return super().split_experts(table, requested, model)
        return ExpertSplit(
            dispatcher="all-gather",
            library=MEGATRON_FUSED if table.moe_permute_fusion else MEGATRON,
            kernel="streams" if table.moe_grouped_gemm else "loop",
            gate_in_fp32=table.moe_router_dtype is not None,
            has_auxiliary_loss=table.moe_aux_loss,
            pads_to_capacity=table.moe_pad_to_capacity,
            overlaps_shared=table.overlap_shared_experts,
            quantised_padding="map" if table.moe_router_padding else "copies",
            builds_map_with_masks=not (table.enable_experimental and table.moe_permute_fusion),
        )

    def default_dispatcher(
        self, table: MegatronTable, requested: ParallelismTable, nodes_per_domain: int
    ) -> Dispatcher | None:
        """All-to-alls, and in an NVLink domain of several nodes HybridEP from Megatron-Core 0.15 on.

        Megatron's command line alone has all-gathers, which the reader of command lines fills in. What people
        run has another: the recipes of Megatron-Bridge and NeMo state `alltoall` for every mixture, and their
        `flex` dispatcher takes HybridEP for GB200 and GB300 (Megatron-Bridge training/
        flex_dispatcher_backend.py, DeepSeek-V3's and Qwen3's recipes for NVL72). Tokens that are dropped and
        shared experts that overlap are all-to-alls' alone there (scripts/performance/utils, `run_script.py`;
        core/transformer/transformer_config.py).
        """
        needs_all_to_all = requested.capacity_factor is not None or table.overlap_shared_experts
        if requested.expert == 1 or nodes_per_domain == 1 or needs_all_to_all:
            return "all-to-all"
        return "hybridep" if is_core_since(table.version, (0, 15)) else "all-to-all"

    def expert_replicas(self, table: MegatronTable) -> int:
        """Replicas are instances of the distributed optimizer (Megatron-Core 0.16.1 core/parallel_state.py:
        "Expert data parallel size should be divisible by partial DistOpt shard factor").
        """
        return table.optimizer_instances

    def check_layers(
        self,
        table: MegatronTable,
        model: ModelSpec,
        training: TrainingConfig,
        parallelism: ParallelismConfig,
    ) -> list[str]:
        check_overlap(table, parallelism, training)
        check_router_padding(table, parallelism.experts, training, model)
        notes = norms_note(table, model), shared_overlap_note(table, parallelism, training, model)
        return [note for note in notes if note]

    def check_split(self, model: ModelSpec, training: TrainingConfig, parallelism: ParallelismConfig) -> None:
        """Checks as `validate_args` of Megatron-Core 0.16.1 training/arguments.py does, and those of
        hyper-connections (d98e8a64 core/transformer/transformer_config.py, `enable_hyper_connections`).
        """
        _check_streams(model, training, parallelism)
        is_cut = parallelism.async_tensor and parallelism.tensor > 1
        if parallelism.style == styles.MEGATRON and is_cut and not parallelism.sequence_parallel:
            raise InputError(
                "parallelism.async_tensor: found true without sequence parallelism, which Megatron's "
                "--tp-comm-overlap asserts; expected sequence_parallel = true"
            )

    def resolve(self, request: StrategyRequest[MegatronTable, MegatronConfig]) -> Resolution[MegatronConfig]:
        table, training, parallelism = request.table, request.training, request.parallelism
        gpus = request.cluster.gpus
        capabilities = [gpu.compute_capability for gpu in gpus if gpu.compute_capability is not None]
        config = resolve_megatron(table, training, request.ranks, max(capabilities, default=None))
        queues = training.device_max_connections
        check_distributed_checkpoints(
            table, training, parallelism.tensor, shares_sequences=parallelism.sequence_parallel
        )
        check_megatron_layout(table, parallelism.pipeline, parallelism.experts.ranks, queues)
        launch = request.cluster, request.placement.gpus_per_node
        cluster, notes = launch_ranks(*launch, updates_on_cpu=config.offload is not None)
        return Resolution(config, cluster, notes)


def _check_streams(model: ModelSpec, training: TrainingConfig, parallelism: ParallelismConfig) -> None:
    modules = [module for block in model.unique_blocks for module in block.modules]
    if operations_of(modules, AlternatingUpdate):
        raise NotSimulatedError(
            f"model '{model.name}' has alternating updates of several streams, of which Megatron has no "
            f"layer; expected {alternatives('mixers')}"
        )
    if all(module.op_spec.residual_streams == 1 for module in modules):
        return
    refused = {
        "parallelism.pipeline": (parallelism.pipeline > 1, parallelism.pipeline, "1"),
        "training.activation_checkpointing": (
            training.activation_checkpointing == "full",
            "'full'",
            "'selective' or 'none'",
        ),
        _PREDICTIONS: (model.num_prediction_layers > 0, model.num_prediction_layers, "0"),
    }
    for key, (is_given, value, expected) in refused.items():
        if is_given:
            raise InputError(
                f"{key}: found {value} with the hyper-connections of '{model.name}', which Megatron-Core "
                f"refuses; expected {expected}"
            )


RESOLVER = MegatronResolver()


class MegatronReport(FrameworkReport[MegatronConfig]):
    """The forms of its optimizer."""

    title_alone = UNSHARDED
    strategy_names = ("Megatron DDP", "Megatron, distributed optimizer")


REPORT = MegatronReport()


_PREDICTIONS = "strategy.mtp_layers"


def _prediction_notes(model: ModelSpec, table: MegatronTable) -> tuple[str, ...]:
    """The note on a model's multi-token prediction, where the experiment does not say whether it is trained.

    Megatron-Bridge builds the layers that a config.json has (067f987d models/nemotronh/nemotron_h_bridge.py
    and the bridges of its other families), Megatron-LM those of `--mtp-num-layers`.
    """
    is_open = "mtp_layers" not in table.model_fields_set and table.engine == "megatron"
    if not (model.mtp_parameters and is_open and is_core(table.version)):
        return ()
    return (
        f"'{model.name}' comes with multi-token prediction, which is left out as on Megatron-LM's command "
        f"line; Megatron-Bridge trains it by default: {_PREDICTIONS} counts its layers",
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


def pad_vocabulary(model: ModelSpec, multiple: int) -> ModelSpec:
    """The model with the rows of its embedding and LM head padded to a multiple of `multiple`."""
    old, new = model.vocab_size, -(-model.vocab_size // multiple) * multiple
    if new == old:
        return model

    def pad_modules(modules: tuple[Module, ...]) -> tuple[Module, ...]:
        return tuple(_pad_module(module, old, new) for module in modules)

    return replace(model, vocab_size=new, before=pad_modules(model.before), after=pad_modules(model.after))


def _pad_module(module: Module, old: int, new: int) -> Module:
    op_spec: Any = module.op_spec
    if isinstance(op_spec, Embedding) and op_spec.rows == old:
        op_spec = replace(op_spec, rows=new)
    elif isinstance(op_spec, Linear) and op_spec.out_features == old:
        op_spec = replace(op_spec, out_features=new)
    elif isinstance(op_spec, Loss):
        return replace(module, op_spec=replace(op_spec, vocab_size=new))
    else:
        return module
    parameters = tuple(
        Parameter(parameter.name, tuple(new if size == old else size for size in parameter.shape))
        for parameter in module.parameters
    )
    return replace(module, op_spec=op_spec, parameters=parameters)
