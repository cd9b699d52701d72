"""A program priced for a cluster: the executor's input, as flat lists indexed by op."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeVar, get_args

import numpy as np

from zsim.arrays import Ints, factorize
from zsim.cost.kernels.kernel import Kernel
from zsim.fabric.messages import Side, sides_of
from zsim.plan.builder import COMPUTE
from zsim.plan.columns import are_compute, op_columns, original_ops, unroll
from zsim.plan.ops import Collective, Group, Kernels, OffloadWork, Op, PointToPoint, Program, RecordedWork
from zsim.plan.passes.hardware_queues import program_next_in_queue
from zsim.specs.strategy.training import DEFAULT_CONNECTIONS

Value = TypeVar("Value")
_ON_GPU = (Kernels, Collective, PointToPoint)
_NOT_PRICED = (PointToPoint, *get_args(OffloadWork))  # by the fabric and the host's devices


@dataclass(frozen=True, slots=True)
class RecordedTimes:
    """The additional lists of a recorded program, by op."""

    recorded_work: list[RecordedWork]
    """The recorded work of each op."""
    ready: list[float]
    """The time at which the op could start without waits. -inf: at any time."""
    calls: list[Collective | None]
    """The collective that the op runs on a fabric with other ranks, if any."""
    host_begin: float
    """Start of the host."""
    shares_gpu: bool
    """Whether kernels share the GPU. Their seconds are then the time that they take on an otherwise
    idle GPU.
    """

    @property
    def groups(self) -> set[str]:
        """The names of the groups over which the program runs collectives on the fabric."""
        return {call.group for call in self.calls if call is not None}


@dataclass(frozen=True, slots=True)
class PricedProgram:
    """A priced program, as lists by op."""

    program: Program
    pending: list[int]
    """Number of ops that must end before the op may start: the previous op on its stream, and the ops in
    `after`.
    """
    successors: list[tuple[int, ...]]
    """The ops that wait for the op."""
    host_seconds: list[float]
    """Host time to issue the op."""
    kernel_seconds: list[float | None]
    concentration: list[float]
    """The sum of the squares of its launches' seconds over the square of their sum: 1 for one launch, 1/n for
    n equal ones.
    """
    host_waits: list[tuple[int, ...]]
    """The ops that the host waits for before it issues the op."""
    call_numbers: list[int]
    """Group of a collective and index of its call on the group, as one number. -1: not a collective. Members
    of a communicator meet at its n-th call, whatever their other ops (NCCL's rule).
    """
    sides: dict[int, tuple[Side, ...]]
    """The messages of the op."""
    next_in_queue: list[int] | None = None
    """The op that may start once this op has started, because it is next in a hardware queue. -1: none. It
    counts in `pending` too. None if no streams share a queue.
    """
    recorded: RecordedTimes | None = None
    following: list[int] | None = None
    """By op of kernels, the op of kernels that alone waits for it, and waits for nothing else. -1: none."""

    @property
    def num_ops(self) -> int:
        return len(self.pending)


def price_program(
    program: Program,
    groups: Mapping[str, Group],
    kernel_seconds: Callable[[Kernel], float],
    host_seconds: Callable[[Op], float],
    launch_queue: int,
    connections: int = DEFAULT_CONNECTIONS,
    is_serial: bool = False,
) -> PricedProgram:
    """The program with every op priced, once per distinct work.

    The compute stream's queue holds `launch_queue` launches that have not run yet. When it is full the host
    waits. Streams share `connections` hardware queues. With `is_serial` all kernels and collectives are on
    one stream.
    """
    order = program.memoize(program_order, connections, is_serial)
    unique = program.memoize(find_unique_ops, tuple(groups), launch_queue)
    prices = [
        _combine_kernels([(kernel_seconds(k), k.launches) for k in work.kernels]) for work in unique.kernels
    ]
    seconds: list[float | None] = [price for price, _ in prices]
    concentrations = [concentration for _, concentration in prices]
    seconds.append(None)  # for ops without kernels, at place -1
    concentrations.append(0.0)
    issue_seconds = [host_seconds(op) for op in unique.issue_samples]
    return PricedProgram(
        program,
        order.pending,
        order.successors,
        _select(unique.issue_sample_of, issue_seconds),
        _select(unique.kernels_of, seconds),
        _select(unique.kernels_of, concentrations),
        unique.host_waits,
        unique.call_numbers,
        sides_of(program, groups),
        order.next_in_queue,
        following=program.memoize(_following_kernels, connections, is_serial, tuple(groups), launch_queue),
    )


def _following_kernels(
    program: Program, connections: int, is_serial: bool, groups: tuple[str, ...], launch_queue: int
) -> list[int] | None:
    """See `PricedProgram.following`. None where most kernels are followed by something else.

    Where streams share a queue, the op is also next in the queue, and what is next after it waits for its
    end.
    """
    order = program.memoize(program_order, connections, is_serial)
    unique = program.memoize(find_unique_ops, groups, launch_queue)
    queued_ops, successors = order.next_in_queue, order.successors
    are_kernels = unique.kernels_of >= 0
    is_first = are_kernels & (np.fromiter(map(len, successors), np.int64, len(successors)) == 1)
    is_first[np.fromiter(chain.from_iterable(unique.host_waits), np.int64)] = False
    num_waits = 1 if queued_ops is None else 2
    if 2 * np.count_nonzero(is_first) <= np.count_nonzero(are_kernels):
        return None
    is_second = (are_kernels & (np.array(order.pending, np.int64) == num_waits)).tolist()
    following, count = [-1] * len(order.pending), 0
    for op in np.flatnonzero(is_first).tolist():
        (next_op,) = successors[op]
        if is_second[next_op]:
            if queued_ops is not None:
                queued_op = queued_ops[next_op]
                if queued_ops[op] != next_op or (queued_op >= 0 and queued_op not in successors[next_op]):
                    continue
            following[op] = next_op
            count += 1
    return following if 2 * count > np.count_nonzero(are_kernels) else None


class ProgramOrder(NamedTuple):
    """The waits between ops. See `PricedProgram`."""

    pending: list[int]
    successors: list[tuple[int, ...]]
    next_in_queue: list[int] | None


def program_order(program: Program, connections: int, is_serial: bool) -> ProgramOrder:
    """The waits between ops: an op waits for the previous op on its stream, for its `after`, and for its turn
    in a hardware queue. See `price_program`.
    """
    pending: list[int] = []
    successors: list[tuple[int, ...]] = [()] * len(program.ops)
    last_on_stream: dict[str, int] = {}
    columns = program.memoize(op_columns)
    for index, (stream, work, after) in enumerate(
        zip(columns.stream, columns.work, columns.after, strict=True)
    ):
        predecessors: Collection[int] = after
        count = 0
        if work is not None:
            if is_serial and isinstance(work, _ON_GPU):
                stream = COMPUTE
            previous = last_on_stream.get(stream, -1)
            if previous >= 0 and previous not in predecessors:
                successors[previous] += (index,)
                count = 1
            last_on_stream[stream] = index
        if predecessors:
            if len(predecessors) > 1:
                predecessors = set(predecessors)
            for predecessor in predecessors:
                assert predecessor < index, f"op {index} waits for op {predecessor}, which is issued later"
                successors[predecessor] += (index,)
            count += len(predecessors)
        pending.append(count)
    next_in_queue = program.memoize(program_next_in_queue, connections)
    for queued_op in next_in_queue or ():
        if queued_op >= 0:
            pending[queued_op] += 1
    return ProgramOrder(pending, successors, next_in_queue)


@dataclass(frozen=True, slots=True)
class UniqueOps:
    """The part of a priced program that depends on neither prices nor queues. See `PricedProgram`."""

    host_waits: list[tuple[int, ...]]
    call_numbers: list[int]
    kernels: list[Kernels]
    """The distinct kernels."""
    kernels_of: Ints
    """By op, the index of its kernels in `kernels`. -1: none."""
    issue_samples: list[Op]
    """One op for each distinct cost of issuing."""
    issue_sample_of: Ints
    """By op, the index of the op of its cost in `issue_samples`."""


def find_unique_ops(program: Program, groups: tuple[str, ...], launch_queue: int) -> UniqueOps:
    """The ops that communicate with other ranks, and the ops of equal cost. See `price_program`.

    Members of a communicator meet at its n-th call, whatever their other ops (NCCL's rule).
    """
    index_of_group = {name: position for position, name in enumerate(groups)}
    calls, call_numbers = [0] * len(groups), [-1] * len(program.ops)
    kernels: dict[int, Kernels] = {}  # by id
    collectives: dict[int, int] = {}  # by id, the place of their group
    columns, originals = program.memoize(op_columns), program.memoize(original_ops)
    work_ids = [id(columns.work[number]) for number in originals]
    for number, work in program.unique_work.items():
        if type(work) is Kernels:
            kernels[number] = work
        elif type(work) is Collective:
            collectives[number] = index_of_group[work.group]
        else:
            assert isinstance(work, _NOT_PRICED)
    groups_of_ops = unroll(program, [collectives.get(number, -1) for number in work_ids])
    calling_ops = np.flatnonzero(groups_of_ops >= 0)
    for index, group in zip(calling_ops.tolist(), groups_of_ops[calling_ops].tolist(), strict=True):
        call_numbers[index] = calls[group] * len(groups) + group
        calls[group] += 1
    index_of_kernels = {number: position for position, number in enumerate(kernels)}
    kernels_of = unroll(program, [index_of_kernels.get(number, -1) for number in work_ids])
    costs = [(columns.overhead[n], columns.events[n], columns.launches[n]) for n in originals]
    issue_samples = dict(zip(costs, [program.ops[number] for number in originals], strict=True))
    issue_sample_of = unroll(program, factorize(costs)[1])
    waits = _add_launch_queue_waits(program, launch_queue)
    return UniqueOps(
        waits, call_numbers, list(kernels.values()), kernels_of, list(issue_samples.values()), issue_sample_of
    )


def _select(indices: Ints, values: Sequence[Value]) -> list[Value]:
    """The value at each index, as the object that it is."""
    selected: list[Value] = np.array(values, dtype=object)[indices].tolist()
    return selected


def _combine_kernels(kernels: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Total seconds and concentration of `kernels`, given as (seconds, launches)."""
    total = sum(seconds for seconds, _ in kernels)
    squares = sum(seconds * seconds / max(launches, 1) for seconds, launches in kernels)
    return total, squares / (total * total) if total > 0 else 0.0


def scale_seconds(kernel_seconds: Sequence[float | None], factor: float) -> Sequence[float | None]:
    """The kernels' seconds on a GPU that is `factor` times slower."""
    if factor == 1.0:
        return kernel_seconds
    return [None if seconds is None else seconds * factor for seconds in kernel_seconds]


def _add_launch_queue_waits(program: Program, limit: int) -> list[tuple[int, ...]]:
    """The program's host waits, and the waits for room in the compute stream's launch queue of `limit`
    launches.

    The host waits once per eighth of the queue, not at every launch: its run-ahead is exact to an eighth.
    """
    columns = program.memoize(op_columns)
    waits = list(columns.host_waits)
    quantum = max(limit // 8, 1)
    is_on_compute = program.memoize(are_compute)
    launches = np.fromiter(columns.launches, np.int64, len(waits))[is_on_compute]
    launched = np.cumsum(launches)  # up to and with each launch
    is_mark = launched // quantum != (launched - launches) // quantum
    marks = np.flatnonzero(is_on_compute)[is_mark].tolist()
    launched_at_marks = launched[is_mark]
    marks_with_room = np.searchsorted(
        launched_at_marks, launched_at_marks - limit, side="right"
    ).tolist()  # marks, once there is room
    for number, before, after in zip(marks, [0, *marks_with_room], marks_with_room, strict=False):
        if after > before:
            waits[number] = (*waits[number], marks[after - 1])
    return waits
