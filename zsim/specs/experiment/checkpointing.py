"""Activation checkpointing that differs from block to block: `training.block_checkpointing`."""

from __future__ import annotations

from zsim.errors import InputError
from zsim.specs.experiment.placement import node_numbers
from zsim.specs.experiment.tables import TrainingTable
from zsim.specs.strategy.training import Checkpointing

_KEY = "training.block_checkpointing"


def block_policies(table: TrainingTable, num_blocks: int) -> tuple[Checkpointing, ...]:
    """The policy of every block; () if all blocks have the same. Blocks that are not named have
    `activation_checkpointing`.

    Raises InputError for blocks that the model does not have, for a block named twice, and together with
    `checkpoint_every`.
    """
    if not table.block_checkpointing:
        return ()
    if table.checkpoint_every > 1:
        raise InputError(f"{_KEY} and training.checkpoint_every both say which blocks; expected one of them")
    policies: list[Checkpointing] = [table.activation_checkpointing] * num_blocks
    named: set[int] = set()
    for text, policy in table.block_checkpointing.items():
        for number in _numbers(text):
            if number >= num_blocks:
                raise InputError(f"{_KEY}: found block {number}; the model has 0-{num_blocks - 1}")
            if number in named:
                raise InputError(f"{_KEY}: block {number} is named twice")
            named.add(number)
            policies[number] = policy
    return tuple(policies)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return node_numbers(text)
    except ValueError:
        raise InputError(f"{_KEY}: found {text!r}, expected block numbers like '0-15' or '3,7'") from None
