"""Activation checkpointing: which blocks and modules are recomputed.

`training.block_checkpointing` names blocks. `recompute_modules`, `recompute_method` and `recompute_layers`
are Megatron's, as in Megatron-Core 0.16.1 (`core/transformer/transformer_block.py` `_checkpointed_forward`,
`transformer_config.py`, `transformer_layer.py`). "full" by the method "uniform" has one checkpoint per n
layers of a stage. By "block" it checkpoints the first n layers of every (virtual) stage. "selective" runs
modules again, by default the core of attention.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.placement import parse_node_numbers
from zsim.specs.experiment.training.framework_training import phrases_of, training_of
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.table import StrategyTable
from zsim.specs.strategy.training import Checkpointing, TrainingConfig

_KEY = "training.block_checkpointing"
CORE, LATENT = "core_attn", "mla_up_proj"
_METHOD, _LAYERS, _MODULES = (
    "training.recompute_method",
    "training.recompute_layers",
    "training.recompute_modules",
)


def resolve_recomputation(
    training: TrainingConfig,
    table: TrainingTable,
    strategy: StrategyTable,
    parallelism: ParallelismConfig,
    num_blocks: int,
) -> TrainingConfig:
    """The training with the recomputation that `[training]` asks for.

    Raises InputError for keys that contradict each other and for what the framework refuses. Raises
    NotSimulatedError for what it has and zsim lacks.
    """
    framework = training_of(strategy.kind)
    _check_keys(table)
    framework.check_recomputation((table.activation_checkpointing, *table.block_checkpointing.values()))
    _check_offload(table, strategy.kind)
    training = replace(
        training,
        block_checkpointing=block_policies(table, num_blocks),
        checkpoint_offload=table.checkpoint_offload,
    )
    stages = parallelism.layers_per_stage or (num_blocks,)
    if table.recompute_method == "block":
        count = table.recompute_layers or 1
        return replace(training, block_checkpointing=_first_blocks(stages, count))
    if table.recompute_method == "uniform":
        count = _check_uniform(stages, table.recompute_layers or 1)
        if count > 1 and not framework.groups_layers(strategy):
            raise NotSimulatedError(
                f"{_LAYERS}: zsim simulates one checkpoint around {count} layers under "
                f"{' or '.join(phrases_of(lambda candidate: candidate.grouping_strategy))} only; expected 1 "
                f"with {_METHOD} 'uniform'"
            )
        return replace(training, layers_per_checkpoint=count)
    if table.activation_checkpointing != "selective":
        return training
    modules: tuple[str, ...] = table.recompute_modules if table.recompute_modules is not None else (CORE,)
    modules = framework.recomputed_modules(modules, strategy, parallelism, training.attention)
    other_modules = tuple(name for name in modules if name != CORE)
    if LATENT in other_modules and (training.attention != "flash" or parallelism.context > 1):
        raise NotSimulatedError(
            f"{_MODULES}: zsim simulates recomputation of '{LATENT}' with attention 'flash' and without "
            f"context parallelism, found '{training.attention}' and context = {parallelism.context}"
        )
    policy: Checkpointing = "selective" if CORE in modules else "none"
    return replace(training, activation_checkpointing=policy, recompute_modules=other_modules)


def _check_keys(table: TrainingTable) -> None:
    kind = table.activation_checkpointing
    if table.recompute_modules is not None and kind != "selective":
        raise InputError(
            f"{_MODULES}: found {list(table.recompute_modules)} with activation_checkpointing '{kind}'; "
            "expected 'selective'"
        )
    if table.recompute_method is not None and kind != "full":
        raise InputError(
            f"{_METHOD}: found '{table.recompute_method}' with activation_checkpointing '{kind}'; expected "
            "'full'"
        )
    if table.recompute_layers is not None and table.recompute_method is None:
        raise InputError(
            f"{_LAYERS}: found {table.recompute_layers} without {_METHOD}; expected 'uniform' (a checkpoint "
            "per so many layers) or 'block' (the first so many layers of a stage)"
        )
    if table.recompute_method is not None and (table.checkpoint_every > 1 or table.block_checkpointing):
        other_key = "checkpoint_every" if table.checkpoint_every > 1 else "block_checkpointing"
        raise InputError(f"{_METHOD} and training.{other_key} both say which blocks; expected one of them")


def _check_offload(table: TrainingTable, kind: str) -> None:
    """Raises InputError for an offload of what no block keeps, NotSimulatedError for a framework that has
    another one.
    """
    if table.checkpoint_offload is None:
        return
    where = f"training.checkpoint_offload: found '{table.checkpoint_offload}'"
    policies = {table.activation_checkpointing, *table.block_checkpointing.values()}
    if "full" not in policies:
        raise InputError(
            f"{where} with activation_checkpointing '{table.activation_checkpointing}', which keeps no "
            "block's input alone; expected 'full', or no offload"
        )
    if not training_of(kind).offloads_checkpoints:
        raise NotSimulatedError(
            f"{where} with strategy '{kind}', whose own offload of activations is not simulated; expected it "
            "left out"
        )


def _first_blocks(stages: tuple[int, ...], count: int) -> tuple[Checkpointing, ...]:
    """The first `count` layers of every stage are checkpointed. Empty if those are all layers."""
    policies: list[Checkpointing] = []
    for layers in stages:
        policies += ["full" if number < count else "none" for number in range(layers)]
    return () if all(policy == "full" for policy in policies) else tuple(policies)


def _check_uniform(stages: tuple[int, ...], count: int) -> int:
    for layers in stages:
        if layers % count:
            divisors = [
                divisor for divisor in range(1, layers + 1) if all(stage % divisor == 0 for stage in stages)
            ]
            nearest = min(divisors, key=lambda divisor: abs(divisor - count))
            raise InputError(
                f"{_LAYERS}: found {count}, which does not divide the {layers} layers of a stage, and "
                f"{_uniform_owner()}'s uniform checkpoints would run past its end; the nearest that does "
                f"is {nearest}"
            )
    return count


def _uniform_owner() -> str:
    """The framework that has checkpoints around several layers."""
    return " or ".join(phrases_of(lambda framework: framework.title if framework.grouping_strategy else ""))


def block_policies(table: TrainingTable, num_blocks: int) -> tuple[Checkpointing, ...]:
    """The policy of every block, or () if all blocks have the same.

    Blocks that are not named have `activation_checkpointing`. Raises InputError for blocks that the model
    does not have, for a block named twice, and in combination with `checkpoint_every`.
    """
    if not table.block_checkpointing:
        return ()
    if table.checkpoint_every > 1:
        raise InputError(f"{_KEY} and training.checkpoint_every both say which blocks; expected one of them")
    policies: list[Checkpointing] = [table.activation_checkpointing] * num_blocks
    named_blocks: set[int] = set()
    for text, policy in table.block_checkpointing.items():
        for number in _block_numbers(text):
            if number >= num_blocks:
                raise InputError(f"{_KEY}: found block {number}; the model has 0-{num_blocks - 1}")
            if number in named_blocks:
                raise InputError(f"{_KEY}: block {number} is named twice")
            named_blocks.add(number)
            policies[number] = policy
    return tuple(policies)


def _block_numbers(text: str) -> tuple[int, ...]:
    try:
        return parse_node_numbers(text)
    except ValueError:
        raise InputError(f"{_KEY}: found {text!r}, expected block numbers like '0-15' or '3,7'") from None
