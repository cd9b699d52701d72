"""DeepSpeed's part in `[training]`: the values of its JSON, and what it refuses.

Optimizers: DeepSpeed 0.19.8 runtime/engine.py `_do_optimizer_sanity_check`, `_configure_optimizer`.
"""

from __future__ import annotations

from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.settings.release import parse_release
from zsim.frameworks.deepspeed.settings.table import DeepSpeedTable
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.training.framework_training import FrameworkTraining, check_whole_layers
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.strategy.optimizers import Optimizer
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.training import LayerKernels

# Those that ZeRO takes without `zero_allow_untested_optimizer`.
_TESTED = ("adamw", "adam", "adagrad", "lion", "muon")
_WHERE = "training.optimizer"
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
            "optimizer": _json_optimizer(training, config),
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
        _check_optimizer(optimizer, config)

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


def _json_optimizer(training: TrainingTable, config: DeepSpeedConfig) -> str:
    """The JSON's optimizer where it has one. `[training]` may repeat it."""
    json_name = config.optimizer.training_name
    if json_name is None:
        return training.optimizer
    name = training.optimizer
    if name not in ("adamw", json_name) and {name, json_name} != {"adam", "adamw"}:
        raise InputError(
            f"{_WHERE}: found '{name}', but {config.name} says optimizer.type, which is "
            f"'{json_name}'; leave one of them out"
        )
    return json_name


def _check_optimizer(optimizer: Optimizer, config: DeepSpeedConfig) -> None:
    """Raises for an optimizer that DeepSpeed refuses, or that is not simulated under it."""
    name, choice = optimizer.name, config.optimizer
    if name == "muon":
        _check_muon(config)
    if optimizer.strategy and config.one_bit is None:
        raise InputError(
            f"{_WHERE}: DeepSpeed makes '{name}' itself; expected it as optimizer.type in strategy.config, "
            "with strategy.version '0.19.6' or older"
        )
    if config.stage > 0 and name not in _TESTED and not choice.allows_untested:
        raise InputError(
            f"{_WHERE}: DeepSpeed takes '{name}' under ZeRO only with \"zero_allow_untested_optimizer\": "
            f"true in {config.name} ('You are using an untested ZeRO Optimizer'); without it one of "
            f"{', '.join(_TESTED)}"
        )
    if config.zero.offload_optimizer is None:
        return
    if config.zero.offload_optimizer.super_offload and config.stage == 3 and name not in ("adamw", "adam"):
        raise InputError(
            f"{_WHERE}: SuperOffload's worker makes DeepSpeedCPUAdam; found '{name}', expected 'adamw', or "
            f"{config.name} without zero_optimization.offload_optimizer.super_offload"
        )
    if config.zero.zenflow is not None and name not in ("adamw", "adam"):
        raise InputError(
            f"{_WHERE}: ZenFlow updates selected columns with AdamW and the rest with DeepSpeedCPUAdam; "
            f"found '{name}', expected 'adamw', or {config.name} without zero_optimization.zenflow"
        )
    has_cpu_optimizer = name in ("adamw", "adam", "lion") or choice.training_name == "adagrad"
    if not has_cpu_optimizer and choice.forces_cpu_optimizer:
        raise InputError(
            f"{_WHERE}: with zero_optimization.offload_optimizer DeepSpeed demands its own CPU optimizers, "
            f"DeepSpeedCPUAdam or DeepSpeedCPULion, unless {config.name} says "
            f"\"zero_force_ds_cpu_optimizer\": false; found '{name}'"
        )
    if optimizer.moments is None:
        raise NotSimulatedError(
            f"{_WHERE}: '{name}' with zero_optimization.offload_optimizer is not simulated; expected "
            "'adamw' or 'lion'"
        )


def _check_muon(config: DeepSpeedConfig) -> None:
    """Checks DeepSpeed's Muon as 0.19.8 runtime/zero/stage3.py `__init__` does.

    0.19.5 and earlier orthogonalize every bucket of every micro-batch (DeepSpeed's issue 8443).
    """
    zero, where = config.zero, f"{_WHERE}: 'muon' of DeepSpeed"
    if config.stage == 3 and zero.reduce_scatter:
        raise InputError(
            f'{where} needs "reduce_scatter": false in zero_optimization of {config.name} at stage 3 '
            "('Muon and reduce scatter cannot be used together')"
        )
    reduces_per_rank = config.stage == 3 or zero.use_multi_rank_bucket_allreduce
    unsupported = {
        "at stage 0": config.stage == 0,
        "before DeepSpeed 0.19.8": config.release.number < (0, 19, 8),
        "with zero_optimization.offload_optimizer": zero.offload_optimizer is not None,
        "without zero_optimization.use_multi_rank_bucket_allreduce": not reduces_per_rank,
        "with MiCS": zero.is_mics,
    }
    for condition, is_so in unsupported.items():
        if is_so:
            raise NotSimulatedError(
                f"{where} is not simulated {condition}; expected stages 1 to 3 of 0.19.8 on the GPU, or "
                "strategy 'fsdp2' or 'ddp'"
            )


TRAINING = DeepSpeedTraining()
