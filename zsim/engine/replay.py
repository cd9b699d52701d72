"""Running recorded programs again: each rank's own ops and seconds, collectives together.

Kernels take what they took, so nothing is shared here but the links: a collective that meets others begins
when every replayed rank of its group has reached it, and takes what the fabric needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import simpy

from zsim.devices.gpu import GpuKernels
from zsim.engine.beside import Flights, landed, num_busy, took_off
from zsim.errors import StuckError
from zsim.fabric.flight import Flight
from zsim.plan.recorded.alone import runs_on_gpu
from zsim.plan.recorded.replay_ops import HostWait, ReplayOp, ReplayPlan
from zsim.trace.trace import SpanInfo, Trace

OnEnd = Callable[[], None]
# op, a rank of the group, on how many of its GPUs kernels run
RunCollective = Callable[[ReplayOp, int, OnEnd, int], Flight]


class ReplayLane:
    """One rank: where its host is, and when each op was issued, started and ended.

    The clock starts `zero` seconds before the first rank's step: hosts and streams may be at work before it.
    """

    def __init__(self, plan: ReplayPlan, zero: float) -> None:
        count = len(plan.ops)
        self.plan = plan
        self.pending = [0] * count
        self.successors: list[list[int]] = [[] for _ in range(count)]
        self.issue, self.start, self.end = [math.nan] * count, [math.nan] * count, [math.nan] * count
        self.ready = [-math.inf] * count  # when all that an op waited for so far was over
        self.next_op, self.next_wait, self.blocked_on = 0, 0, -1
        self.host_time = plan.host_begin + zero
        self.host_blocks: list[tuple[float, float, SpanInfo]] = []
        self.gpu: GpuKernels | None = None
        self.flights = Flights()
        self.first, self.begin = 0, plan.begin + zero  # of the step that counts
        last: dict[str, int] = {}
        for number, op in enumerate(plan.ops):
            if op.is_on_host:
                continue
            before = set(op.after)
            if op.stream in last:
                before.add(last[op.stream])
            else:
                self.ready[number] = plan.stream_begins.get(op.stream, 0.0) + zero
            last[op.stream] = number
            for other in before:
                self.successors[other].append(number)
            self.pending[number] = len(before)

    def wait(self, wait: HostWait) -> None:
        """The host works and then is blocked; what it waits for is over at a time that is known."""
        began = self.host_time + wait.seconds
        over = began if wait.op is None else max(began, self.end[wait.op])
        self.host_time = max(began, over + wait.own_seconds)
        if self.host_time > began and wait.info is not None:
            self.host_blocks.append((began, self.host_time, wait.info))

    def in_allocator(self) -> Iterator[tuple[float, float]]:
        """When the host was in torch's allocator; what it waits for there may take another time now."""
        before = self.begin
        for op, issue in zip(self.plan.ops[self.first :], self.issue[self.first :], strict=True):
            for since, until in op.in_allocator:
                if issue - until > before + since:
                    yield before + since, issue - until
            before = issue

    @property
    def step_seconds(self) -> float:
        """Of the step that counts; of two the second, which shows what the host did after the first."""
        last = max(self.end[self.first :], default=0.0)
        return (last if self.first else max(last, self.host_time)) - self.begin


class Replayer:
    """Runs lanes on one clock. `instance_of(group, rank)` tells which of a group's instances a rank is in;
    `run_collective` takes a collective from the moment all are there to its end; where it is modelled it
    tells as what, so that kernels slow it down. With a `slowdown`, kernels' seconds are what they take alone,
    and they share the GPU with each other and with collectives."""

    def __init__(
        self,
        env: simpy.Environment,
        plans: Mapping[int, ReplayPlan],
        instance_of: Callable[[str, int], Hashable],
        run_collective: RunCollective,
        slowdown: float | None = None,
    ) -> None:
        self.env = env
        self.num_events = 0
        begins = [
            begin for plan in plans.values() for begin in (plan.host_begin, *plan.stream_begins.values())
        ]
        self.zero = -min([0.0, *begins])
        self.lanes = {rank: ReplayLane(plan, self.zero) for rank, plan in plans.items()}
        for lane in self.lanes.values() if slowdown is not None else ():
            lane.gpu = GpuKernels(slowdown or 1.0, self._wake, partial(self._end, lane), lane.flights.turn)
        self._instance_of = instance_of
        self._run_collective = run_collective
        self._members: dict[Hashable, int] = {}
        self._arrived: dict[Hashable, list[tuple[ReplayLane, int]]] = {}
        for rank, plan in plans.items():
            for name in dict.fromkeys(op.meeting[0] for op in plan.ops if op.meeting is not None):
                key = name, instance_of(name, rank)
                self._members[key] = self._members.get(key, 0) + 1

    def run(self, num_steps: int = 1) -> dict[int, float]:
        """Seconds of each rank's last step, where the plans are `num_steps` of them.

        Raises StuckError when the clock stops with work left.
        """
        for lane in self.lanes.values():
            self._advance_host(lane)
        self.env.run()
        for lane in self.lanes.values():
            if lane.next_op <= len(lane.plan.ops) or any(map(math.isnan, lane.end)):
                raise StuckError(_who_waits(lane))
            lane.first = len(lane.plan.ops) * (num_steps - 1) // num_steps
            if lane.first:
                lane.begin = max(lane.end[: lane.first])
        return {rank: lane.step_seconds for rank, lane in self.lanes.items()}

    def _advance_host(self, lane: ReplayLane) -> None:
        """Issue ops until the host must wait for one; what comes last is the step's tail."""
        ops = lane.plan.ops
        while lane.next_op <= len(ops):
            number = lane.next_op
            is_tail = number == len(ops)
            waits = lane.plan.tail_waits if is_tail else ops[number].host_waits
            while lane.next_wait < len(waits):
                wait = waits[lane.next_wait]
                if wait.op is not None and math.isnan(lane.end[wait.op]):
                    lane.blocked_on = wait.op
                    return
                lane.next_wait += 1
                lane.wait(wait)
            lane.next_wait = 0
            lane.host_time += lane.plan.tail_seconds if is_tail else ops[number].host_seconds
            lane.next_op += 1
            if not is_tail:
                self._issue(lane, number)

    def _issue(self, lane: ReplayLane, number: int) -> None:
        op = lane.plan.ops[number]
        lane.issue[number] = lane.host_time
        if op.is_on_host:
            lane.start[number] = lane.host_time
            lane.host_time += op.seconds
            lane.end[number] = lane.host_time
        elif lane.pending[number] == 0:
            self._start_when_ready(lane, number)

    def _start_when_ready(self, lane: ReplayLane, number: int) -> None:
        """Start an op that is issued, and all that it waits for is over, its lag later."""
        time = max(lane.issue[number], lane.ready[number]) + lane.plan.ops[number].lag_seconds
        lane.start[number] = time
        self._call_at(time, lambda: self._start(lane, number))

    def _call_at(self, time: float, call: OnEnd) -> None:
        self.num_events += 1
        event = simpy.Timeout(self.env, max(time - self.env.now, 0.0))
        event.callbacks = [lambda _event: call()]

    def _start(self, lane: ReplayLane, number: int) -> None:
        op = lane.plan.ops[number]
        if lane.gpu is not None and runs_on_gpu(op):
            lane.gpu.start(self.env.now, number, op.seconds)
            return
        if lane.gpu is not None and op.meeting is not None:
            lane.gpu.collective_started(self.env.now)
        if op.meeting is None:
            end = lane.start[number] + op.seconds
            self._call_at(end, lambda: self._end(lane, number, end))
            return
        key = op.meeting[0], self._instance_of(op.meeting[0], lane.plan.rank)
        arrived = self._arrived.setdefault((key, op.meeting[1]), [])
        arrived.append((lane, number))
        if len(arrived) < self._members[key]:
            return
        del self._arrived[key, op.meeting[1]]

        flights = [other.flights for other, _ in arrived]

        def end_all() -> None:
            landed(flight, flights)
            for other, index in arrived:
                if other.gpu is not None:
                    other.gpu.collective_ended(self.env.now)
                self._end(other, index, self.env.now)

        busy = num_busy(other.gpu for other, _ in arrived)
        flight = self._run_collective(op, lane.plan.rank, end_all, busy)
        took_off(flight, flights)

    def _wake(self, delay: float, gpu: GpuKernels, ticket: int) -> None:
        self._call_at(self.env.now + delay, lambda: gpu.on_wake(self.env.now, ticket))

    def _end(self, lane: ReplayLane, number: int, time: float) -> None:
        lane.end[number] = time
        for successor in lane.successors[number]:
            lane.pending[successor] -= 1
            lane.ready[successor] = max(lane.ready[successor], time)
            if lane.pending[successor] == 0 and successor < lane.next_op:
                self._start_when_ready(lane, successor)
        if lane.blocked_on == number:
            lane.blocked_on = -1
            self._advance_host(lane)

    # -- what happened ------------------------------------------------------------------------------

    def trace(self, like: Trace, seconds: Mapping[int, float]) -> Trace:
        """The replayed step as a trace, with the metadata of the recorded one."""
        index_of: dict[SpanInfo, int] = {}
        rows: list[tuple[int, int, float, float, float]] = []
        blocks: list[tuple[int, float, float, SpanInfo]] = []
        zero = min(lane.begin for lane in self.lanes.values())
        in_allocator: list[tuple[int, float, float]] = []
        for rank, lane in self.lanes.items():
            in_allocator += [
                (rank, max(start - zero, 0.0), end - zero) for start, end in lane.in_allocator() if end > zero
            ]
            indices = [index_of.setdefault(op.info, len(index_of)) for op in lane.plan.ops]
            issues = zip(lane.plan.ops, lane.issue, strict=True)
            issued = [time if op.is_issue_known else math.nan for op, time in issues]
            columns = zip(indices, issued, lane.start, lane.end, strict=True)
            rows += [(rank, *row) for row in list(columns)[lane.first :]]
            blocks += [
                (rank, max(start - zero, 0.0), end - zero, info)
                for start, end, info in lane.host_blocks
                if end > zero
            ]
        host_blocks = tuple(
            (rank, start, end, index_of.setdefault(info, len(index_of))) for rank, start, end, info in blocks
        )
        table = np.array(rows, dtype=np.float64).reshape(-1, 5)
        times = table[:, 2:] - zero
        return replace(
            like,
            source="simulated",
            infos=tuple(index_of),
            ranks=table[:, 0].astype(np.int64),
            info_indices=table[:, 1].astype(np.int64),
            issue_seconds=times[:, 0],
            start_seconds=times[:, 1],
            end_seconds=times[:, 2],
            step_seconds=max(seconds.values()),
            memory=None,
            host_blocks=host_blocks,
            allocator_blocks=tuple(in_allocator),
            begins={rank: lane.begin - zero for rank, lane in self.lanes.items() if lane.begin > zero},
            steps=(),
            step_numbers=None,
            transfer_seconds=None,
            follows_wait=None,
        )


def _who_waits(lane: ReplayLane) -> str:
    ops = lane.plan.ops
    for number, end in enumerate(lane.end):
        if math.isnan(end):
            state = "never starts" if math.isnan(lane.start[number]) else "never ends"
            return f"rank {lane.plan.rank}: '{ops[number].info.name}' on stream {ops[number].stream} {state}"
    return f"rank {lane.plan.rank}: its host never gets to the end of the step"
