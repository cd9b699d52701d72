"""The steps of every pipeline rank in a whole step, the order of computations, and counts that are refused.

# [Note: torch's CSV format]
Schedules read from torch's CSV format: one row per pipeline rank, one action per cell, as in "2F0".

Source: `_PipelineScheduleRuntime._load_csv`, `_Action.from_str`, `_validate_schedule` of torch 2.13
`torch/distributed/pipelining/schedules.py`.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import count
from typing import cast, get_args

from zsim.errors import InputError, did_you_mean
from zsim.plan.actions import Action, Kind, MessageCall, Order, Overlap, Step, actions_of
from zsim.plan.builder import PlanBuilder
from zsim.plan.pipeline import orders
from zsim.plan.pipeline.messages import Messenger
from zsim.plan.pipeline.orders import ranks_of_stages
from zsim.plan.pipeline.run_actions import PipelineRuntime
from zsim.plan.stage import Stage
from zsim.specs.strategy.parallelism import SINGLE_STAGE, V_SHAPED, ParallelismConfig


def steps_of(runtime: PipelineRuntime, micro_batches: int) -> list[list[Step]]:
    """The program of one step, per pipeline rank, in the order in which its host issues it. There are
    `micro_batches` in each pass, and passes come one after the other, with micro-batches numbered on.

    Raises InputError for counts that the framework's schedule refuses.
    """
    parallelism = runtime.parallelism
    if parallelism.pipeline == 1:
        return [runtime.steps_without_pipeline(micro_batches * parallelism.passes)]
    if not parallelism.schedule_text:
        check_schedule(parallelism)
        runtime.check(micro_batches)
    elif not parallelism.style.reads_schedule_files:
        raise InputError(
            f"parallelism.schedule_csv: {parallelism.style.schedule_title} reads no schedule; expected a "
            "torch strategy"
        )
    return [
        [
            _shift_micro_batches(step, pass_index * micro_batches)
            for pass_index in range(parallelism.passes)
            for step in steps
        ]
        for steps in runtime.steps(micro_batches)
    ]


def _shift_micro_batches(step: Step, first: int) -> Step:
    """The step with its micro-batches numbered from `first` on."""
    if isinstance(step, Action):
        number = step.micro_batch
        return step if number is None else step._replace(micro_batch=number + first)
    if isinstance(step, Overlap):
        assert first == 0, "pairs have one pass"
        return step
    messages = tuple(
        message._replace(micro_batch=(message.micro_batch or 0) + first) for message in step.messages
    )
    return step._replace(messages=messages)


def orders_of(schedule: str, ranks: int, virtual: int, micro_batches: int, group_size: int) -> list[Order]:
    """The computations of every pipeline rank, in order, without messages. Counts are not checked.

    `group_size` are the micro-batches that an interleaved schedule runs through one chunk at a time.
    """
    if schedule == "interleaved-1f1b":
        return orders.interleaved(ranks, virtual, micro_batches, group_size)
    if schedule == "looped-bfs":
        return orders.looped_bfs(ranks, virtual, micro_batches)
    if schedule == "interleaved-zero-bubble":
        return orders.interleaved_zero_bubble(ranks, virtual, micro_batches)
    single = {
        "gpipe": orders.gpipe,
        "1f1b": orders.one_forward_one_backward,
        "zbv-zero-bubble": orders.zbv,
        "dualpipe-v": orders.dualpipe_v,
    }
    return single[schedule](ranks, micro_batches)


def ranks_of(parallelism: ParallelismConfig, micro_batches: int) -> list[int]:
    """The pipeline rank of every stage, in model order: in a CSV schedule it is where its actions are.

    Raises InputError for a CSV schedule that does not fit `micro_batches` of a pass.
    """
    ranks, virtual = parallelism.pipeline, parallelism.virtual_stages
    if parallelism.schedule_text:
        return read_csv(parallelism.schedule_text, ranks, virtual, micro_batches).rank_of
    return ranks_of_stages(parallelism.schedule, ranks, virtual)


class ForwardOnly(PipelineRuntime):
    """The runtime of a pass without backward, under any framework.

    Groups of as many micro-batches as there are ranks go through one stage of a rank after the other, as
    Megatron's and torch's interleaved schedules begin. An input is waited for where it is needed. An output
    is sent at once, and nobody keeps it.
    """

    def steps(self, micro_batches: int) -> list[list[Step]]:
        ranks = ranks_of(self.parallelism, micro_batches)
        return [_steps_of_rank(ranks, rank, micro_batches) for rank in range(self.parallelism.pipeline)]

    def steps_without_pipeline(self, micro_batches: int) -> list[Step]:
        return [Action("F", 0, number) for number in range(micro_batches)]

    def messenger(
        self, builder: PlanBuilder, stages: Mapping[int, Stage], ranks: Sequence[int], rank: int
    ) -> Messenger:
        return Messenger(builder, stages, ranks, rank, empties_outputs=True)


def _steps_of_rank(ranks: Sequence[int], rank: int, micro_batches: int) -> list[Step]:
    size = max(ranks) + 1
    own_stages = [stage for stage, owner in enumerate(ranks) if owner == rank]
    return [
        step
        for first in range(0, micro_batches, size)
        for stage in own_stages
        for micro_batch in range(first, min(first + size, micro_batches))
        for step in _forward_steps(ranks, stage, micro_batch)
    ]


def _forward_steps(ranks: Sequence[int], stage: int, micro_batch: int) -> list[Step]:
    """A forward between the messages that bring its input and take its output."""
    steps: list[Step] = []
    if stage > 0 and ranks[stage - 1] != ranks[stage]:
        message = Action("RECV_F", stage, micro_batch)
        steps.append(MessageCall((message,), is_batched=False, waits="use"))
    steps.append(Action("F", stage, micro_batch))
    if stage < len(ranks) - 1 and ranks[stage + 1] != ranks[stage]:
        message = Action("SEND_F", stage, micro_batch)
        steps.append(MessageCall((message,), is_batched=False, waits="stream"))
    return steps


_STEPS = "training.gradient_accumulation_steps"


def check_schedule(parallelism: ParallelismConfig) -> None:
    """Raises InputError for a schedule or several passes that the framework lacks, and for stages per rank
    that the schedule does not have.
    """
    style, schedule, virtual = parallelism.style, parallelism.schedule, parallelism.virtual_stages
    if schedule not in style.schedules:
        raise InputError(
            f"parallelism.schedule: {style.schedule_title} has no '{schedule}'; expected "
            f"{' or '.join(repr(offered) for offered in style.schedules)}"
            f"{did_you_mean(schedule, style.schedules)}"
        )
    if parallelism.passes > 1 and not style.has_passes:
        raise InputError(
            f"parallelism.passes: found {parallelism.passes}, but {style.schedule_title} runs one pipeline "
            "per step; expected 1"
        )
    if schedule in V_SHAPED and virtual != 2:
        raise InputError(
            f"parallelism.virtual_stages: found {virtual} with schedule '{schedule}', expected 2"
        )
    if schedule in SINGLE_STAGE and virtual != 1:
        raise InputError(
            f"parallelism.virtual_stages: found {virtual} with schedule '{schedule}', which has one stage "
            "per rank; expected 1"
        )


def check_micro_batches(
    parallelism: ParallelismConfig, micro_batches: int, expected: str, is_right: Callable[[int], bool]
) -> None:
    """Raises InputError for `micro_batches` of a pass that are not right. `expected` says in words which
    are.
    """
    if is_right(micro_batches):
        return
    passes, subject = parallelism.passes, f"{parallelism.style.schedule_title}'s '{parallelism.schedule}'"
    passes_text = f" in {passes} passes of {micro_batches} micro-batches" if passes > 1 else ""
    raise InputError(
        f"{_STEPS}: found {micro_batches * passes}{passes_text}, but {subject} takes {expected}; the nearest "
        f"is {_nearest(micro_batches, is_right) * passes}"
    )


def _nearest(micro_batches: int, is_right: Callable[[int], bool]) -> int:
    """The nearest count above 0 that is right, the smaller of two."""
    return next(
        candidate
        for distance in count(1)
        for candidate in (micro_batches - distance, micro_batches + distance)
        if candidate > 0 and is_right(candidate)
    )


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
