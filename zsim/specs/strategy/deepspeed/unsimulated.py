"""What a DeepSpeed JSON can ask for and zsim does not simulate yet, or leaves out because it is small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zsim.errors import NotSimulatedError
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig, OptimizerChoice, Unsimulated, ZeroConfig
from zsim.specs.strategy.deepspeed.reader import Reading
from zsim.specs.strategy.deepspeed.schema import TensorParallelBlock

SIMULATED_OPTIMIZERS = ("adam", "adamw")


def _is_enabled(value: Any) -> bool:
    return value.get("enabled") is True if isinstance(value, dict) else value is True


def _is_any_enabled(value: Any) -> bool:
    if isinstance(value, dict):
        return any(
            entry is True if key == "enabled" else _is_any_enabled(entry) for key, entry in value.items()
        )
    return False


def _is_present(value: Any) -> bool:
    return value is not None and value is not False


def _is_deep_compile(value: Any) -> bool:
    return isinstance(value, dict) and value.get("deepcompile") is True


# Key of the file -> (when it is on, what it does).
_BLOCKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "amp": (_is_enabled, "Apex's mixed precision"),
    "autotuning": (_is_enabled, "DeepSpeed's own search over configurations"),
    "compile": (_is_deep_compile, "DeepCompile's schedules"),
    "compression_training": (_is_any_enabled, "quantising or pruning while training"),
    "curriculum_learning": (_is_enabled, "sequence lengths that change from step to step"),
    "data_efficiency": (_is_enabled, "sequence lengths and tokens that change from step to step"),
    "elasticity": (_is_enabled, "batch sizes that follow the number of GPUs"),
    "expert_parallel": (_is_enabled, "experts spread over GPUs"),
    "graph_harvesting": (_is_enabled, "CUDA graphs of the optimizer step"),
    "hybrid_engine": (_is_enabled, "generation between training steps"),
    "progressive_layer_drop": (_is_enabled, "layers that are left out at random"),
    "quantize_training": (_is_any_enabled, "quantising while training"),
    "sparse_attention": (_is_present, "block-sparse attention"),
    "sparse_gradients": (_is_enabled, "sparse embedding gradients"),
    "torch_autocast": (_is_enabled, "torch's autocast over fp32 weights"),
    "weight_quantization": (_is_present, "quantised weights"),
}

_SYNCHRONISING = ("wall_clock_breakdown", "comms_logger", "flops_profiler", "memory_breakdown")


def find_unsimulated(
    reading: Reading, zero: ZeroConfig, optimizer: OptimizerChoice
) -> tuple[Unsimulated, ...]:
    """Everything the file switches on that zsim would have to pretend not to see."""
    found = list(_find_in_zero(reading, zero))
    file = reading.file
    for key, (is_on, what) in _BLOCKS.items():
        if is_on(getattr(file, key)):
            found.append(Unsimulated(key, what))
    if file.sequence_parallel_size is not None and file.sequence_parallel_size > 1:
        found.append(Unsimulated("sequence_parallel_size", "sequences split over GPUs (Ulysses)"))
    if _tensor_parallel_size(file.tensor_parallel) > 1:
        found.append(Unsimulated("tensor_parallel", "layers split over GPUs (AutoTP)"))
    if not file.managed_gradient_accumulation:
        found.append(Unsimulated("managed_gradient_accumulation", "accumulation that the script manages"))
    if file.bf16 is not None and file.bf16.bf16_master_weights_and_grads:
        found.append(Unsimulated("bf16.bf16_master_weights_and_grads", "master weights in bf16"))
    if file.fp16 is not None and file.fp16.fp16_master_weights_and_grads:
        found.append(Unsimulated("fp16.fp16_master_weights_and_grads", "master weights in fp16"))
    if optimizer.name is not None and optimizer.name not in SIMULATED_OPTIMIZERS:
        found.append(Unsimulated("optimizer.type", f"the optimizer '{optimizer.name}', only Adam and AdamW,"))
    return tuple(found)


def _tensor_parallel_size(block: TensorParallelBlock | None) -> int:
    if block is None:
        return 1
    inner = block.tensor_parallel if isinstance(block.tensor_parallel, dict) else {}
    size = inner.get("tp_size", 1)
    return max(block.autotp_size, size if isinstance(size, int) else 1)


def _find_in_zero(reading: Reading, zero: ZeroConfig) -> list[Unsimulated]:
    prefix = "zero_optimization."
    found = []
    optimizer = zero.offload_optimizer
    if optimizer is not None and optimizer.super_offload:
        what = "SuperOffload (a worker process that steps on the CPU during backward, made for GH200)"
        found.append(("offload_optimizer", what))
    if optimizer is not None and optimizer.device == "nvme" and optimizer.ratio < 1:
        what = (
            "a ratio below 1 with states on NVMe (DeepSpeed 0.19.8 then updates what it swapped in with "
            "torch's AdamW and moments of its own)"
        )
        found.append(("offload_optimizer", what))
    if zero.stage == 3 and zero.zero_hpz_partition_size > 1 and zero.offload_param is not None:
        found.append(("zero_hpz_partition_size", "secondary shards in host memory (offload_param)"))
    if zero.zenflow and zero.stage > 0:
        found.append(("zenflow", "ZenFlow's asynchronous updates on the CPU"))
    return [Unsimulated(prefix + key, what) for key, what in found]


def unmodelled_notes(reading: Reading) -> list[str]:
    """Keys that cost a little time in reality and none in zsim."""
    notes = []
    costly = [key for key in _SYNCHRONISING if _is_enabled(getattr(reading.file, key))]
    if costly:
        notes.append(
            f"{reading.where}: {', '.join(costly)}: DeepSpeed waits for the GPU to measure; left out here"
        )
    return notes


def refuse_what_is_not_simulated(config: DeepSpeedConfig) -> None:
    """Raises NotSimulatedError that names the first key zsim cannot simulate yet."""
    if config.unsimulated:
        first = config.unsimulated[0]
        others = ", ".join(f"'{entry.key}'" for entry in config.unsimulated[1:])
        also = f" (nor {others})" if others else ""
        raise NotSimulatedError(
            f"{config.name}: {first.key}: zsim does not simulate {first.reason} yet{also}"
        )
