"""Settings of a DeepSpeed JSON that zsim does not simulate yet, or omits because their cost is small."""

from __future__ import annotations

from zsim.errors import NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import (
    DeepSpeedConfig,
    OptimizerChoice,
    UnsimulatedSetting,
    ZeroConfig,
)
from zsim.frameworks.deepspeed.settings.deep_compile import find_unsimulated_deep_compile
from zsim.frameworks.deepspeed.settings.keys import is_enabled
from zsim.frameworks.deepspeed.settings.one_bit import ONE_BIT_OPTIMIZERS
from zsim.frameworks.deepspeed.settings.reader import Reading
from zsim.frameworks.deepspeed.settings.release import Release
from zsim.frameworks.deepspeed.settings.resolve import EXPERT_BLOCKS
from zsim.frameworks.deepspeed.settings.schema import (
    FILE_KEYS,
    UNSIMULATED_KEYS,
    DeepSpeedFile,
    TensorParallelBlock,
)
from zsim.frameworks.deepspeed.settings.zenflow import find_unsimulated_zenflow
from zsim.specs.strategy.requirement import Refusal

SIMULATED_OPTIMIZERS = ("adam", "adamw", "lion", "adagrad", "sgd", "adafactor", "muon", *ONE_BIT_OPTIMIZERS)


_SUPER_OFFLOAD_SINCE = (0, 18, 9)  # the first release whose worker takes whole sub-groups (#7906)

REFUSALS = tuple(Refusal(name, behavior.what) for name, behavior in UNSIMULATED_KEYS.items())


def find_unsimulated(
    reading: Reading, zero: ZeroConfig, optimizer: OptimizerChoice, release: Release
) -> tuple[UnsimulatedSetting, ...]:
    """Every setting of the file that zsim does not simulate, although it changes the step."""
    unsimulated = list(_find_in_zero(zero, release))
    file = reading.file
    for key, block in UNSIMULATED_KEYS.items():
        if block.is_on(getattr(file, key)):
            unsimulated.append(UnsimulatedSetting(key, block.what))
    unsimulated += _find_in_tensor_parallel(file.tensor_parallel)
    unsimulated += [
        UnsimulatedSetting(key, feature)
        for key, feature in find_unsimulated_deep_compile(file.compile, zero, release)
    ]
    if not file.managed_gradient_accumulation:
        unsimulated.append(
            UnsimulatedSetting("managed_gradient_accumulation", "accumulation that the script manages")
        )
    unsimulated += _find_with_low_precision_masters(file, zero)
    if optimizer.name is not None and optimizer.name not in SIMULATED_OPTIMIZERS:
        unsimulated.append(
            UnsimulatedSetting(
                "optimizer.type",
                f"the optimizer '{optimizer.name}', only Adam, AdamW, Lion, Adagrad, SGD, Adafactor and "
                "Muon (before 0.19.7 OneBitAdam, OneBitLamb and ZeroOneAdam, too),",
            )
        )
    return tuple(unsimulated)


def _find_in_tensor_parallel(block: TensorParallelBlock | None) -> list[UnsimulatedSetting]:
    if block is None or block.autotp_size <= 1:
        return []
    settings = {
        "vocab_parallel_lm_head": (block.vocab_parallel_lm_head, "a head split by its vocabulary"),
        "partition_config": (block.partition_config, "layers split in a way of one's own"),
    }
    return [
        UnsimulatedSetting(f"tensor_parallel.{key}", feature)
        for key, (is_on, feature) in settings.items()
        if is_on
    ]


def _find_with_low_precision_masters(file: DeepSpeedFile, zero: ZeroConfig) -> list[UnsimulatedSetting]:
    """Masters in 16 bits where ZeRO-Offload is not what keeps the states or moves them."""
    offload = zero.offload_optimizer
    elsewhere = {
        "states on NVMe": offload is not None and offload.device == "nvme",
        "SuperOffload": offload is not None and offload.super_offload,
        "ZenFlow": zero.zenflow is not None,
        "DeepCompile": file.compile is not None and file.compile.deepcompile,
    }
    name = next((name for name, is_on in elsewhere.items() if is_on), "")
    masters = {
        "bf16": file.bf16 is not None and file.bf16.bf16_master_weights_and_grads,
        "fp16": file.fp16 is not None and file.fp16.fp16_master_weights_and_grads,
    }
    return [
        UnsimulatedSetting(
            f"{dtype}.{dtype}_master_weights_and_grads", f"master weights in {dtype} with {name}"
        )
        for dtype, is_on in masters.items()
        if is_on and name
    ]


def _find_in_zero(zero: ZeroConfig, release: Release) -> list[UnsimulatedSetting]:
    prefix = "zero_optimization."
    settings = []
    optimizer = zero.offload_optimizer
    is_super = optimizer is not None and optimizer.super_offload and zero.stage == 3 and not zero.is_mics
    if optimizer is not None and is_super and release.number < _SUPER_OFFLOAD_SINCE:
        feature = "SuperOffload before 0.18.9 (strategy.version), which queues every bucket,"
        settings.append(("offload_optimizer.super_offload", feature))
    if optimizer is not None and is_super and optimizer.device == "nvme":
        feature = "SuperOffload with states on NVMe, only with device 'cpu',"
        settings.append(("offload_optimizer.super_offload", feature))
    is_partial = optimizer is not None and (optimizer.ratio < 1 or zero.is_mics)
    if optimizer is not None and optimizer.device == "nvme" and is_partial:
        ratio = "MiCS, whose optimizer takes the ratio to be 0," if zero.is_mics else "a ratio below 1"
        feature = (
            f"{ratio} with states on NVMe (DeepSpeed 0.19.8 then updates what it swapped in with torch's "
            "AdamW and moments of its own)"
        )
        settings.append(("offload_optimizer", feature))
    if zero.stage == 3:
        unknown = [name for name in zero.leaf_module.classes if name not in EXPERT_BLOCKS.values()]
        settings += [
            ("leaf_module.classes", f"'{name}' as a leaf (name_suffixes, as 'mlp', would do),")
            for name in unknown
        ]
    if feature := find_unsimulated_zenflow(zero, release):
        settings.append(("zenflow", feature))
    return [UnsimulatedSetting(prefix + key, feature) for key, feature in settings]


def unmodelled_notes(reading: Reading) -> list[str]:
    """Notes on keys that cost a little time in reality and none in zsim."""
    notes = []
    costly = [
        name
        for name, key in FILE_KEYS.items()
        if key.is_measuring and is_enabled(getattr(reading.file, name))
    ]
    if costly:
        notes.append(
            f"{reading.where}: {', '.join(costly)}: DeepSpeed waits for the GPU to measure; left out here"
        )
    if reading.file.compile is not None and not reading.file.compile.deepcompile:
        notes.append(
            f"{reading.where}: compile: compiles nothing by itself: a script that calls engine.compile() is "
            "simulated with training.compile = true"
        )
    return notes


def refuse_unsimulated(config: DeepSpeedConfig) -> None:
    """Raises NotSimulatedError that names the first key zsim cannot simulate yet."""
    if config.unsimulated:
        first = config.unsimulated[0]
        other_keys = ", ".join(f"'{entry.key}'" for entry in config.unsimulated[1:])
        also = f" (nor {other_keys})" if other_keys else ""
        raise NotSimulatedError(
            f"{config.name}: {first.key}: zsim does not simulate {first.reason} yet{also}"
        )
