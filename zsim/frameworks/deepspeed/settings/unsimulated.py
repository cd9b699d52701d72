"""Settings of a DeepSpeed JSON that zsim does not simulate yet, or omits because their cost is small."""

from __future__ import annotations

from collections.abc import Iterator

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
    file = reading.file
    settings = [(f"zero_optimization.{key}", feature) for key, feature in _find_in_zero(zero, release)]
    settings += [
        (key, block.what) for key, block in UNSIMULATED_KEYS.items() if block.is_on(getattr(file, key))
    ]
    settings += [
        *_find_in_tensor_parallel(file.tensor_parallel),
        *find_unsimulated_deep_compile(file.compile, zero, release),
    ]
    if not file.managed_gradient_accumulation:
        settings.append(("managed_gradient_accumulation", "accumulation that the script manages"))
    settings += _find_with_low_precision_masters(file, zero)
    if optimizer.name is not None and optimizer.name not in SIMULATED_OPTIMIZERS:
        feature = (
            f"the optimizer '{optimizer.name}', only Adam, AdamW, Lion, Adagrad, SGD, Adafactor and "
            "Muon (before 0.19.7 OneBitAdam, OneBitLamb and ZeroOneAdam, too),"
        )
        settings.append(("optimizer.type", feature))
    return tuple([UnsimulatedSetting(key, feature) for key, feature in settings])


def _find_in_tensor_parallel(block: TensorParallelBlock | None) -> Iterator[tuple[str, str]]:
    if block is None or block.autotp_size <= 1:
        return
    if block.vocab_parallel_lm_head:
        yield "tensor_parallel.vocab_parallel_lm_head", "a head split by its vocabulary"
    if block.partition_config:
        yield "tensor_parallel.partition_config", "layers split in a way of one's own"


def _find_with_low_precision_masters(file: DeepSpeedFile, zero: ZeroConfig) -> Iterator[tuple[str, str]]:
    """Masters in 16 bits where ZeRO-Offload is not what keeps the states or moves them."""
    offload = zero.offload_optimizer
    elsewhere = {
        "states on NVMe": offload is not None and offload.device == "nvme",
        "SuperOffload": offload is not None and offload.super_offload,
        "ZenFlow": zero.zenflow is not None,
        "DeepCompile": file.compile is not None and file.compile.deepcompile,
    }
    name = next((name for name, is_on in elsewhere.items() if is_on), "")
    for dtype, block in (("bf16", file.bf16), ("fp16", file.fp16)):
        key = f"{dtype}_master_weights_and_grads"
        if name and block is not None and getattr(block, key):
            yield f"{dtype}.{key}", f"master weights in {dtype} with {name}"


def _find_in_zero(zero: ZeroConfig, release: Release) -> Iterator[tuple[str, str]]:
    optimizer = zero.offload_optimizer
    is_super = optimizer is not None and optimizer.super_offload and zero.stage == 3 and not zero.is_mics
    is_nvme = optimizer is not None and optimizer.device == "nvme"
    key = "offload_optimizer.super_offload"
    if is_super and release.number < _SUPER_OFFLOAD_SINCE:
        yield key, "SuperOffload before 0.18.9 (strategy.version), which queues every bucket,"
    if is_super and is_nvme:
        yield key, "SuperOffload with states on NVMe, only with device 'cpu',"
    if optimizer is not None and is_nvme and (optimizer.ratio < 1 or zero.is_mics):
        ratio = "MiCS, whose optimizer takes the ratio to be 0," if zero.is_mics else "a ratio below 1"
        yield (
            "offload_optimizer",
            f"{ratio} with states on NVMe (DeepSpeed 0.19.8 then updates what it swapped in with torch's "
            "AdamW and moments of its own)",
        )
    if zero.stage == 3:
        for name in zero.leaf_module.classes:
            if name not in EXPERT_BLOCKS.values():
                yield "leaf_module.classes", f"'{name}' as a leaf (name_suffixes, as 'mlp', would do),"
    if feature := find_unsimulated_zenflow(zero, release):
        yield "zenflow", feature


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
