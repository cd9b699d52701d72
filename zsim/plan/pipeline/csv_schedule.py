"""Schedules read from torch's CSV format: one row per pipeline rank, one action per cell, as in "2F0".

Source: `_PipelineScheduleRuntime._load_csv`, `_Action.from_str`, `_validate_schedule` of torch 2.13
`torch/distributed/pipelining/schedules.py`.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import cast, get_args

from zsim.errors import InputError
from zsim.plan.actions import Action, Kind, Order, Overlap, actions_of

_WHERE = "parallelism.schedule_csv"
_COMPUTES: tuple[Kind, ...] = ("F", "B", "I", "W")
_ACTION = re.compile(rf"(\d+)({'|'.join(sorted(get_args(Kind), key=len, reverse=True))})(\d*)")
_OVERLAP = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class CsvSchedule:
    """A schedule from a file."""

    orders: list[Order]
    """The order of each pipeline rank."""
    rank_of: list[int]
    """The pipeline rank of every stage."""
    is_lowered: bool
    """It has its messages and the actions of sharding already (torch's format "compute_comms"). Otherwise
    torch adds them.
    """


def read_csv(text: str, ranks: int, virtual: int, micro_batches: int) -> CsvSchedule:
    """The schedule of a CSV file's `text`.

    Raises InputError for a cell that is no action, for another number of rows than `ranks` or of stages than
    ranks x virtual, for a stage on two ranks, and for a stage without `micro_batches` forwards and backwards.
    """
    rows = [row for row in csv.reader(StringIO(text)) if row]
    if len(rows) != ranks:
        raise InputError(
            f"{_WHERE}: found {len(rows)} rows, one per pipeline rank; expected {ranks}, as "
            "parallelism.pipeline"
        )
    orders: list[Order] = [
        [_parse_cell(cell.strip(), row, column) for column, cell in enumerate(cells) if cell.strip()]
        for row, cells in enumerate(rows)
    ]
    actions = [[action for item in order for action in actions_of(item)] for order in orders]
    is_lowered = any(action.kind not in _COMPUTES for order in actions for action in order)
    return CsvSchedule(orders, _rank_per_stage(actions, ranks * virtual, micro_batches), is_lowered)


def _parse_cell(cell: str, row: int, column: int) -> Action | Overlap:
    if (pair := _OVERLAP.fullmatch(cell)) is not None:
        return Overlap(_parse_action(pair[1], row, column), _parse_action(pair[2], row, column))
    return _parse_action(cell, row, column)


def _parse_action(cell: str, row: int, column: int) -> Action:
    match = _ACTION.fullmatch(cell)
    if match is None or (match[3] == "") != (match[2] in ("UNSHARD", "RESHARD", "REDUCE_GRAD")):
        raise InputError(
            f"{_WHERE}: row {row + 1}, cell {column + 1}: found '{cell}', expected [stage][action]"
            f"[micro-batch] such as '2F0', '0SEND_F1' or '1UNSHARD', with one of "
            f"the actions {', '.join(get_args(Kind))}"
        )
    return Action(cast("Kind", match[2]), int(match[1]), int(match[3]) if match[3] else None)


def _rank_per_stage(orders: Sequence[Sequence[Action]], stages: int, micro_batches: int) -> list[int]:
    """The rank of every stage, from where its computations are."""
    rank_of: dict[int, int] = {}
    micro_batches_done: dict[tuple[int, Kind], set[int | None]] = defaultdict(set)
    for rank, order in enumerate(orders):
        for action in order:
            if rank_of.setdefault(action.stage, rank) != rank:
                raise InputError(
                    f"{_WHERE}: stage {action.stage} is on ranks {rank_of[action.stage]} and {rank}; "
                    "expected it on one"
                )
            if not _has_input(action, micro_batches_done):
                raise InputError(
                    f"{_WHERE}: rank {rank}: {action} stands before the forward or the I of its micro-batch; "
                    "expected it behind"
                )
            micro_batches_done[action.stage, action.kind].add(action.micro_batch)
    if sorted(rank_of) != list(range(stages)):
        raise InputError(
            f"{_WHERE}: found {len(rank_of)} stages, numbered up to {max(rank_of, default=0)}; expected "
            f"{stages}, 0 to {stages - 1}: parallelism.pipeline x virtual_stages"
        )
    all_micro_batches = set(range(micro_batches))
    for stage in range(stages):
        backward = {kind: micro_batches_done[stage, kind] for kind in _COMPUTES}
        is_complete = not backward["B"] & backward["I"] and backward["I"] == backward["W"]
        if (
            backward["F"] != all_micro_batches
            or backward["B"] | backward["I"] != all_micro_batches
            or not is_complete
        ):
            raise InputError(
                f"{_WHERE}: stage {stage} has {len(backward['F'])} forwards and "
                f"{len(backward['B']) + len(backward['I'])} backwards; expected one of each for each of the "
                f"{micro_batches} micro-batches of training.gradient_accumulation_steps, a backward whole "
                "(B) or in two (I and W)"
            )
    return [rank_of[stage] for stage in range(stages)]


def _has_input(action: Action, micro_batches_done: dict[tuple[int, Kind], set[int | None]]) -> bool:
    """Whether what the rank itself must have done before the action is done."""
    kind_needed: dict[Kind, Kind] = {"B": "F", "I": "F", "W": "I"}
    return (
        action.kind not in kind_needed
        or action.micro_batch in micro_batches_done[action.stage, kind_needed[action.kind]]
    )
