"""The executor: runs programs on simulated ranks.

A simulated rank stands for itself or for a class of equal ranks. Its host issues the ops in order, ahead of
the GPU, until it must block. An op starts when it is issued and everything that it waits for has ended. The
executor decides no policy: the plan has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import simpy

from zsim.devices.allocator import Allocator
from zsim.devices.gpu import GpuKernels
from zsim.engine.agenda import Agenda
from zsim.engine.lane import Lane, Meeting
from zsim.engine.lane_memory import LaneMemory
from zsim.engine.offload import Offload
from zsim.engine.priced_program import PricedProgram, RecordedTimes
from zsim.errors import StuckError
from zsim.fabric.communicators import Transfer
from zsim.fabric.fabric import Fabric
from zsim.plan.ops import Collective, OffloadWork, PointToPoint
from zsim.plan.recorded.alone import runs_on_gpu

_HOST = -1  # on the agenda, in place of an op: the host goes on


class Executor:
    """Runs one step: on each of `ranks` (all ranks, or one per class) its program.

    `kernel_seconds` are those of the programs on these ranks. `slowdowns` are the factors on their kernels
    while a collective runs. `allocators` are those of the ranks before the step. They are given if memory is
    short, so that the allocators delay the host. Recorded programs need no `offload`, and no `fabric` if they
    do not communicate. `on_finish` is called once, when the last op of all ranks has ended.
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
    ) -> None:
        self.env = env
        self._fabric = fabric
        self._offload = offload
        self.num_events = 0
        self.on_finish: Callable[[], None] | None = None
        self._left = sum(program.num_ops for program in programs)
        memory = LaneMemory(programs)
        self._agenda: Agenda[Executor, tuple[Lane | GpuKernels[Lane], int]] = Agenda(
            env, self, Executor._happen
        )
        self._call_at = self._agenda.put
        self.lanes: list[Lane] = []
        meetings: dict[tuple[str, int], Meeting] = {}
        self._sides: dict[tuple[str, int, int], tuple[Lane, int]] = {}  # come, and waiting for the other side
        self._is_recorded = any(program.recorded is not None for program in programs)
        self._slows_collectives = fabric is not None and fabric.slowdown > 1
        distinct = {id(program): program for program in programs}
        works = {key: [op.work for op in program.program.ops] for key, program in distinct.items()}
        for number, (rank, program, seconds) in enumerate(zip(ranks, programs, kernel_seconds, strict=True)):
            groups = () if fabric is None else fabric.groups
            communicators = {name: self.fabric.communicator_of(name, rank) for name in groups}
            pending, times = memory.of_next(program)
            lane = Lane(rank, program, works[id(program)], pending, communicators, seconds, env.now, times)
            turn = lane.flights.turn if self._slows_collectives else None
            lane.gpu = GpuKernels(slowdowns[number], lane, self._call_at, self._end, turn)
            if allocators:
                lane.allocator = allocators[number].copy()
            self.lanes.append(lane)
            lane.join(meetings, communicators if program.recorded is None else program.recorded.groups)

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
        for lane in self.lanes:
            self._advance_host(lane)

    def end(self) -> float:
        """The time at which the last op of the ranks ended, after the clock has stopped. See `run`."""
        last = 0.0
        for lane in self.lanes:
            ended = np.asarray(lane.ended)
            if lane.next_op < lane.program.num_ops or np.isnan(ended).any():
                raise StuckError(lane.who_waits())
            last = max(last, lane.host_time, float(ended.max(initial=0.0)))
            del lane.gpu  # which calls back: without it all of this goes with its last user
        return last

    # -- the host -----------------------------------------------------------------------------------

    def _advance_host(self, lane: Lane) -> None:
        """Issue ops until the host must block on one that has not ended."""
        program = lane.program
        if program.recorded is not None:
            self._advance_recorded_host(lane, program.recorded)
            return
        host_seconds, waits, pending = program.host_seconds, program.host_waits, lane.pending
        works, successors = lane.works, lane.successors
        start, ended, issue = lane.start, lane.ended, lane.issue
        time = lane.host_time
        op, num_ops = lane.next_op, program.num_ops
        allocator = lane.allocator
        now = self.env.now
        while op < num_ops:
            if allocator is not None and op in allocator.changes.by_op:
                if op in allocator.changes.asking and time > now:  # what ends by then must be known
                    lane.next_op, lane.host_time = op, time
                    self._call_at(now + (time - now), (lane, _HOST))
                    return
                wait = allocator.advance(op, time, ended)
                while wait >= 0:
                    end = ended[wait]
                    if end != end:
                        lane.next_op, lane.host_time, lane.blocked_on = op, time, wait
                        lane.is_in_allocator = True
                        return
                    lane.host_blocks.append((time, end, wait))
                    lane.allocator_blocks.append((time, end))
                    time = end
                    wait = allocator.advance(op, time, ended)
                asked = allocator.take_seconds()
                if asked > 0:
                    lane.allocator_blocks.append((time, time + asked))
                    time += asked
            for wait in waits[op]:
                end = ended[wait]
                if end != end:  # not ended yet
                    lane.next_op, lane.host_time, lane.blocked_on = op, time, wait
                    return
                if end > time:
                    lane.host_blocks.append((time, end, wait))
                    time = end
            time += host_seconds[op]
            issue[op] = time
            if pending[op] == 0:
                if works[op] is None:  # over as soon as the host is past it; what follows is issued later
                    start[op] = ended[op] = time
                    self._left -= 1
                    for successor in successors[op]:
                        pending[successor] -= 1
                else:
                    delay = time - now
                    if delay > 0:
                        self._call_at(now + delay, (lane, op))
                    else:
                        self._start(lane, op, now)
            op += 1
        lane.next_op, lane.host_time = op, time
        if self._left == 0:
            self._finish()

    def _advance_recorded_host(self, lane: Lane, recorded: RecordedTimes) -> None:
        """Make the recorded host's calls and issue ops, until the host must block on an op."""
        while lane.next_op < lane.program.num_ops:
            op = lane.next_op
            work = recorded.works[op]
            lane.blocked_on = lane.make_calls(work)
            if lane.blocked_on >= 0:
                return
            lane.host_time += work.host_seconds
            lane.issue[op] = lane.host_time
            lane.next_op += 1
            if work.is_on_host:
                lane.start[op] = lane.host_time
                lane.host_time += work.seconds
                lane.ended[op] = lane.host_time
                self._left -= 1
            elif lane.pending[op] == 0:
                self._start_recorded(lane, op)
        if self._left == 0:
            self._finish()

    def _happen(self, entries: list[tuple[Lane | GpuKernels[Lane], int]], now: float) -> None:
        """Handle entries of the event queue that are due: an op of a rank starts (or its host goes on, or a
        recorded op ends), or a GPU wakes up with a ticket.
        """
        self.num_events += len(entries)
        for what, number in entries:
            if type(what) is GpuKernels:
                if number == what.ticket:
                    what.on_wake(now)
            elif number >= 0:
                self._start(what, number, now)  # type: ignore[arg-type]
            elif number == _HOST:
                self._advance_host(what)  # type: ignore[arg-type]
            else:
                op = _HOST - 1 - number
                self._end(what, op, what.recorded_end(op))  # type: ignore[arg-type, union-attr]

    # -- ops ----------------------------------------------------------------------------------------

    def _start(self, lane: Lane, op: int, now: float) -> None:
        if lane.ready is not None:
            self._run_recorded(lane, op, now)
            return
        lane.start[op] = now
        if lane.is_queued:
            self._leave_queue(lane, op, now)
        seconds = lane.kernel_seconds[op]
        if seconds is not None:
            lane.gpu.start(now, op, seconds)
            return
        work = lane.works[op]
        if isinstance(work, Collective):
            self._arrive(lane, op, work)
        elif isinstance(work, PointToPoint):
            self._exchange(lane, op, now)
        elif isinstance(work, OffloadWork):
            transfer = self.offload.transfer(work, lane.rank, self.fabric)
            self.fabric.run(transfer, lambda: self._end(lane, op, self.env.now))
        else:
            self._end(lane, op, now)

    def _start_recorded(self, lane: Lane, op: int) -> None:
        """Start an issued op, whose waits are over, after its lag."""
        now = self.env.now
        self._call_at(now + max(lane.start_recorded(op) - now, 0.0), (lane, op))

    def _run_recorded(self, lane: Lane, op: int, now: float) -> None:
        recorded = lane.program.recorded
        assert recorded is not None
        work, call = recorded.works[op], recorded.calls[op]
        if call is not None or op in lane.program.sides:
            lane.gpu.collective_started(now)
            self._exchange(lane, op, now) if call is None else self._arrive(lane, op, call)
        elif recorded.shares_gpu and runs_on_gpu(work):
            lane.gpu.start(now, op, work.seconds)
        else:
            self._call_at(now + max(lane.start[op] + work.seconds - now, 0.0), (lane, _HOST - 1 - op))

    def _leave_queue(self, lane: Lane, op: int, now: float) -> None:
        """Release the launch that is queued after this one. See `zsim.plan.passes.queues` [Note: one queue,
        several streams].
        """
        assert lane.program.behind is not None
        held = lane.program.behind[op]
        if held >= 0:
            lane.pending[held] -= 1
            if lane.pending[held] == 0 and held < lane.next_op:  # issued already
                self._call_at(now + max(lane.issue[held] - now, 0.0), (lane, held))

    def _arrive(self, lane: Lane, op: int, work: Collective) -> None:
        """Start a collective once every simulated member of its communicator has arrived at the same call."""
        meeting = lane.meetings[work.group]
        if meeting.num_members > 1:
            call = lane.program.meetings[op]
            arrived = meeting.arrived.get(call)
            if arrived is None:
                meeting.arrived[call] = [(lane, op)]
                return
            arrived.append((lane, op))
            if len(arrived) < meeting.num_members:
                return
            del meeting.arrived[call]
        else:
            arrived = [(lane, op)]
        transfer = meeting.transfers.get(id(work))
        if transfer is None:
            transfer = meeting.transfers[id(work)] = self.fabric.transfer(work, meeting.communicator)
        now = self.env.now
        for member, _ in () if self._is_recorded else arrived:  # a recorded one was under way since it came
            member.gpu.collective_started(now)
        self._fly(transfer, arrived, partial(self._end_collective, arrived))

    def _fly(self, transfer: Transfer, members: list[tuple[Lane, int]], on_end: Callable[[], None]) -> None:
        """Run a transfer between `members`. Their kernels slow it, if kernels slow collectives."""
        if not self._slows_collectives:
            self.fabric.run(transfer, on_end)
            return
        busy = 0
        for member, _ in members:
            busy += member.gpu.is_busy
        flight = self.fabric.run(transfer, on_end, busy)
        flight.under_way = [member.flights.under_way for member, _ in members]
        for flights in flight.under_way:
            flights.append(flight)

    def _end_collective(self, members: list[tuple[Lane, int]]) -> None:
        self.num_events += len(members)
        now = self.env.now
        for lane, op in members:
            lane.gpu.collective_ended(now)
            self._end(lane, op, now)

    def _exchange(self, lane: Lane, op: int, now: float) -> None:
        """Start each message of a call once the other side has arrived too. See `zsim.plan.ops` [Note: who a
        message meets]. Copy engines and kernels take nothing from each other.
        """
        sides, work = lane.program.sides[op], lane.works[op]
        on_gpu = not (isinstance(work, PointToPoint) and work.by_copy_engine)
        lane.messages_left[op] = len(sides)
        for side in sides:
            communicator = self.fabric.pair_of(side.work.group, lane.rank, is_sender=side.is_sent)
            message = side.work.group, communicator, side.number
            other = self._sides.pop(message, None)
            if other is None:
                self._sides[message] = lane, op
                continue
            both = [other, (lane, op)]
            for (member, number), (peer, peers_op) in zip(both, reversed(both), strict=True):
                member.peers.setdefault(number, []).append((peer.rank, peers_op))
                if on_gpu and not self._is_recorded:  # a recorded call was under way since it came
                    member.gpu.collective_started(now)
            transfer = self.fabric.transfer(side.work, communicator)
            on_end = partial(self._end_message, both, on_gpu)
            self._fly(transfer, both, on_end) if on_gpu else self.fabric.run(transfer, on_end)

    def _end_message(self, both: list[tuple[Lane, int]], on_gpu: bool) -> None:
        self.num_events += len(both)
        now = self.env.now
        for lane, op in both:
            lane.messages_left[op] -= 1
            if on_gpu and not (self._is_recorded and lane.messages_left[op]):
                lane.gpu.collective_ended(now)
            if not lane.messages_left[op]:
                del lane.messages_left[op]
                self._end(lane, op, now)

    def _end(self, lane: Lane, op: int, now: float) -> None:
        lane.ended[op] = now
        self._left -= 1
        if lane.ready is not None:
            self._let_recorded_go(lane, op, now, lane.ready)
            return
        pending = lane.pending
        for successor in lane.successors[op]:
            left = pending[successor] - 1
            pending[successor] = left
            if left == 0 and successor < lane.next_op:  # issued already
                delay = lane.issue[successor] - now
                if delay > 0:
                    self._call_at(now + delay, (lane, successor))
                    continue
                seconds = lane.kernel_seconds[successor]
                if seconds is not None and not lane.is_queued:
                    lane.start[successor] = now
                    lane.gpu.start(now, successor, seconds)
                else:
                    self._start(lane, successor, now)
        if lane.blocked_on == op:
            lane.go_on(op, now)
            self._advance_host(lane)
        elif self._left == 0:
            self._finish()

    def _let_recorded_go(self, lane: Lane, op: int, now: float, ready: list[float]) -> None:
        """Start the ops that waited only for a recorded rank's op, and resume its host."""
        for successor in lane.successors[op]:
            lane.pending[successor] -= 1
            ready[successor] = max(ready[successor], now)
            if lane.pending[successor] == 0 and successor < lane.next_op:
                self._start_recorded(lane, successor)
        if lane.blocked_on == op:
            lane.blocked_on = -1
            self._advance_host(lane)
        elif self._left == 0:
            self._finish()

    def _finish(self) -> None:
        """Call `on_finish` after the last op has ended and hosts have finished their work after it."""
        if self.on_finish is not None:
            call, self.on_finish = self.on_finish, None
            delay = max(lane.host_time for lane in self.lanes) - self.env.now
            event = simpy.Timeout(self.env, max(delay, 0.0))
            event.callbacks = [lambda _event: call()]
