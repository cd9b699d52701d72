"""Keys of a file that have no effect, and the resolved settings with the effect of each."""

from __future__ import annotations

from typing import Any

from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig, OptimizerWrapper, Setting, ZeroConfig
from zsim.frameworks.deepspeed.settings.reader import Reading
from zsim.frameworks.deepspeed.settings.release import Release
from zsim.frameworks.deepspeed.settings.zero_schema import ZERO_KEYS, json_key
from zsim.frameworks.deepspeed.settings.zeropp import reason_without_effect


def _acting_stage(stage: int, wrapper: OptimizerWrapper) -> int:
    """The stage whose reductions run: BF16_Optimizer and FP16_Optimizer reduce as without ZeRO."""
    return stage if wrapper in ("zero12", "zero3") else 0


def _reason_without_effect(
    bare: str, zero: ZeroConfig, wrapper: OptimizerWrapper, release: Release, num_nodes: int
) -> str | None:
    """Why the key has no effect, or None if it has one."""
    key = ZERO_KEYS[bare]
    if key.idle and key.is_idle(release):
        return f"no effect: {key.idle}"
    if zero.stage not in key.stages:
        return f"no effect at stage {zero.stage}"
    if _acting_stage(zero.stage, wrapper) not in key.stages:
        return "no effect: BF16_Optimizer reduces without ZeRO's buckets"
    if bare == "use_multi_rank_bucket_allreduce" and not zero.reduce_scatter:
        return "no effect: without reduce_scatter a bucket is all-reduced anyway"
    return reason_without_effect(bare, zero, num_nodes)


def ineffective_key_notes(
    reading: Reading, zero: ZeroConfig, wrapper: OptimizerWrapper, release: Release, num_nodes: int
) -> list[str]:
    """One note per reason, naming the keys of the file that have no effect for that reason."""
    keys_per_reason: dict[str, list[str]] = {}
    for bare, key in ZERO_KEYS.items():
        if key.effect and reading.says(f"zero_optimization.{bare}"):
            reason = _reason_without_effect(bare, zero, wrapper, release, num_nodes)
            if reason is not None:
                keys_per_reason.setdefault(reason, []).append(json_key(bare))
    notes = [
        f"{reading.where}: zero_optimization: {', '.join(keys)}: {reason}"
        for reason, keys in keys_per_reason.items()
    ]
    return notes + _overridden_notes(reading, zero) + _other_block_notes(reading, zero, wrapper, release)


def sequence_notes(reading: Reading, *, shares_sequences: bool) -> list[str]:
    """Notes on the type in which gradients are reduced: Ulysses has a key of its own."""
    where, file = reading.where, reading.file
    sequence_dtype = file.seq_parallel_communication_data_type or file.seq_parallel_comm_data_type
    if sequence_dtype and not shares_sequences:
        return [f"{where}: seq_parallel_communication_data_type: no effect without sequence parallelism"]
    if shares_sequences and file.communication_data_type:
        return [
            f"{where}: communication_data_type: no effect with sequence parallelism, whose "
            "seq_parallel_communication_data_type (fp32 by default) takes its place"
        ]
    return []


def super_offload_notes(reading: Reading, zero: ZeroConfig, gradient_clipping: float) -> list[str]:
    """Notes on SuperOffload where it is not used, or does not overlap."""
    offload = reading.zero.offload_optimizer
    if offload is None or offload.device == "none" or not offload.super_offload:
        return []
    where = f"{reading.where}: zero_optimization.offload_optimizer.super_offload"
    if zero.stage != 3 or zero.is_mics:
        return [f"{where}: no effect outside stage 3{' and with MiCS' if zero.is_mics else ''}"]
    if gradient_clipping:
        return [
            f"{where}: DeepSpeed updates nothing during backward with gradient_clipping "
            f"{gradient_clipping:g}, since the norm comes first; 0 lets it"
        ]
    return []


def _overridden_notes(reading: Reading, zero: ZeroConfig) -> list[str]:
    where = f"{reading.where}: zero_optimization"
    notes = []
    if zero.contiguous_gradients and not reading.zero.contiguous_gradients:
        notes.append(f"{where}.contiguous_gradients: optimizer offload turns it on")
    if zero.prefetch_bucket_size == 1 and reading.zero.prefetch_bucket_size != 1:
        notes.append(f"{where}.stage3_prefetch_bucket_size: stage3_allgather_sequential makes it 1")
    offload = reading.zero.offload_optimizer
    if offload is not None and offload.device == "nvme" and zero.stage in (1, 2):
        notes.append(f"{where}.offload_optimizer.device: 'nvme' means the CPU below stage 3")
    return notes


def _other_block_notes(
    reading: Reading, zero: ZeroConfig, wrapper: OptimizerWrapper, release: Release
) -> list[str]:
    where, file, notes = reading.where, reading.file, []
    if reading.says("bf16.check_grad_overflow") and (
        wrapper != "zero12" or not release.has_bf16_overflow_key
    ):
        notes.append(
            f"{where}: bf16.check_grad_overflow: no effect outside stages 1 and 2 of DeepSpeed 0.17.1 on"
        )
    if reading.says("bf16.immediate_grad_update") and wrapper != "bf16_optimizer":
        notes.append(f"{where}: bf16.immediate_grad_update: no effect outside BF16_Optimizer")
    if file.aio is not None and zero.offload_param is None and zero.offload_optimizer is None:
        notes.append(f"{where}: aio: no effect without offload to nvme")
    unread_key = (
        "thread_count" if release.aio_threads_key == "intra_op_parallelism" else "intra_op_parallelism"
    )
    if reading.says(f"aio.{unread_key}"):
        notes.append(
            f"{where}: aio.{unread_key}: DeepSpeed {release} reads '{release.aio_threads_key}'; no effect"
        )
    if file.activation_checkpointing is not None:
        notes.append(
            f"{where}: activation_checkpointing: simulated as if the model calls deepspeed.checkpointing; "
            "torch's checkpoint would ignore it. training.activation_checkpointing says what is recomputed"
        )
    if file.pipeline is not None:
        notes.append(f"{where}: pipeline: only for a PipelineModule; no effect")
    if wrapper == "bf16_optimizer" and zero.stage == 0:
        notes.append(f"{where}: bf16 without ZeRO: BF16_Optimizer of DeepSpeed {release} shards like stage 1")
    if release.mistakes_bf16_wrapper and wrapper == "fp16_optimizer" and zero.stage == 1:
        notes.append(
            f"{where}: data_types.grad_accum_dtype: DeepSpeed {release} takes FP16_Optimizer for bf16 with "
            "fp32 accumulation at stage 1, which shards nothing (mended in 0.18.5)"
        )
    return notes


def describe_settings(config: DeepSpeedConfig, num_nodes: int) -> tuple[Setting, ...]:
    """The resolved settings as rows for a report: key, value, origin, effect."""
    origins, release = dict(config.origins), config.release
    default = f"default {config.version}"
    rows: list[Setting] = []

    def add(key: str, value: Any, effect: str) -> None:
        rows.append(Setting(key, _format_value(value), origins.get(key, default), effect))

    batch = config.batch
    add("train_batch_size", batch.train_batch_size, "sequences per step")
    add("train_micro_batch_size_per_gpu", batch.micro_batch_size, "sequences per GPU and micro-batch")
    add("gradient_accumulation_steps", batch.gradient_accumulation_steps, "micro-batches per step")
    add("precision", config.precision, "fp16 and bf16 blocks")
    add("gradient_clipping", config.gradient_clipping, "scales gradients by their norm")
    add("communication_data_type", config.communication_dtype, "gradients are reduced in it")
    add("data_types.grad_accum_dtype", config.grad_accum_dtype, "gradients are accumulated in it")
    add("bf16.check_grad_overflow", config.check_grad_overflow, "the step looks for infinities first")
    add(
        "optimizer.type", config.optimizer.name or "the script's", f"{config.optimizer.implementation} kernel"
    )
    add("optimizer wrapper", config.optimizer_wrapper, "DeepSpeed's class that runs the step")
    for bare, key in ZERO_KEYS.items():
        if not key.effect or not key.is_known(release) or bare == "allgather_partitions":
            continue
        reason = _reason_without_effect(bare, config.zero, config.optimizer_wrapper, release, num_nodes)
        add(f"zero_optimization.{json_key(bare)}", _zero_value(config.zero, bare), reason or key.effect)
    return tuple(rows)


def _zero_value(zero: ZeroConfig, bare: str) -> Any:
    value = getattr(zero, bare)
    if bare in ("zeropp_loco_param", "zenflow"):
        return value is not None
    if bare == "leaf_module":
        return ", ".join((*value.classes, *value.names, *value.name_suffixes)) or "none"
    if bare in ("offload_param", "offload_optimizer"):
        if value is None:
            return "none"
        is_super = bare == "offload_optimizer" and value.super_offload and zero.stage == 3
        return f"{value.device}, SuperOffload" if is_super else value.device
    return value


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return "unlimited" if value == 2**63 - 1 else f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)
