"""Megatron's precision-aware optimizer: Transformer Engine's FusedAdam with states of fewer bits.

Read in Megatron-Core 0.16.1 (core/optimizer/optimizer_config.py, core/optimizer/__init__.py,
core/optimizer/distrib_optimizer.py, training/arguments.py) and Transformer Engine 2.20.0.dev0
(pytorch/optimizers/fused_adam.py).

# [Note: who has the masters]
The optimizer keeps the master weights itself and reads gradients in the buffer's type, unless fp8 scales are
other than delayed and masters are fp32. These masters stay Megatron's, whose gradients are cast to fp32. An
fp32 master of a bf16 weight is kept as the 16 bits that the weight lacks (`store_param_remainders`).

# [Note: states with a scale]
A state in other types than fp32 is cast to fp32 (fp16: and multiplied by its scale) before the update and
back after it. Its extremes are computed for a new scale, unless it is bf16. Both moments in bf16 are read and
written by the update itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.dtypes import DTYPE_BYTES
from zsim.errors import InputError
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.specs.strategy.training import TrainingConfig

_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_FIRST, _FIRST_ON_CPU, _REMAINDERS = (0, 11), (0, 12), (0, 13)


@dataclass(frozen=True, slots=True)
class PrecisionAware:
    """Megatron's precision-aware optimizer, resolved: the types of its states."""

    main_params: str
    exp_avg: str
    exp_avg_sq: str
    has_masters: bool
    """The optimizer keeps the master weights itself. See [Note: who has the masters]."""
    keeps_remainders: bool
    """The optimizer keeps only 16 bits of the master weights."""

    @property
    def master_bytes(self) -> int:
        """Bytes of an element of the masters."""
        return 2 if self.keeps_remainders else DTYPE_BYTES[self.main_params]

    @property
    def moment_dtypes(self) -> tuple[str, str]:
        return self.exp_avg, self.exp_avg_sq

    @property
    def fuses_casts(self) -> bool:
        """Whether the update reads and writes the moments as they are kept."""
        return self.moment_dtypes == ("bf16", "bf16")

    @property
    def cast_dtypes(self) -> tuple[str, ...]:
        """Types of the states that are cast around the update."""
        moments = () if self.fuses_casts else tuple(dtype for dtype in self.moment_dtypes if dtype != "fp32")
        return (*moments, *((self.main_params,) if self.main_params != "fp32" else ()))


@dataclass(frozen=True, slots=True)
class OptimizerOnCpu:
    """Megatron's optimizer on the CPU, resolved."""

    fraction: float
    """The part of a rank's elements that the CPU updates."""
    overlaps: bool
    """There is an optimizer for every tensor, and streams for their copies."""


def resolve_cpu_optimizer(table: MegatronTable, release: tuple[int, int]) -> OptimizerOnCpu | None:
    """The table's optimizer on the CPU. None without it.

    Raises InputError for what Megatron refuses (Megatron-Core 0.16.1 training/arguments.py `validate_args`).
    """
    key = "strategy.optimizer_offload_fraction"
    if table.optimizer_offload_fraction is None:
        if table.overlap_optimizer_offload:
            raise InputError(
                "strategy.overlap_optimizer_offload: found true without an optimizer on the CPU; expected "
                f"{key}, or false"
            )
        return None
    if not _FIRST_ON_CPU <= release < (1, 0):
        raise InputError(
            f"{key}: Megatron {table.version} does not have it; expected a strategy.version from '0.12.0' on"
        )
    if not table.precision_aware_optimizer:
        raise InputError(
            f"{key}: Megatron has it only with the precision-aware optimizer, whose code it shares; expected "
            "precision_aware_optimizer = true"
        )
    if table.main_params_dtype != "fp32" or {table.exp_avg_dtype, table.exp_avg_sq_dtype} != {"fp32"}:
        raise InputError(
            f"{key}: HybridDeviceOptimizer keeps fp32 states whatever is asked for; expected "
            "main_params_dtype, exp_avg_dtype and exp_avg_sq_dtype 'fp32'"
        )
    return OptimizerOnCpu(table.optimizer_offload_fraction, table.overlap_optimizer_offload)


def resolve_precision_aware(
    table: MegatronTable, release: tuple[int, int], training: TrainingConfig
) -> PrecisionAware | None:
    """The table's precision-aware optimizer, or None without it.

    Raises InputError for what Megatron refuses.
    """
    if not table.precision_aware_optimizer:
        return None
    if training.optimizer not in ("adam", "adamw"):
        raise InputError(
            f"strategy.precision_aware_optimizer: found true with optimizer '{training.optimizer}', which "
            "Megatron refuses; expected 'adamw', and exp_avg_dtype and exp_avg_sq_dtype for its moments"
        )
    is_16_bit = training.precision in ("bf16", "fp8")
    is_delayed = training.precision != "fp8" or training.fp8.recipe == "delayed"
    is_on_cpu = table.optimizer_offload_fraction is not None
    has_masters = table.main_params_dtype != "fp32" or is_delayed or is_on_cpu
    return PrecisionAware(
        table.main_params_dtype,
        table.exp_avg_dtype,
        table.exp_avg_sq_dtype,
        has_masters=has_masters,
        keeps_remainders=has_masters
        and is_16_bit
        and release >= _REMAINDERS
        and table.main_params_dtype == "fp32"
        and not table.fp8_param_gather,
    )
