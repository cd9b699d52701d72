"""The optimizer of a job, named by `[training]` or by a DeepSpeed JSON. It is refused where a framework
refuses it.

# [Note: plain kernels and DTensors]
FSDP2's parameters are DTensors. bitsandbytes' optimizers call operators of their own on them, and on plain
tensors of scales, which torch refuses ("got mixed torch.Tensor and DTensor", bitsandbytes 0.50.2 with torch
2.13). Its 32-bit operator "does not have a sharding strategy registered". DeepSpeed's FusedLion reads raw
pointers (csrc/adam/multi_tensor_apply.cuh of 0.19.8), and `data_ptr()` of a DTensor is 0 (torch 2.13).
Transformer Engine's FusedAdam takes the local tensors (pytorch/optimizers/fused_adam.py of 2.17).
"""

from __future__ import annotations

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.fsdp1.settings import Fsdp1Table
from zsim.frameworks.fsdp2.settings import Fsdp2Table
from zsim.frameworks.megatron.settings.config import is_core_since
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.strategy.optimizers import OPTIMIZERS, Optimizer, optimizer_of
from zsim.specs.strategy.table import StrategyTable

_WHERE = "training.optimizer"
_MEGATRON = ("adamw", "adam", "sgd", "sgd_momentum", "adamw-bf16", "lion", "muon")


def choose_optimizer(
    table: TrainingTable, strategy: StrategyTable, deepspeed: DeepSpeedConfig | None
) -> Optimizer:
    """The optimizer, checked against its strategy.

    Raises InputError for pairs that the framework refuses, and for keys without effect. Raises
    NotSimulatedError for what zsim lacks.
    """
    name = table.optimizer if deepspeed is None else _optimizer_name(table, deepspeed)
    optimizer = optimizer_of(name)
    _check_keys(table, optimizer)
    if deepspeed is not None:
        if table.paged_states == "host":
            raise NotSimulatedError(
                "training.paged_states: found 'host' under DeepSpeed, whose partitions zsim has on the GPU; "
                "expected it left out, or strategy 'ddp' or 'fsdp1'"
            )
        _check_deepspeed(optimizer, deepspeed)
    elif isinstance(strategy, MegatronTable):
        _check_megatron(name, strategy)
    elif isinstance(strategy, Fsdp2Table):
        _check_fsdp2(optimizer)
    elif isinstance(strategy, Fsdp1Table) and name == "muon":
        raise InputError(
            f"{_WHERE}: torch's Muon takes matrices only, and FSDP1's flat parameters are vectors; expected "
            "strategy 'fsdp2' or 'ddp', or another optimizer"
        )
    if getattr(strategy, "cpu_offload", False) and not optimizer.is_torch_list:
        raise NotSimulatedError(
            f"{_WHERE}: '{name}' with strategy.cpu_offload is not simulated; expected torch's "
            f"{', '.join(candidate.name for candidate in OPTIMIZERS.values() if candidate.is_torch_list)}"
        )
    return optimizer


def _check_megatron(name: str, strategy: MegatronTable) -> None:
    """Checks an optimizer as Megatron-Core 0.16.1 to 0.19.0 does.

    Sources: training/arguments.py (`--optimizer`) and core/optimizer/distrib_optimizer.py, whose assertion
    names Lion from 0.19 on. Its Muon is checked in zsim/frameworks/megatron/settings/muon.py.
    """
    if name == "muon" and strategy.engine != "megatron":
        raise InputError(
            f"{_WHERE}: 'muon' belongs to engine 'megatron', found '{strategy.engine}'; expected 'adamw'"
        )
    if name not in _MEGATRON:
        raise InputError(f"{_WHERE}: Megatron has no '{name}'; expected one of {', '.join(_MEGATRON)}")
    if name == "adamw-bf16" and not strategy.distributed_optimizer:
        raise InputError(
            f"{_WHERE}: Megatron keeps moments in bf16 only with --use-precision-aware-optimizer, which "
            "needs the distributed optimizer; expected strategy.distributed_optimizer = true, or 'adamw'"
        )
    release = (0, 19) if strategy.distributed_optimizer else (0, 17)
    is_of_megatron = strategy.engine == "megatron" and strategy.fsdp_sharding is None
    if name == "lion" and not (is_of_megatron and is_core_since(strategy.version, release)):
        suffix = " with the distributed optimizer" if strategy.distributed_optimizer else ""
        raise InputError(
            f"{_WHERE}: Megatron-Core has 'lion'{suffix} from {release[0]}.{release[1]} on; found "
            f"strategy.version '{strategy.version}', expected a newer one under Megatron's own data "
            "parallelism, or 'adamw'"
        )


def _optimizer_name(table: TrainingTable, deepspeed: DeepSpeedConfig) -> str:
    """The JSON's optimizer where it has one. `[training]` may repeat it."""
    json_name = deepspeed.optimizer.training_name
    if json_name is None:
        return table.optimizer
    if table.optimizer not in ("adamw", json_name) and {table.optimizer, json_name} != {"adam", "adamw"}:
        raise InputError(
            f"{_WHERE}: found '{table.optimizer}', but {deepspeed.name} says optimizer.type, which is "
            f"'{json_name}'; leave one of them out"
        )
    return json_name


def _check_keys(table: TrainingTable, optimizer: Optimizer) -> None:
    if table.optimizer_implementation != "fused" and not optimizer.is_torch_list:
        raise InputError(
            f"training.optimizer_implementation: '{optimizer.name}' of {optimizer.source} has one "
            "implementation; leave the key out"
        )
    if table.paged_states not in (None, "gpu") and not optimizer.is_paged:
        paged_names = ", ".join(candidate.name for candidate in OPTIMIZERS.values() if candidate.is_paged)
        raise InputError(
            f"training.paged_states: the states of '{optimizer.name}' are not paged; expected {_WHERE} to be "
            f"one of {paged_names}"
        )
    if table.stochastic_rounding and not (optimizer.rounds_stochastically and table.stored_dtype == "bf16"):
        rounding_names = ", ".join(
            candidate.name for candidate in OPTIMIZERS.values() if candidate.rounds_stochastically
        )
        raise InputError(
            "training.stochastic_rounding: found true, expected stored_dtype = 'bf16' and one of "
            f"{rounding_names}: torchao rounds so where it writes bf16 weights"
        )


def _check_fsdp2(optimizer: Optimizer) -> None:
    """See [Note: plain kernels and DTensors]."""
    if optimizer.library == "bitsandbytes":
        raise InputError(
            f"{_WHERE}: torch refuses '{optimizer.name}' of {optimizer.source} under FSDP2, whose parameters "
            "are DTensors ('got mixed torch.Tensor and DTensor'); expected 'adamw-8bit-torchao', or strategy "
            "'fsdp1' or 'ddp'"
        )
    if optimizer.name == "lion":
        raise InputError(
            f"{_WHERE}: 'lion' of {optimizer.source} writes where `data_ptr()` points, which of a DTensor, "
            "as FSDP2's parameters are, is 0; expected 'adamw', or strategy 'fsdp1' or 'ddp'"
        )


def _check_deepspeed_muon(config: DeepSpeedConfig) -> None:
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
                "strategy "
                "'fsdp2' or 'ddp'"
            )


def _check_deepspeed(optimizer: Optimizer, config: DeepSpeedConfig) -> None:
    """DeepSpeed 0.19.8 runtime/engine.py `_do_optimizer_sanity_check`, `_configure_optimizer`."""
    name, choice = optimizer.name, config.optimizer
    if name == "muon":
        _check_deepspeed_muon(config)
    if config.stage > 0 and not optimizer.in_deepspeed and not choice.allows_untested:
        tested = ", ".join(candidate.name for candidate in OPTIMIZERS.values() if candidate.in_deepspeed)
        raise InputError(
            f"{_WHERE}: DeepSpeed takes '{name}' under ZeRO only with \"zero_allow_untested_optimizer\": "
            f"true in {config.name} ('You are using an untested ZeRO Optimizer'); without it one of {tested}"
        )
    if config.zero.offload_optimizer is None:
        return
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
