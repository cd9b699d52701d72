"""Megatron, and the engines with its data parallelism, as a job is resolved with them."""

from __future__ import annotations

from zsim.errors import InputError
from zsim.frameworks.megatron import parallelism as styles
from zsim.frameworks.megatron.expert_libraries import MEGATRON, MEGATRON_FUSED
from zsim.frameworks.megatron.model_changes import apply_multi_token_prediction, pad_vocabulary
from zsim.frameworks.megatron.settings.config import (
    MegatronConfig,
    check_distributed_checkpoints,
    check_megatron_layout,
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
from zsim.specs.experiment.framework_resolver import (
    ExtendedModel,
    FrameworkResolver,
    Resolution,
    StrategyRequest,
)
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.parallelism_table import ParallelismTable
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
        if table.mtp_layers:
            model, parallelism = apply_multi_token_prediction(model, table, parallelism)
        unpadded_size = model.vocab_size
        model = pad_vocabulary(model, table.vocabulary_multiple * parallelism.tensor)
        if model.vocab_size == unpadded_size:
            return ExtendedModel(model, parallelism)
        note = f"Megatron pads the vocabulary of {unpadded_size:,} to {model.vocab_size:,}"
        return ExtendedModel(model, parallelism, (note,))

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
        """Checks as `validate_args` of Megatron-Core 0.16.1 training/arguments.py does."""
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


RESOLVER = MegatronResolver()
