"""The executor: runs programs on simulated ranks.

A simulated rank stands for itself or for a class of equal ranks. Its host issues the ops in order, ahead of
the GPU, until it must block. An op starts when it is issued and everything that it waits for has ended. The
executor decides no policy: the plan does.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import simpy

from zsim.devices.allocator import Allocator
from zsim.devices.gpu import GpuKernels
from zsim.engine.offload import Offload
from zsim.engine.priced_program import PricedProgram, RecordedTimes
from zsim.engine.simulated_rank import RankMemory, Rendezvous, SimulatedRank
from zsim.errors import StuckError
from zsim.fabric.communicators import Transfer
from zsim.fabric.fabric import Fabric
from zsim.fluid.pool import EventQueue, exact_delay
from zsim.plan.ops import Collective, OffloadWork, PointToPoint
from zsim.plan.recorded.rank import shares_gpu

_HOST = -1  # in the event queue, in place of an op: the host goes on


class Executor:
    """Runs one step: on each of `ranks` (all ranks, or one per class) its program.

    `kernel_seconds` are those of the programs on these ranks. `slowdowns` are the factors on their kernels
    while a collective runs, and `narrow_slowdowns` (left out: the same) while only a library's exchanges do.
    `allocators` are those of the ranks before the step. They are given if memory is short, so that the
    allocators delay the host. Recorded programs need no `offload`, and no `fabric` if they do not
    communicate. `on_finish` is called once, when the last op of all ranks has ended.
    """

    def __init__(
        self,
        env: simpy.Environment,
        programs: Sequence[PricedProgram],
        fabric: Fabric | None,
        ranks: Sequence[int],
        kernel_seconds: Sequence[Sequence[float | None]],
        slowdowns: Sequence[float],
        offload: Offload | None,
        allocators: Sequence[Allocator] = (),
        narrow_slowdowns: Sequence[float] = (),
    ) -> None:
        self.env = env
        self._fabric = fabric
        self._offload = offload
        self.num_events = 0
        self.on_finish: Callable[[], None] | None = None
        self._ops_left = sum(program.num_ops for program in programs)
        memory = RankMemory(programs)
        self._event_queue: EventQueue[Executor, tuple[SimulatedRank | GpuKernels[SimulatedRank], int]] = (
            EventQueue(env, self, Executor._dispatch)
        )
        self._schedule = self._event_queue.schedule
        self.ranks: list[SimulatedRank] = []
        rendezvous: dict[tuple[str, int], Rendezvous] = {}
        self._first_sides: dict[tuple[str, int, int], tuple[SimulatedRank, int]] = {}
        self._is_recorded = any(program.recorded is not None for program in programs)
        self._slows_collectives = fabric is not None and fabric.slowdown > 1
        programs_by_id = {id(program): program for program in programs}
        payloads = {key: [op.work for op in program.program.ops] for key, program in programs_by_id.items()}
        for index, (number, program, seconds) in enumerate(zip(ranks, programs, kernel_seconds, strict=True)):
            groups = () if fabric is None else fabric.groups
            communicators = {name: self.fabric.communicator_of(name, number) for name in groups}
            pending, times = memory.allocate_rank(program)
            rank = SimulatedRank(
                number, program, payloads[id(program)], pending, communicators, seconds, env.now, times
            )
            on_busy_change = rank.transfers_in_flight.set_gpu_busy if self._slows_collectives else None
            rank.gpu = GpuKernels(
                slowdowns[index], rank, self._schedule, self._end, on_busy_change, self._interrupt_row,
                narrow_slowdowns[index] if narrow_slowdowns else None,
            )  # fmt: skip
            if allocators:
                rank.allocator = allocators[index].copy()
            self.ranks.append(rank)
            rank.join(rendezvous, communicators if program.recorded is None else program.recorded.groups)

    @property
    def fabric(self) -> Fabric:
        assert self._fabric is not None
        return self._fabric

    @property
    def offload(self) -> Offload:
        assert self._offload is not None
        return self._offload

    def run(self) -> float:
        """The time at which every op of every rank has ended. Raises StuckError if the clock stops before."""
        self.begin()
        self.env.run()
        return self.end()

    def begin(self) -> None:
        """Let every host issue ops until it blocks. The rest happens on the clock."""
        for rank in self.ranks:
            if rank.allocator is None and self.on_finish is None:  # which look at all ops that have ended
                rank.following = rank.program.following
        for rank in self.ranks:
            self._advance_host(rank)

    def end(self) -> float:
        """The time at which the last op of the ranks ended, after the clock has stopped. See `run`."""
        last = 0.0
        for rank in self.ranks:
            ended = np.asarray(rank.ended)
            if rank.next_op < rank.program.num_ops or np.isnan(ended).any():
                raise StuckError(rank.describe_wait())
            last = max(last, rank.host_time, float(ended.max(initial=0.0)))
            del rank.gpu  # which calls back: without it all of this goes with its last user
        return last

    # -- the host -----------------------------------------------------------------------------------

    def _advance_host(self, rank: SimulatedRank) -> None:
        """Issue ops until the host must block on one that has not ended."""
        program = rank.program
        if program.recorded is not None:
            self._advance_recorded_host(rank, program.recorded)
            return
        host_seconds, waits, pending = program.host_seconds, program.host_waits, rank.pending
        payloads, successors = rank.payloads, rank.successors
        start, ended, issue = rank.start, rank.ended, rank.issue
        time = rank.host_time
        op, num_ops = rank.next_op, program.num_ops
        allocator = rank.allocator
        now = self.env.now
        while op < num_ops:
            if allocator is not None and op in allocator.changes.changes_of_op:
                if op in allocator.changes.request_ops and time > now:  # what ends by then must be known
                    rank.next_op, rank.host_time = op, time
                    self._schedule(time - now, (rank, _HOST))
                    return
                wait_op = allocator.advance(op, time, ended)
                while wait_op >= 0:
                    end = ended[wait_op]
                    if end != end:
                        rank.next_op, rank.host_time, rank.blocked_on = op, time, wait_op
                        rank.is_in_allocator = True
                        return
                    rank.host_stalls.append((time, end, wait_op))
                    rank.allocator_stalls.append((time, end))
                    time = end
                    wait_op = allocator.advance(op, time, ended)
                driver_seconds = allocator.take_seconds()
                if driver_seconds > 0:
                    rank.allocator_stalls.append((time, time + driver_seconds))
                    time += driver_seconds
            for wait_op in waits[op]:
                end = ended[wait_op]
                if end != end:  # not ended yet
                    rank.next_op, rank.host_time, rank.blocked_on = op, time, wait_op
                    return
                if end > time:
                    rank.host_stalls.append((time, end, wait_op))
                    time = end
            time += host_seconds[op]
            issue[op] = time
            if pending[op] == 0:
                if payloads[op] is None:  # over as soon as the host is past it; what follows is issued later
                    start[op] = ended[op] = time
                    self._ops_left -= 1
                    for successor in successors[op]:
                        pending[successor] -= 1
                else:
                    delay = time - now
                    if delay > 0:
                        self._schedule(delay, (rank, op))
                    else:
                        self._start(rank, op, now)
            op += 1
        rank.next_op, rank.host_time = op, time
        if self._ops_left == 0:
            self._finish()

    def _advance_recorded_host(self, rank: SimulatedRank, recorded: RecordedTimes) -> None:
        """Make the recorded host's calls and issue ops, until the host must block on an op."""
        while rank.next_op < rank.program.num_ops:
            op = rank.next_op
            work = recorded.recorded_work[op]
            rank.blocked_on = rank.make_calls(work)
            if rank.blocked_on >= 0:
                return
            rank.host_time += work.host_seconds
            rank.issue[op] = rank.host_time
            rank.next_op += 1
            if work.is_on_host:
                rank.start[op] = rank.host_time
                rank.host_time += work.seconds
                rank.ended[op] = rank.host_time
                self._ops_left -= 1
            elif rank.pending[op] == 0:
                self._start_recorded(rank, op)
        if self._ops_left == 0:
            self._finish()

    def _dispatch(
        self, entries: list[tuple[SimulatedRank | GpuKernels[SimulatedRank], int]], now: float
    ) -> None:
        """Handle entries of the event queue that are due: an op of a rank starts (or its host goes on, or a
        recorded op ends), or a GPU wakes up with a ticket.
        """
        self.num_events += len(entries)
        for target, number in entries:
            if type(target) is GpuKernels:
                if number == target.ticket:
                    target.wake(now)
            elif number >= 0:
                self._start(target, number, now)  # type: ignore[arg-type]
            elif number == _HOST:
                self._advance_host(target)  # type: ignore[arg-type]
            else:
                op = _HOST - 1 - number
                self._end(target, op, target.recorded_end(op))  # type: ignore[arg-type, union-attr]

    # -- ops ----------------------------------------------------------------------------------------

    def _start(self, rank: SimulatedRank, op: int, now: float) -> None:
        if rank.ready is not None:
            self._run_recorded(rank, op, now)
            return
        rank.start[op] = now
        if rank.is_queued:
            self._release_next_in_queue(rank, op, now)
        seconds = rank.kernel_seconds[op]
        if seconds is not None:
            self._start_kernels(rank, op, now, seconds)
            return
        work = rank.payloads[op]
        if isinstance(work, Collective):
            self._arrive(rank, op, work)
        elif isinstance(work, PointToPoint):
            self._exchange_messages(rank, op, now)
        elif isinstance(work, OffloadWork):
            transfer = self.offload.transfer(work, rank.number, self.fabric)
            self.fabric.run(transfer, lambda: self._end(rank, op, self.env.now))
        else:
            self._end(rank, op, now)

    def _start_kernels(self, rank: SimulatedRank, op: int, now: float, seconds: float) -> None:
        """Start the kernels of an op, and those that follow in a row. See [Note: kernels in a row] of
        `zsim.devices.gpu`.
        """
        following, gpu = rank.following, rank.gpu
        if following is None or following[op] < 0 or not gpu.is_undisturbed:
            gpu.start(now, op, seconds)
            return
        issue, start, ended, num_issued = rank.issue, rank.start, rank.ended, rank.next_op
        row: list[int] = []
        end, last_seconds = now + seconds, seconds
        next_op = following[op]
        while 0 <= next_op < num_issued and issue[next_op] <= end:
            row.append(op)
            ended[op] = start[next_op] = end
            op, last_seconds = next_op, rank.kernel_seconds[next_op] or 0.0
            end += last_seconds
            next_op = following[op]
        if not row:
            gpu.start(now, op, seconds)
            return
        for follower in row[1:]:
            rank.pending[follower] = 0
        rank.pending[op] = 0
        queued_ops = rank.program.next_in_queue
        if queued_ops is not None and queued_ops[op] >= 0:  # which waits for the end of `op` too
            rank.pending[queued_ops[op]] -= 1
        rank.row = row
        self._ops_left -= len(row)
        self.num_events += len(row)
        delay = exact_delay(now, end)
        gpu.start_row(op, last_seconds, start[op], end - now if delay is None else delay)
        if delay is None:
            self._interrupt_row(rank, now)

    def _interrupt_row(self, rank: SimulatedRank, now: float) -> None:
        """Go on with the kernel of a row that runs now. Later ones start when earlier ones have ended."""
        row, start, ended = rank.row, rank.start, rank.ended
        number = bisect_right(row, now, key=ended.__getitem__)
        op = row[number]
        end = ended[op]
        self._ops_left += len(row) - number
        self.num_events -= len(row) - number + 1  # and the wake-up of the last
        ended[op] = math.nan
        assert rank.following is not None
        last, queued_ops = rank.following[row[-1]], rank.program.next_in_queue
        for later in (*row[number + 1 :], last):
            start[later] = ended[later] = math.nan
            rank.pending[later] = 1 if queued_ops is None else 2  # the second is its turn in the queue
        rank.pending[rank.following[op]] = 1
        if queued_ops is not None and queued_ops[last] >= 0:
            rank.pending[queued_ops[last]] += 1
        seconds = rank.kernel_seconds[op] or 0.0
        delay = seconds if start[op] == now else exact_delay(now, end)
        rank.gpu.resume_row(op, seconds, start[op], end - now if delay is None else delay)

    def _start_recorded(self, rank: SimulatedRank, op: int) -> None:
        """Start an issued op, whose waits are over, after its lag."""
        now = self.env.now
        self._schedule(max(rank.start_recorded(op) - now, 0.0), (rank, op))

    def _run_recorded(self, rank: SimulatedRank, op: int, now: float) -> None:
        recorded = rank.program.recorded
        assert recorded is not None
        work, call = recorded.recorded_work[op], recorded.calls[op]
        if call is not None or op in rank.program.sides:
            rank.gpu.begin_collective(now)
            self._exchange_messages(rank, op, now) if call is None else self._arrive(rank, op, call)
        elif recorded.shares_gpu and shares_gpu(work):
            rank.gpu.start(now, op, work.seconds)
        else:
            self._schedule(max(rank.start[op] + work.seconds - now, 0.0), (rank, _HOST - 1 - op))

    def _release_next_in_queue(self, rank: SimulatedRank, op: int, now: float) -> None:
        """Release the launch that is queued after this one.

        See [Note: one queue, several streams] of `zsim.plan.passes.hardware_queues`.
        """
        assert rank.program.next_in_queue is not None
        queued_op = rank.program.next_in_queue[op]
        if queued_op >= 0:
            rank.pending[queued_op] -= 1
            if rank.pending[queued_op] == 0 and queued_op < rank.next_op:  # issued already
                self._schedule(max(rank.issue[queued_op] - now, 0.0), (rank, queued_op))

    def _arrive(self, rank: SimulatedRank, op: int, work: Collective) -> None:
        """Start a collective once every simulated member of its communicator has arrived at the same call."""
        rendezvous = rank.rendezvous[work.group]
        if rendezvous.num_members > 1:
            call = rank.program.call_numbers[op]
            members = rendezvous.pending_collectives.get(call)
            if members is None:
                rendezvous.pending_collectives[call] = [(rank, op)]
                return
            members.append((rank, op))
            if len(members) < rendezvous.num_members:
                return
            del rendezvous.pending_collectives[call]
        else:
            members = [(rank, op)]
        transfer = rendezvous.transfers.get(id(work))
        if transfer is None:
            transfer = rendezvous.transfers[id(work)] = self.fabric.transfer(work, rendezvous.communicator)
        now, is_narrow = self.env.now, work.library is not None and not self._is_recorded
        for member, _ in () if self._is_recorded else members:  # a recorded one was under way since it came
            member.gpu.begin_collective(now, is_narrow=is_narrow)
        if is_narrow:  # its multiprocessors are its own: kernels take nothing from it
            self.fabric.run(transfer, partial(self._end_collective, members, is_narrow=True))
        else:
            self._start_transfer(transfer, members, partial(self._end_collective, members))

    def _start_transfer(
        self, transfer: Transfer, members: list[tuple[SimulatedRank, int]], on_end: Callable[[], None]
    ) -> None:
        """Run a transfer between `members`. Their kernels slow it, if kernels slow collectives."""
        if not self._slows_collectives:
            self.fabric.run(transfer, on_end)
            return
        busy = 0
        for member, _ in members:
            busy += member.gpu.is_busy
        transfer_in_flight = self.fabric.run(transfer, on_end, busy)
        transfer_in_flight.member_transfers = [member.transfers_in_flight.transfers for member, _ in members]
        for transfers in transfer_in_flight.member_transfers:
            transfers.append(transfer_in_flight)

    def _end_collective(self, members: list[tuple[SimulatedRank, int]], *, is_narrow: bool = False) -> None:
        self.num_events += len(members)
        now = self.env.now
        for rank, op in members:
            rank.gpu.end_collective(now, is_narrow=is_narrow)
            self._end(rank, op, now)

    def _exchange_messages(self, rank: SimulatedRank, op: int, now: float) -> None:
        """Start each message of a call once the other side has arrived too. See `zsim.plan.ops` [Note: who a
        message meets]. Copy engines and kernels take nothing from each other.
        """
        sides, work = rank.program.sides[op], rank.payloads[op]
        on_gpu = not (isinstance(work, PointToPoint) and work.by_copy_engine)
        rank.messages_left[op] = len(sides)
        for side in sides:
            communicator = self.fabric.pair_of(side.work.group, rank.number, is_sender=side.is_sent)
            message = side.work.group, communicator, side.number
            first_side = self._first_sides.pop(message, None)
            if first_side is None:
                self._first_sides[message] = rank, op
                continue
            members = [first_side, (rank, op)]
            for (member, number), (peer, peer_op) in zip(members, reversed(members), strict=True):
                member.peers.setdefault(number, []).append((peer.number, peer_op))
                if on_gpu and not self._is_recorded:  # a recorded call was under way since it came
                    member.gpu.begin_collective(now)
            transfer = self.fabric.transfer(side.work, communicator)
            on_end = partial(self._end_message, members, on_gpu)
            self._start_transfer(transfer, members, on_end) if on_gpu else self.fabric.run(transfer, on_end)

    def _end_message(self, members: list[tuple[SimulatedRank, int]], on_gpu: bool) -> None:
        self.num_events += len(members)
        now = self.env.now
        for rank, op in members:
            rank.messages_left[op] -= 1
            if on_gpu and not (self._is_recorded and rank.messages_left[op]):
                rank.gpu.end_collective(now)
            if not rank.messages_left[op]:
                del rank.messages_left[op]
                self._end(rank, op, now)

    def _end(self, rank: SimulatedRank, op: int, now: float) -> None:
        rank.ended[op] = now
        self._ops_left -= 1
        if rank.ready is not None:
            self._release_recorded_ops(rank, op, now, rank.ready)
            return
        pending = rank.pending
        for successor in rank.successors[op]:
            num_pending = pending[successor] - 1
            pending[successor] = num_pending
            if num_pending == 0 and successor < rank.next_op:  # issued already
                delay = rank.issue[successor] - now
                if delay > 0:
                    self._schedule(delay, (rank, successor))
                    continue
                seconds = rank.kernel_seconds[successor]
                if seconds is not None and not rank.is_queued:
                    rank.start[successor] = now
                    self._start_kernels(rank, successor, now, seconds)
                else:
                    self._start(rank, successor, now)
        if rank.blocked_on == op:
            rank.resume_host(op, now)
            self._advance_host(rank)
        elif self._ops_left == 0:
            self._finish()

    def _release_recorded_ops(self, rank: SimulatedRank, op: int, now: float, ready: list[float]) -> None:
        """Start the ops that waited only for a recorded rank's op, and resume its host."""
        for successor in rank.successors[op]:
            rank.pending[successor] -= 1
            ready[successor] = max(ready[successor], now)
            if rank.pending[successor] == 0 and successor < rank.next_op:
                self._start_recorded(rank, successor)
        if rank.blocked_on == op:
            rank.blocked_on = -1
            self._advance_host(rank)
        elif self._ops_left == 0:
            self._finish()

    def _finish(self) -> None:
        """Call `on_finish` after the last op has ended and hosts have finished their work after it."""
        if self.on_finish is not None:
            call, self.on_finish = self.on_finish, None
            delay = max(rank.host_time for rank in self.ranks) - self.env.now
            event = simpy.Timeout(self.env, max(delay, 0.0))
            event.callbacks = [lambda _event: call()]
