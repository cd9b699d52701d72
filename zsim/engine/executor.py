"""Running programs on simulated ranks.

A lane is one simulated rank (or the representative of a class of equal ranks). Its host walks the ops in
order, ahead of the GPU, until it must block; an op starts when it is issued and everything it waits for
has ended. Nothing here decides policy: the plan did.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from functools import partial

import simpy

from zsim.devices.allocator import Allocator
from zsim.devices.gpu import GpuKernels
from zsim.engine.beside import Flights, landed, num_busy, took_off
from zsim.engine.offload import Offload
from zsim.engine.priced_program import PricedProgram
from zsim.errors import StuckError
from zsim.fabric.communicators import Transfer
from zsim.fabric.fabric import Fabric
from zsim.fabric.flight import Flight
from zsim.plan.ops import Collective, OffloadWork, PointToPoint, Work

_HOST = -1  # on the agenda, in place of an op: the host goes on


class Lane:
    """One simulated rank: where its host is, and when each op was issued, started and ended."""

    __slots__ = (
        "allocator", "allocator_blocks", "began", "blocked_on", "ended", "flights", "gpu", "host_blocks",
        "host_time", "instances", "is_in_allocator", "issue", "kernel_seconds", "messages_left", "next_op",
        "peers", "pending", "program", "rank", "start", "successors", "works",
    )  # fmt: skip

    def __init__(
        self,
        rank: int,
        program: PricedProgram,
        works: Sequence[Work | None],
        instances: dict[str, int],
        kernel_seconds: Sequence[float | None],
        began: float,
    ) -> None:
        self.rank = rank
        self.program = program
        self.works = works
        self.successors = program.successors
        self.began = began
        self.kernel_seconds = kernel_seconds
        self.instances = instances  # which instance of each group it belongs to
        self.pending = list(program.pending)
        nan = array("d", [math.nan]) * program.num_ops
        self.issue, self.start, self.ended = nan[:], nan[:], nan[:]
        self.next_op = 0
        self.host_time = began
        self.blocked_on = -1
        self.is_in_allocator = False  # what it is blocked on, its allocator waits for
        self.allocator: Allocator | None = None
        self.host_blocks: list[tuple[float, float, int]] = []
        self.allocator_blocks: list[tuple[float, float]] = []  # the host's time in an allocator that is short
        self.flights = Flights()
        self.messages_left: dict[int, int] = {}  # by op: its messages that are not over
        self.peers: dict[int, list[tuple[Lane, int]]] = {}  # by op: the calls that its messages met
        self.gpu: GpuKernels


class Executor:
    """Runs one step: on each of `ranks` (all of them, or one per class) its program.

    `kernel_seconds` are the programs' on these ranks. `allocators` are the ranks' before the step, where
    memory is short, so that they hold the host up. `on_finish` is called once, when the last op of all lanes
    has ended.
    """

    def __init__(
        self,
        env: simpy.Environment,
        programs: Sequence[PricedProgram],
        fabric: Fabric,
        ranks: Sequence[int],
        kernel_seconds: Sequence[Sequence[float | None]],
        slowdown: float,
        offload: Offload,
        allocators: Sequence[Allocator] = (),
    ) -> None:
        self.env = env
        self.fabric = fabric
        self.offload = offload
        self.num_events = 0
        self.on_finish: Callable[[], None] | None = None
        self._left = sum(program.num_ops for program in programs)
        self._agenda: dict[float, list[tuple[Lane | GpuKernels, int]]] = {}
        self._arrived: dict[tuple[int, int], list[tuple[Lane, int]]] = {}
        self.lanes: list[Lane] = []
        self._members: dict[tuple[str, int], int] = {}
        self._sides: dict[tuple[str, int, int], tuple[Lane, int]] = {}  # come, and waiting for the other side
        self._slows_collectives = fabric.slowdown > 1
        works = {id(program): [op.work for op in program.program.ops] for program in programs}
        for number, (rank, program, seconds) in enumerate(zip(ranks, programs, kernel_seconds, strict=True)):
            instances = {name: fabric.instance_of(name, rank) for name in fabric.groups}
            lane = Lane(rank, program, works[id(program)], instances, seconds, env.now)
            turn = lane.flights.turn if self._slows_collectives else None
            lane.gpu = GpuKernels(slowdown, self._call_at, partial(self._end, lane), turn)
            if allocators:
                lane.allocator = allocators[number].copy()
            self.lanes.append(lane)
            for key in instances.items():
                self._members[key] = self._members.get(key, 0) + 1

    def run(self) -> float:
        """The time at which every op of every lane has ended.

        Raises StuckError when the clock stops with work left.
        """
        self.begin()
        self.env.run()
        return self.end()

    def begin(self) -> None:
        """Let every host issue what it can; the rest happens on the clock."""
        for lane in self.lanes:
            self._advance_host(lane)

    def end(self) -> float:
        """When the last op of the lanes ended, once the clock has stopped; see `run`."""
        last = 0.0
        for lane in self.lanes:
            if lane.next_op < lane.program.num_ops or any(map(math.isnan, lane.ended)):
                raise StuckError(self._who_waits(lane))
            last = max(last, lane.host_time, max(lane.ended, default=0.0))
            del lane.gpu  # which calls back: without it all of this goes with its last user
        return last

    # -- the host -----------------------------------------------------------------------------------

    def _advance_host(self, lane: Lane) -> None:
        """Issue ops until the host must block on one that has not ended."""
        program = lane.program
        host_seconds, waits, pending = program.host_seconds, program.host_waits, lane.pending
        works, successors = lane.works, lane.successors
        ended, issue = lane.ended, lane.issue
        time = lane.host_time
        op, num_ops = lane.next_op, program.num_ops
        allocator = lane.allocator
        while op < num_ops:
            if allocator is not None and op in allocator.changes.by_op:
                if op in allocator.changes.asking and time > self.env.now:  # what ends by then must be known
                    lane.next_op, lane.host_time = op, time
                    self._call_at(time - self.env.now, lane, _HOST)
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
                    lane.start[op] = ended[op] = time
                    self._left -= 1
                    for successor in successors[op]:
                        pending[successor] -= 1
                else:
                    delay = time - self.env.now
                    if delay > 0:
                        self._call_at(delay, lane, op)
                    else:
                        self._start(lane, op)
            op += 1
        lane.next_op, lane.host_time = op, time
        if self._left == 0:
            self._finish()

    # -- the agenda: one simpy event for all that happens at one instant ------------------------------

    def _call_at(self, delay: float, what: Lane | GpuKernels, number: int) -> None:
        """After `delay`, start op `number` of a lane (or let its host go on), or wake a GPU with ticket
        `number`."""
        time = self.env.now + delay
        entries = self._agenda.get(time)
        if entries is None:
            self._agenda[time] = [(what, number)]
            event = simpy.Timeout(self.env, delay)
            event.callbacks = [self._fire]
        else:
            entries.append((what, number))

    def _fire(self, _event: simpy.Event) -> None:
        now = self.env.now
        entries = self._agenda.pop(now)
        self.num_events += len(entries)
        for what, number in entries:
            if type(what) is GpuKernels:
                what.on_wake(now, number)
            elif number == _HOST:
                self._advance_host(what)  # type: ignore[arg-type]
            else:
                self._start(what, number)  # type: ignore[arg-type]

    # -- ops ----------------------------------------------------------------------------------------

    def _start(self, lane: Lane, op: int) -> None:
        now = self.env.now
        lane.start[op] = now
        if lane.program.behind is not None:
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

    def _leave_queue(self, lane: Lane, op: int, now: float) -> None:
        """Let the launch behind this one go; `zsim.plan.passes.queues` [Note: one queue, several streams]."""
        assert lane.program.behind is not None
        held = lane.program.behind[op]
        if held >= 0:
            lane.pending[held] -= 1
            if lane.pending[held] == 0 and held < lane.next_op:  # issued already
                self._call_at(max(lane.issue[held] - now, 0.0), lane, held)

    def _arrive(self, lane: Lane, op: int, work: Collective) -> None:
        """A collective starts when every simulated member of its communicator has come to the same call."""
        instance = lane.instances[work.group]
        call = lane.program.meetings[op], instance
        arrived = self._arrived.get(call)
        if arrived is None:
            arrived = self._arrived[call] = []
        arrived.append((lane, op))
        if len(arrived) < self._members[work.group, instance]:
            return
        del self._arrived[call]
        transfer = self.fabric.transfer(work, instance)
        now = self.env.now
        for member, _ in arrived:
            member.gpu.collective_started(now)
        self._fly(transfer, arrived, lambda: self._end_collective(arrived))

    def _fly(self, transfer: Transfer, members: list[tuple[Lane, int]], on_end: Callable[[], None]) -> None:
        """Run a transfer between `members`, whose kernels slow it where kernels do."""
        if not self._slows_collectives:
            self.fabric.run(transfer, on_end)
            return
        flights = [member.flights for member, _ in members]

        def end() -> None:
            nonlocal flight
            assert flight is not None
            landed(flight, flights)
            flight = None  # which calls this
            on_end()

        flight: Flight | None = self.fabric.run(transfer, end, num_busy(member.gpu for member, _ in members))
        took_off(flight, flights)

    def _end_collective(self, members: list[tuple[Lane, int]]) -> None:
        self.num_events += len(members)
        now = self.env.now
        for lane, op in members:
            lane.gpu.collective_ended(now)
            self._end(lane, op, now)

    def _exchange(self, lane: Lane, op: int, now: float) -> None:
        """Each message of a call moves once the other side has come to it too; see
        `zsim.plan.ops` [Note: who a message meets]."""
        sides = lane.program.sides[op]
        lane.messages_left[op] = len(sides)
        for side in sides:
            instance = self.fabric.pair_of(side.work.group, lane.rank, is_sender=side.is_sent)
            message = side.work.group, instance, side.number
            other = self._sides.pop(message, None)
            if other is None:
                self._sides[message] = lane, op
                continue
            both = [other, (lane, op)]
            for (member, number), peer in zip(both, reversed(both), strict=True):
                member.peers.setdefault(number, []).append(peer)
                member.gpu.collective_started(now)
            transfer = self.fabric.transfer(side.work, instance)
            self._fly(transfer, both, partial(self._end_message, both))

    def _end_message(self, both: list[tuple[Lane, int]]) -> None:
        self.num_events += len(both)
        now = self.env.now
        for lane, op in both:
            lane.gpu.collective_ended(now)
            lane.messages_left[op] -= 1
            if not lane.messages_left[op]:
                del lane.messages_left[op]
                self._end(lane, op, now)

    def _end(self, lane: Lane, op: int, now: float) -> None:
        lane.ended[op] = now
        self._left -= 1
        pending, is_queued = lane.pending, lane.program.behind is not None
        for successor in lane.successors[op]:
            left = pending[successor] - 1
            pending[successor] = left
            if left == 0 and successor < lane.next_op:  # issued already
                delay = lane.issue[successor] - now
                seconds = lane.kernel_seconds[successor]
                if delay > 0:
                    self._call_at(delay, lane, successor)
                elif seconds is not None and not is_queued:
                    lane.start[successor] = now
                    lane.gpu.start(now, successor, seconds)
                else:
                    self._start(lane, successor)
        if lane.blocked_on == op:
            lane.host_blocks.append((lane.host_time, max(now, lane.host_time), op))
            if lane.is_in_allocator:
                lane.allocator_blocks.append((lane.host_time, max(now, lane.host_time)))
                lane.is_in_allocator = False
            lane.host_time = max(lane.host_time, now)
            lane.blocked_on = -1
            self._advance_host(lane)
        elif self._left == 0:
            self._finish()

    def _finish(self) -> None:
        """The last op has ended; hosts may still be busy with what comes after it."""
        if self.on_finish is not None:
            call, self.on_finish = self.on_finish, None
            delay = max(lane.host_time for lane in self.lanes) - self.env.now
            event = simpy.Timeout(self.env, max(delay, 0.0))
            event.callbacks = [lambda _event: call()]

    # -- what went wrong ----------------------------------------------------------------------------

    def _who_waits(self, lane: Lane) -> str:
        ops = lane.program.program.ops
        if lane.blocked_on >= 0:
            return (
                f"rank {lane.rank}: the host waits for '{ops[lane.blocked_on].name}' before it can issue "
                f"'{ops[lane.next_op].name}', and nothing is left that could end it"
            )
        for number, op in enumerate(ops):
            if math.isnan(lane.ended[number]):
                state = "never ends" if not math.isnan(lane.start[number]) else "never starts"
                return f"rank {lane.rank}: '{op.name}' on stream {op.stream} {state}"
        return f"rank {lane.rank}: stopped before the end of its program"
