"""The optimizers that DeepSpeed takes, and the one that its JSON names.

Read in DeepSpeed 0.19.8 runtime/engine.py `_do_optimizer_sanity_check`, `_configure_optimizer`.
"""

from __future__ import annotations

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.strategy.optimizers import Optimizer

# Those that ZeRO takes without `zero_allow_untested_optimizer`.
_TESTED = ("adamw", "adam", "adagrad", "lion", "muon")
_WHERE = "training.optimizer"


def json_optimizer(training: TrainingTable, config: DeepSpeedConfig) -> str:
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


def check_deepspeed_optimizer(optimizer: Optimizer, config: DeepSpeedConfig) -> None:
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
