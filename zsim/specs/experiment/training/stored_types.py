"""The types that weights are kept in: `training.stored_dtype`, and torch.autocast."""

from __future__ import annotations

from zsim.errors import InputError
from zsim.specs.experiment.training.framework_training import kinds_where, phrases_of, training_of
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.strategy.table import StrategyTable
from zsim.specs.strategy.training import TrainingConfig


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
