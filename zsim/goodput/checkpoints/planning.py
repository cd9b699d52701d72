"""Planners and what they take: one process goes through the items of all ranks.

Read in torch 2.13 distributed/checkpoint: `utils.py` `reduce_scatter` (plans to rank 0, and back),
`default_planner.py` (`create_global_plan` removes copies, builds `.metadata` and checks it, and
`create_default_global_load_plan` leaves a load's plans as they are), `filesystem.py` `finish`,
`planner_helpers.py` `create_read_items_for_chunk_list` (each rank goes through all parts of its tensors).

# [Note: cycles]
Python looks for cycles among all objects again and again while plans come in, which takes most of the time.
torchtitan turns that off in the training process (0.2.2 tools/utils.py `GarbageCollection`), which plans
unless another process writes.
"""

from __future__ import annotations

from zsim.goodput.checkpoints.machine import SavingMachine
from zsim.goodput.checkpoints.rates import PlanningRates
from zsim.goodput.checkpoints.saved import SavedFiles
from zsim.specs.experiment.run.checkpoint import TWO_TIERS, CheckpointTable
from zsim.specs.strategy.frameworks import Fsdp2Config


def plan_seconds(saved: SavedFiles, machine: SavingMachine, table: CheckpointTable) -> float:
    """Seconds until a save is planned.

    None for plans that are kept (`enable_plan_caching`, Megatron's `--ckpt-assume-constant-structure`), after
    the first save.
    """
    if table.plan_caching:
        return 0.0
    rates = _rates(machine, table)
    checked = saved.checked_items * rates.read_item
    if not is_planned(saved, table):
        return checked
    item_seconds = rates.read_item + rates.plan_item + rates.answer_item * saved.is_answered
    return saved.items * item_seconds + checked


def commit_seconds(saved: SavedFiles, machine: SavingMachine, table: CheckpointTable) -> float:
    """Seconds of rank 0 for `.metadata`, where there is one."""
    return saved.chunks * _rates(machine, table).commit_item if is_planned(saved, table) else 0.0


def is_planned(saved: SavedFiles, table: CheckpointTable) -> bool:
    """Whether rank 0 plans all files of the most frequent kind of save, and writes their `.metadata`."""
    return saved.has_local_plan or table.mode not in TWO_TIERS


def load_plan_seconds(saved: SavedFiles, machine: SavingMachine, table: CheckpointTable) -> float:
    """Seconds of `.metadata` on every rank, and of the plans on rank 0, where there are any."""
    rates = _rates(machine, None)
    if not is_planned(saved, table):
        return saved.checked_items * rates.read_item
    seconds = saved.chunks * rates.metadata_item + saved.read_items * rates.load_item
    seconds += saved.read_items / len(saved.read) * machine.rates.own_load_plan_seconds_per_item
    return seconds + saved.checked_items * rates.read_item


def _rates(machine: SavingMachine, table: CheckpointTable | None) -> PlanningRates:
    """The planner's rates, [Note: cycles]. `table` is a save's, None for a load."""
    strategy = machine.job.strategy
    is_separate_process = table is not None and table.mode == "async" and table.writer == "process"
    if (
        isinstance(strategy, Fsdp2Config)
        and strategy.wrapping.startswith("torchtitan")
        and not is_separate_process
    ):
        return machine.rates.planning_uncollected
    return machine.rates.planning
