"""One simulated rank on the clock, and the memory in which ranks keep the state of each op.

# [Note: ranks side by side]
Equal ranks reach an op at the same instant, one right after the other. So their state of one op lies side by
side in memory for all ranks that run a program, instead of op by op for each rank. Then one line of a
processor's cache holds several ranks, where otherwise each would have to be fetched from memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, MutableSequence, Sequence

import numpy as np

from zsim.devices.allocator import Allocator
from zsim.devices.gpu import GpuKernels
from zsim.engine.priced_program import PricedProgram
from zsim.fabric.communicators import Transfer
from zsim.fabric.fabric import InFlightTransfer
from zsim.plan.ops import RecordedWork, Work
from zsim.trace.trace import SpanInfo


class SimulatedRank:
    """One simulated rank: the state of its host, and the times at which each op was issued, started and
    ended.

    `pending` and `times` are described in `zsim.engine.simulated_rank`.
    """

    __slots__ = (
        "allocator",
        "allocator_stalls",
        "began",
        "blocked_on",
        "communicators",
        "ended",
        "following",
        "gpu",
        "host_stalls",
        "host_time",
        "is_in_allocator",
        "is_queued",
        "issue",
        "kernel_seconds",
        "messages_left",
        "next_call",
        "next_op",
        "number",
        "payloads",
        "peers",
        "pending",
        "program",
        "ready",
        "recorded_stalls",
        "rendezvous",
        "row",
        "start",
        "successors",
        "transfers_in_flight",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        program: PricedProgram,
        payloads: Sequence[Work | None],
        pending: MutableSequence[int] | memoryview[int],
        communicators: dict[str, int],
        kernel_seconds: Sequence[float | None],
        began: float,
        times: Sequence[memoryview[float]],
    ) -> None:
        self.number = number
        self.program = program
        self.payloads = payloads
        self.successors = program.successors
        self.is_queued = program.next_in_queue is not None
        self.following: Sequence[int] | None = None  # where kernels in a row are started together
        self.row: list[int] = []  # kernels in a row before the one that the GPU wakes up for
        self.began = began
        self.kernel_seconds = kernel_seconds
        self.communicators = communicators  # which instance of each group it belongs to
        self.pending = pending
        self.issue, self.start, self.ended = times
        self.next_op = 0
        self.host_time = began
        self.ready: list[float] | None = None  # of a recorded rank: when what each op waited for was over
        self.next_call = 0  # of a recorded host, before the next op
        if program.recorded is not None:
            self.ready = list(program.recorded.ready)
            self.host_time += program.recorded.host_begin
        self.blocked_on = -1
        self.is_in_allocator = False  # what it is blocked on, its allocator waits for
        self.allocator: Allocator | None = None
        self.host_stalls: list[tuple[float, float, int]] = []
        self.recorded_stalls: list[tuple[float, float, SpanInfo]] = []  # what a recorded wait counts as
        self.allocator_stalls: list[tuple[float, float]] = []  # the host's time in an allocator that is short
        self.rendezvous: dict[str, Rendezvous] = {}  # by group
        self.transfers_in_flight = TransfersInFlight()
        self.messages_left: dict[int, int] = {}  # by op: its messages that are not over
        self.peers: dict[int, list[tuple[int, int]]] = {}  # by op: rank and op of what its messages met
        self.gpu: GpuKernels[SimulatedRank]

    def join(self, all_rendezvous: dict[tuple[str, int], Rendezvous], groups: Iterable[str]) -> None:
        """Become a member of the rank's communicator in each of `groups`. `all_rendezvous` has those of all
        ranks, by group and communicator.
        """
        for name in groups:
            number = self.communicators[name]
            rendezvous = self.rendezvous[name] = all_rendezvous.setdefault((name, number), Rendezvous(number))
            rendezvous.num_members += 1

    def resume_host(self, op: int, now: float) -> None:
        """Resume the host: the op that it was blocked on has ended."""
        stall_start = self.host_time
        self.host_time = max(now, stall_start)
        self.host_stalls.append((stall_start, self.host_time, op))
        if self.is_in_allocator:
            self.allocator_stalls.append((stall_start, self.host_time))
            self.is_in_allocator = False
        self.blocked_on = -1

    def make_calls(self, work: RecordedWork) -> int:
        """Make the remaining calls before the next op. Returns the op that a call must wait for first, or -1
        when all calls are made.
        """
        waits = iter(self.program.program.ops[self.next_op].host_waits)
        for index, call in enumerate(work.calls):
            wait = next(waits) if call.waits else -1
            if index < self.next_call:
                continue
            if wait >= 0 and math.isnan(self.ended[wait]):
                return wait
            self.next_call += 1
            began = self.host_time + call.seconds
            wait_end = began if wait < 0 else max(began, self.ended[wait])
            self.host_time = max(began, wait_end + call.overhead_seconds)
            if self.host_time > began and call.info is not None:
                self.recorded_stalls.append((began, self.host_time, call.info))
        self.next_call = 0
        return -1

    def start_recorded(self, op: int) -> float:
        """The start of a recorded op: its lag after it is issued and its waits are over."""
        assert self.ready is not None
        assert self.program.recorded is not None
        lag = self.program.recorded.recorded_work[op].lag_seconds
        self.start[op] = time = max(self.issue[op], self.ready[op]) + lag
        return time

    def recorded_end(self, op: int) -> float:
        """The end of a recorded op of fixed length."""
        assert self.program.recorded is not None
        return self.start[op] + self.program.recorded.recorded_work[op].seconds

    def describe_wait(self) -> str:
        """A description of the op at which the rank is stuck, for an error."""
        ops = self.program.program.ops
        if self.blocked_on >= 0:
            return (
                f"rank {self.number}: the host waits for '{ops[self.blocked_on].name}' before it can issue "
                f"'{ops[self.next_op].name}', and nothing is left that could end it"
            )
        for number, op in enumerate(ops):
            if math.isnan(self.ended[number]):
                state = "never ends" if not math.isnan(self.start[number]) else "never starts"
                return f"rank {self.number}: '{op.name}' on stream {op.stream} {state}"
        return f"rank {self.number}: stopped before the end of its program"


def worked_seconds(stalls: Iterable[tuple[float, float, object]], since: float, until: float) -> float:
    """Seconds from `since` to `until` in which a host was in none of its `stalls`.

    A stall is (start, end, cause), and stalls do not overlap.
    """
    blocked = sum(max(min(end, until) - max(start, since), 0.0) for start, end, _ in stalls)
    return max(until - since - blocked, 0.0)


class Rendezvous:
    """The simulated members of one communicator.

    `pending_collectives` holds, by call, the members (and their ops) that wait for the others. `transfers`
    holds those of its collectives, by the id of a rank's work.
    """

    __slots__ = ("communicator", "num_members", "pending_collectives", "transfers")

    def __init__(self, communicator: int) -> None:
        self.communicator = communicator
        self.num_members = 0
        self.pending_collectives: dict[int, list[tuple[SimulatedRank, int]]] = {}
        self.transfers: dict[int, Transfer] = {}


class RankMemory:
    """The memory of the ranks that run `programs`, in huge pages."""

    def __init__(self, programs: Sequence[PricedProgram]) -> None:
        self._num_ranks = Counter(map(id, programs))
        self._num_allocated: Counter[int] = Counter()
        programs_by_id = {id(program): program for program in programs}.items()
        self._times = {
            key: np.full(3 * program.num_ops * self._num_ranks[key], np.nan).data.cast("B").cast("d")
            for key, program in programs_by_id
        }
        self._pending = {
            key: np.repeat(np.array(program.pending, dtype=np.uint8), self._num_ranks[key]).data
            for key, program in programs_by_id
            if self._num_ranks[key] > 1 and max(program.pending, default=0) < 256
        }

    def allocate_rank(
        self, program: PricedProgram
    ) -> tuple[MutableSequence[int] | memoryview[int], list[memoryview[float]]]:
        """The memory of the next rank that runs `program`.

        By op, it holds how many ops the op still waits for, and the times at which it is issued, starts and
        ends. No time is known yet (not a number).
        """
        key, num = id(program), program.num_ops
        count, index = self._num_ranks[key], self._num_allocated[key]
        self._num_allocated[key] += 1
        times = self._times[key][index::count]
        shared_pending = self._pending.get(key)
        pending = program.pending[:] if shared_pending is None else shared_pending[index::count]
        return pending, [times[:num], times[num : 2 * num], times[2 * num :]]


class TransfersInFlight:
    """The collectives in flight of one rank."""

    __slots__ = ("transfers",)

    def __init__(self) -> None:
        self.transfers: list[InFlightTransfer] = []

    def set_gpu_busy(self, is_busy: bool) -> None:
        """Tell all collectives in flight that the rank's GPU has become busy, or idle."""
        for transfer in self.transfers:
            transfer.set_member_busy(is_busy)
