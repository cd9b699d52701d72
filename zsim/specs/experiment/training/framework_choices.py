"""The optimizer and the stored types of `[training]`, which frameworks have or refuse."""

from __future__ import annotations

from zsim.errors import InputError
from zsim.specs.experiment.training.framework_training import kinds_where, phrases_of, training_of
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.strategy.optimizers import OPTIMIZERS, Optimizer, optimizer_of
from zsim.specs.strategy.table import StrategyConfig, StrategyTable
from zsim.specs.strategy.training import TrainingConfig

_WHERE = "training.optimizer"


def choose_optimizer(
    table: TrainingTable, strategy: StrategyTable, config: StrategyConfig | None
) -> Optimizer:
    """The optimizer, checked against its strategy. `config` is that of `FrameworkTraining`.

    Raises InputError for pairs that the framework refuses, and for keys without effect. Raises
    NotSimulatedError for what zsim lacks.
    """
    optimizer = optimizer_of(table.optimizer)
    if optimizer.strategy not in ("", strategy.kind):
        raise InputError(
            f"{_WHERE}: '{optimizer.name}' of {optimizer.source} reduces gradients itself; found strategy "
            f"'{strategy.kind}', expected '{optimizer.strategy}', or another optimizer"
        )
    _check_keys(table, optimizer)
    training_of(strategy.kind).check_optimizer(optimizer, table, strategy, config)
    return optimizer


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


def check_stored_types(training: TrainingConfig, table: TrainingTable, strategy: StrategyTable) -> None:
    """Raises InputError for an `autocast` or `stored_dtype` of `[training]` that its strategy does not have.

    Raises NotSimulatedError for settings that zsim lacks with weights that are kept in 16 bits.
    """
    framework = training_of(strategy.kind)
    low = "bf16" if training.precision == "fp8" else training.precision
    if training.autocast and (not framework.has_autocast or low == "fp32"):
        raise InputError(
            f"training.autocast: found true with strategy '{strategy.kind}' in {low}; expected "
            f"{_alternatives(kinds_where(lambda candidate: candidate.has_autocast))} in bf16 or fp16 "
            f"({' and '.join(_titles_under_autocast())} is under autocast anyway)"
        )
    if training.stored_dtype == "fp32":
        return
    if not framework.has_stored_dtype:
        kinds = kinds_where(lambda candidate: candidate.has_stored_dtype)
        raise InputError(
            f"training.stored_dtype: strategy '{strategy.kind}' has its own; expected {_alternatives(kinds)}"
        )
    framework.check_stored_dtype(training, table, strategy)
    if training.stored_dtype != low:
        raise InputError(
            f"training.stored_dtype: found '{training.stored_dtype}' with precision {training.precision}; "
            "expected 'fp32', or precision bf16 or fp8"
        )


def _titles_under_autocast() -> list[str]:
    return phrases_of(lambda framework: framework.title if framework.is_under_autocast else "")


def _alternatives(kinds: list[str]) -> str:
    *others, last = (f"'{kind}'" for kind in kinds)
    return f"{', '.join(others)} or {last}" if others else last
