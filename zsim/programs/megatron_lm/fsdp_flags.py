"""The flags of Megatron-FSDP and of an optimizer on the CPU -> settings of an experiment, and back.

Read in Megatron-Core 0.16.1 and 0.19 training/arguments.py. Release 0.19 has flags for the types of main
weights, of main gradients and of communication (`--megatron-fsdp-main-params-dtype` and its like).
"""

from __future__ import annotations

from collections.abc import Iterator

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.programs.megatron_lm.arguments import Arguments
from zsim.programs.megatron_lm.keys import PRECISION_AWARE
from zsim.specs.formats.config_file import TrainingFile

_OFFLOAD, _FRACTION = "optimizer-cpu-offload", "optimizer-offload-fraction"
_SHARDING = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_SWITCHES = (
    ("create-all-gather-group", "fsdp_gather_group"),
    ("keep-fp8-transpose-cache", "keep_fp8_transpose_cache"),
)
_TYPES = ("fp32", "bf16", "fp16", "auto")
_SHARDING_FLAGS = (
    "data-parallel-sharding-strategy",
    "outer-dp-sharding-strategy",
    "suggested-communication-unit-size",
)


def read_fsdp(arguments: Arguments, file: TrainingFile) -> None:
    """Read the flags of Megatron-FSDP. They have no effect without `--use-megatron-fsdp`."""
    settings = file.settings
    if not arguments.has("use-megatron-fsdp"):
        arguments.read_flags |= set(_SHARDING_FLAGS)
        return
    settings["strategy.fsdp_sharding"] = arguments.text(
        "data-parallel-sharding-strategy", "no_shard", _SHARDING
    )
    outer_sharding = arguments.text("outer-dp-sharding-strategy", "no_shard", ("no_shard", "optim"))
    if arguments.has("enable-full-sharding-in-hsdp"):
        outer_sharding = "optim"
    if outer_sharding != "no_shard":
        settings["strategy.fsdp_outer_sharding"] = outer_sharding
    size = arguments.integer("suggested-communication-unit-size")
    if size is not None:
        settings["strategy.fsdp_unit_size"] = size
    if arguments.has("fsdp-double-buffer", "use-nccl-ub"):
        settings["strategy.fsdp_double_buffer"] = True
    if arguments.has("no-gradient-reduce-div-fusion"):
        settings["strategy.gradient_reduce_div_fusion"] = False
    for flag, key in _SWITCHES:
        if arguments.has(flag):
            settings[f"strategy.{key}"] = True
    if arguments.text("megatron-fsdp-main-params-dtype", "fp32", _TYPES) != "fp32":
        raise NotSimulatedError(
            f"{arguments.where}: --megatron-fsdp-main-params-dtype: zsim simulates main weights in fp32 "
            "alone; expected fp32"
        )


def fsdp_gradients(arguments: Arguments) -> str | None:
    """The type of main gradients and of their reduction, if a flag of Megatron-FSDP sets it, else None.

    Raises NotSimulatedError for gradients that are reduced in another type than they are kept in.
    """
    main_dtype = arguments.text("megatron-fsdp-main-grads-dtype", "auto", _TYPES)
    communication_dtype = arguments.text("megatron-fsdp-grad-comm-dtype", "auto", _TYPES)
    if not arguments.has("use-megatron-fsdp") or main_dtype == "auto":
        return None
    if communication_dtype not in ("auto", main_dtype):
        raise NotSimulatedError(
            f"{arguments.where}: --megatron-fsdp-grad-comm-dtype: zsim simulates gradients that are reduced "
            f"in the type that they are kept in; expected {main_dtype}"
        )
    return main_dtype


def fsdp_flags(table: MegatronTable) -> Iterator[str]:
    """The flags of a table's Megatron-FSDP."""
    if table.fsdp_sharding is None:
        return
    yield "--use-megatron-fsdp --ckpt-format fsdp_dtensor"
    yield f"--data-parallel-sharding-strategy {table.fsdp_sharding}"
    if table.fsdp_outer_sharding != "no_shard":
        yield f"--outer-dp-sharding-strategy {table.fsdp_outer_sharding}"
    if table.fsdp_unit_size is not None:
        yield f"--suggested-communication-unit-size {table.fsdp_unit_size}"
    if table.fsdp_double_buffer:
        yield "--fsdp-double-buffer"
    if not table.gradient_reduce_div_fusion:
        yield "--no-gradient-reduce-div-fusion"
    for flag, key in _SWITCHES:
        if getattr(table, key):
            yield f"--{flag}"


def precision_aware_flags(table: MegatronTable) -> Iterator[str]:
    """The flags of a table's precision-aware optimizer."""
    if not table.precision_aware_optimizer:
        return
    yield PRECISION_AWARE.key
    for key in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if getattr(table, key) != "fp32":
            yield f"--{key.replace('_', '-')} {getattr(table, key)}"


def read_cpu_optimizer(arguments: Arguments, file: TrainingFile) -> None:
    """Read the flags of an optimizer on the CPU, which by default updates everything there (Megatron-Core
    0.12 to 0.19 training/arguments.py; of the library's own configuration the default is 0).
    """
    fraction = arguments.number(_FRACTION, 1.0)
    overlaps = arguments.has("overlap-cpu-optimizer-d2h-h2d")
    if not arguments.has(_OFFLOAD):
        return
    if fraction > 1:
        raise InputError(f"{arguments.where}: --{_FRACTION}: found {fraction:g}, expected 0 to 1")
    file.settings["strategy.optimizer_offload_fraction"] = fraction
    if overlaps:
        file.settings["strategy.overlap_optimizer_offload"] = True
    if arguments.has("no-pin-cpu-grads"):
        raise NotSimulatedError(
            f"{arguments.where}: --no-pin-cpu-grads: zsim simulates gradients in pinned memory alone"
        )


def cpu_optimizer_flags(table: MegatronTable) -> Iterator[str]:
    """The flags of a table's optimizer on the CPU."""
    if table.optimizer_offload_fraction is None:
        return
    yield f"--{_OFFLOAD} --{_FRACTION} {table.optimizer_offload_fraction:g}"
    if table.overlap_optimizer_offload:
        yield "--overlap-cpu-optimizer-d2h-h2d"
