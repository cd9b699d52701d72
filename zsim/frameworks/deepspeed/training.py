"""DeepSpeed's part in `[training]`: the values of its JSON, and what it refuses."""

from __future__ import annotations

from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.optimizers import check_deepspeed_optimizer, json_optimizer
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.settings.release import parse_release
from zsim.frameworks.deepspeed.settings.table import DeepSpeedTable
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.training.framework_training import FrameworkTraining, check_whole_layers
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.strategy.optimizers import Optimizer
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.training import LayerKernels

_PARTITIONING_STAGE = 3
_GRADIENT_SHARDING_STAGE = 2  # from which on gradients are reduced in every micro-batch
# transformers 5.0.0 is of January 2026, DeepSpeed 0.18.5 the first release behind it.
_FIRST_AFTER_TRANSFORMERS_5 = (0, 18, 5)
_LAST_BEFORE_TRANSFORMERS_5 = "0.17.6"  # of those that fetch every expert's products one by one


class DeepSpeedTraining(FrameworkTraining[DeepSpeedTable, DeepSpeedConfig]):
    """The engine casts every weight, and its JSON says the batch, the precision and the optimizer."""

    title = "DeepSpeed"
    casts_weights = True
    has_references = True
    even_batch_reason = (
        "DeepSpeed has one train_micro_batch_size_per_gpu, and asserts that its batch is that times the "
        "number of GPUs"
    )

    def fill_training(
        self,
        training: TrainingTable,
        table: DeepSpeedTable,
        config: DeepSpeedConfig | None,
        parallelism: ParallelismConfig,
        cluster: Cluster,
    ) -> TrainingTable:
        """`[training]` with the values of the JSON, and with the kernels of Megatron-DeepSpeed's layers."""
        assert config is not None
        changes: dict[str, Any] = {
            **_checkpoints_of_pipeline(training, config, parallelism),
            "precision": config.precision,
            "micro_batch_size": config.batch.micro_batch_size,
            "gradient_accumulation_steps": config.batch.gradient_accumulation_steps,
            "gradient_clipping": config.gradient_clipping,
            "optimizer": json_optimizer(training, config),
        }
        if parallelism.fuses_projections:
            changes["compile"] = True
            if not training.liger and training.cross_entropy is None:
                changes["cross_entropy"] = "megatron-before-0.8"
        if config.deep_compile is not None:
            if "compile" in training.model_fields_set and not training.compile:
                raise InputError(
                    f"training.compile: found false, but {config.name} says compile.deepcompile, which acts "
                    "where the script calls engine.compile(); expected true, or the block left out"
                )
            changes["compile"] = True
        return training.model_copy(update=changes)

    def layer_kernels(self, table: DeepSpeedTable, parallelism: ParallelismConfig) -> LayerKernels:
        """The kernels of Megatron-LM 2, from which Megatron-DeepSpeed was forked, in its layers."""
        return "megatron-2" if parallelism.fuses_projections else "torch"

    def check_optimizer(
        self,
        optimizer: Optimizer,
        training: TrainingTable,
        table: DeepSpeedTable,
        config: DeepSpeedConfig | None,
    ) -> None:
        assert config is not None
        if training.paged_states == "host":
            raise NotSimulatedError(
                "training.paged_states: found 'host' under DeepSpeed, whose partitions zsim has on the GPU; "
                "expected it left out, or strategy 'ddp' or 'fsdp1'"
            )
        check_deepspeed_optimizer(optimizer, config)

    def check_reference(
        self,
        where: str,
        reference: str,
        table: DeepSpeedTable,
        config: DeepSpeedConfig | None,
        parallelism: ParallelismConfig,
    ) -> None:
        """Before stage 3 every rank holds all of the reference. From it on a copy is an engine of its own,
        while a base would run forward twice in the order that one engine has recorded.
        """
        check_whole_layers(where, parallelism)
        if config is None or config.stage != _PARTITIONING_STAGE:
            return
        if reference == "base":
            raise NotSimulatedError(
                f"{where}: zsim does not simulate two forwards of one engine with ZeRO stage 3, whose order "
                'of modules they break; expected "copy", or stage 0 to 2'
            )
        if config.deep_compile is not None:
            raise NotSimulatedError(
                f"{where}: zsim does not simulate a copy that DeepCompile gathers; expected "
                "compile.deepcompile left out, or stage 1 or 2"
            )
        if config.zero.offload_param is not None:
            raise NotSimulatedError(
                f"{where}: zsim does not simulate a reference whose shards are on the host; expected "
                "offload_param left out"
            )

    def synchronized_replicas(
        self, table: DeepSpeedTable, config: DeepSpeedConfig | None, replicas: int, nodes: int
    ) -> int:
        return replicas if config is not None and config.stage >= _GRADIENT_SHARDING_STAGE else 1

    def check_partial_training(
        self,
        key: str,
        table: DeepSpeedTable,
        config: DeepSpeedConfig | None,
        parallelism: ParallelismConfig,
    ) -> None:
        super().check_partial_training(key, table, config, parallelism)
        if config is None or config.stage != 3:
            return
        zero = config.zero
        param = zero.offload_param
        features = {
            "mics_shard_size": zero.is_mics,
            "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
            "zero_quantized_weights": zero.zero_quantized_weights,
            "zero_quantized_gradients": zero.zero_quantized_gradients,
            "zero_quantized_nontrainable_weights": zero.zero_quantized_nontrainable_weights,
            "offload_param.device 'nvme'": param is not None and param.device == "nvme",
        }
        for setting, is_on in features.items():
            if is_on:
                raise NotSimulatedError(
                    f"{key}: not simulated with {config.name}: zero_optimization.{setting} yet; expected "
                    "stage 3 without it"
                )

    def check_merged_adapters(self, where: str, config: DeepSpeedConfig | None) -> None:
        if config is not None and config.stage == 3:
            raise NotSimulatedError(
                f"{where}, which PEFT parametrizes in every forward; not simulated with ZeRO stage 3; "
                "expected stage 0 to 2"
            )

    def transformers_4_reason(self, table: DeepSpeedTable) -> str:
        release = parse_release(table.version, "strategy.version")
        is_older = release.number < _FIRST_AFTER_TRANSFORMERS_5
        return f"DeepSpeed {table.version} is older than transformers 5" if is_older else ""

    def transformers_4_changes(self, table: DeepSpeedTable) -> dict[str, str]:
        changes = super().transformers_4_changes(table)
        if "version" in table.model_fields_set:
            return changes
        return changes | {"strategy.version": _LAST_BEFORE_TRANSFORMERS_5}

    def single_expert_notes(self, table: DeepSpeedTable) -> list[str]:
        """A note where the release is a default. It fetches such experts differently from older releases."""
        if table.stage != 3 or "version" in table.model_fields_set:
            return []
        return [
            f"strategy.version is taken as {table.version}, which fetches a block of Mixtral's or Qwen's "
            "experts whole; before 0.18 ZeRO-3 fetches every product of every expert by itself, which can "
            "take several times as long"
        ]


def _checkpoints_of_pipeline(
    training: TrainingTable, config: DeepSpeedConfig, parallelism: ParallelismConfig
) -> dict[str, Any]:
    """The checkpoints that PipelineModule makes, by default reentrant ones.

    There is one for every `pipeline.activation_checkpoint_interval` layers of a stage, as the JSON says.
    Raises InputError where `[training]` says something else, NotSimulatedError for several layers in one.
    """
    interval = config.pipeline.activation_checkpoint_interval
    if parallelism.pipeline == 1 or not interval:
        return {}
    key, policy = f"{config.name}: pipeline.activation_checkpoint_interval", training.activation_checkpointing
    if policy != "full" and "activation_checkpointing" in training.model_fields_set:
        raise InputError(
            f"{key}: found {interval}, which checkpoints layers, with training.activation_checkpointing "
            f"'{policy}'; expected 'full', or an interval of 0"
        )
    if interval > 1:
        raise NotSimulatedError(
            f"{key}: zsim does not simulate one checkpoint around {interval} layers yet; expected 1"
        )
    is_reentrant = config.pipeline.use_reentrant is not False
    return {
        "activation_checkpointing": "full",
        "checkpoint_is_reentrant": is_reentrant,
        "checkpoint_stops_early": not is_reentrant,
    }


TRAINING = DeepSpeedTraining()
