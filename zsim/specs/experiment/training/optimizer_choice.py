"""The optimizer of a job, as `[training]` names it. It is refused where a framework refuses it."""

from __future__ import annotations

from zsim.errors import InputError
from zsim.specs.experiment.training.framework_training import training_of
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.strategy.optimizers import OPTIMIZERS, Optimizer, optimizer_of
from zsim.specs.strategy.table import StrategyConfig, StrategyTable

_WHERE = "training.optimizer"


def choose_optimizer(
    table: TrainingTable, strategy: StrategyTable, config: StrategyConfig | None
) -> Optimizer:
    """The optimizer, checked against its strategy. `config` is that of `FrameworkTraining`.

    Raises InputError for pairs that the framework refuses, and for keys without effect. Raises
    NotSimulatedError for what zsim lacks.
    """
    optimizer = optimizer_of(table.optimizer)
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
