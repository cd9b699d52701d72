"""Builder of a host program: ops in issue order, CUDA streams and events, memory changes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import NamedTuple

from zsim.cost.kernels.kernel import Kernel
from zsim.dtypes import DTYPE_BYTES
from zsim.plan.actions import Action
from zsim.plan.columns import UnrolledChanges
from zsim.plan.ops import (
    ActionRepeat,
    Category,
    Collective,
    CollectiveKind,
    Copy,
    Device,
    Group,
    Kernels,
    Memory,
    MemoryChange,
    Message,
    Op,
    Phase,
    Plan,
    PointToPoint,
    Program,
    SplitSizes,
    UnrolledOps,
    Work,
)

COMPUTE = "compute"


def move_kernels(read_bytes: float, written_bytes: float, launches: int = 1) -> tuple[Kernel, ...]:
    """Copies, casts or additions on the GPU: `launches` kernels that read and write so many bytes in all."""
    return (Kernel("copy", 0.0, float(read_bytes + written_bytes), launches=launches),)


class BuilderState(NamedTuple):
    """All that later ops depend on, whenever the ops were issued that they refer to."""

    pattern: Hashable
    """The phase, and for each place that refers to an op a number, which is equal where the op is."""
    ops: tuple[int, ...]
    """The op of each number."""


class ActionBody(NamedTuple):
    """The ops and changes of an action that was walked, and the places of the builder that referred to ops
    after it. Ops from before it are among `ops_before`.
    """

    source: ActionRepeat
    ops_before: tuple[int, ...]
    phase: Phase
    last_op_of_stream: dict[str, int]
    last_op_of_group: dict[str, int]
    waits: dict[str, tuple[int, ...]]
    host_waits: tuple[int, ...]


class PlanBuilder:
    """Collects ops and memory changes. It has one method for each host action.

    Events are op numbers: `record(stream)` is cudaEventRecord, `stream_wait` cudaStreamWaitEvent, `host_wait`
    cudaEventSynchronize. Ops of equal work share one `Work` object, so it is priced once.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = {group.name: group for group in groups}
        self.ops: list[Op] = []
        self.memory: list[MemoryChange] = []
        self.notes: list[str] = []
        self.actions: list[tuple[int, Action]] = []
        self._repeats: list[tuple[ActionRepeat, dict[int, int]]] = []
        self.phase: Phase = "forward"
        self.micro_batch = -1  # the one in forward or backward; -1 in the rest of the step
        self._last_op_of_stream: dict[str, int] = {}
        self._last_op_of_group: dict[str, int] = {}
        self._waits: dict[str, list[int]] = {}
        self._host_waits: list[int] = []
        self._kernels: dict[tuple[Kernel, ...], Kernels] = {}
        self._copies: dict[tuple[float, int], Kernels] = {}
        self._collectives: dict[tuple[str, int, str, str], Collective] = {}

    def state(self) -> tuple[object, ...]:
        """All that later ops depend on, with ops counted from the next one."""
        next_op = len(self.ops)
        return (
            self.phase,
            self.micro_batch,
            *(
                [(name, op - next_op) for name, op in last.items()]
                for last in (self._last_op_of_stream, self._last_op_of_group)
            ),
            [(stream, [op - next_op for op in waits]) for stream, waits in self._waits.items()],
            [op - next_op for op in self._host_waits],
        )

    def relative_state(self) -> BuilderState:
        """The state, whatever the numbers of the ops and the micro-batch."""
        numbers: dict[int, int] = {}
        pattern = (
            self.phase,
            *[
                (stream, numbers.setdefault(op, len(numbers)))
                for stream, op in self._last_op_of_stream.items()
            ],
            *[
                (group, numbers.setdefault(op, len(numbers)), self.ops[op].stream)
                for group, op in self._last_op_of_group.items()
            ],
            *[
                (stream, *[numbers.setdefault(op, len(numbers)) for op in waits])
                for stream, waits in self._waits.items()
            ],
            tuple([numbers.setdefault(op, len(numbers)) for op in self._host_waits]),
        )
        return BuilderState(pattern, tuple(numbers))

    def body_since(self, source: ActionRepeat, before: BuilderState) -> ActionBody | None:
        """The body that was issued since the state `before`, from `source` on. None where it waits for an
        earlier op that is not in that state, or is of several micro-batches.
        """
        first = source.op
        streams, groups = dict(self._last_op_of_stream), dict(self._last_op_of_group)
        stream_waits = {stream: tuple(waits) for stream, waits in self._waits.items()}
        changes = self.memory[source.change :]
        ops = chain(
            *[(*waiting.after, *waiting.host_waits) for waiting in self.ops[first:]],
            [change.until for change in changes if change.until >= 0],
            streams.values(),
            groups.values(),
            *stream_waits.values(),
            self._host_waits,
        )
        is_closed = {op for op in ops if op < first} <= set(before.ops)
        if not is_closed or not {change.micro_batch for change in changes} <= {-1, source.micro_batch}:
            return None
        return ActionBody(
            source, before.ops, self.phase, streams, groups, stream_waits, tuple(self._host_waits)
        )

    def repeat(self, body: ActionBody, before: BuilderState, micro_batch: int) -> None:
        """Issue a body again, in the state `before`, for another micro-batch."""
        source, first = body.source, len(self.ops)
        shift = first - source.op
        renumbered = dict(zip(body.ops_before, before.ops, strict=True))

        def shifted(op: int) -> int:
            return op + shift if op >= source.op else renumbered[op]

        self.ops += self.ops[source.op : source.op + source.num_ops]
        change = len(self.memory)
        self.memory += self.memory[source.change : source.change + source.num_changes]
        repeat = source._replace(op=first, change=change, micro_batch=micro_batch)
        self._repeats.append((repeat, renumbered))
        self.phase, self.micro_batch = body.phase, micro_batch
        self._last_op_of_stream = {stream: shifted(op) for stream, op in body.last_op_of_stream.items()}
        self._last_op_of_group = {group: shifted(op) for group, op in body.last_op_of_group.items()}
        self._waits = {stream: [shifted(op) for op in waits] for stream, waits in body.waits.items()}
        self._host_waits = [shifted(op) for op in body.host_waits]

    def skip(self, count: int) -> None:
        """Count the ops that later ones depend on as `count` ops later."""
        self._last_op_of_stream = {stream: op + count for stream, op in self._last_op_of_stream.items()}
        self._last_op_of_group = {group: op + count for group, op in self._last_op_of_group.items()}
        self._waits = {stream: [op + count for op in waits] for stream, waits in self._waits.items()}
        self._host_waits = [op + count for op in self._host_waits]

    def begin(self, action: Action) -> None:
        """Count the ops from now on for `action`, up to the next one."""
        self.actions.append((len(self.ops), action))

    # -- streams and events ---------------------------------------------------------------------------

    def record(self, stream: str) -> int | None:
        """The event of all work issued to a stream so far. None if there is no work yet."""
        return self._last_op_of_stream.get(stream)

    def stream_wait(self, stream: str, event: int | None) -> None:
        """Make all work issued to `stream` from now on start after `event`, an op of another stream. The
        last wait for a stream implies those before it."""
        if event is None:
            return
        waits = self._waits.setdefault(stream, [])
        producer = self.ops[event].stream
        waits[:] = [number for number in waits if number > event or self.ops[number].stream != producer]
        waits.append(event)

    def wait_stream(self, stream: str, producer: str) -> None:
        """`stream.wait_stream(producer)`: later work on `stream` waits for all work on `producer` so far."""
        if stream != producer:
            self.stream_wait(stream, self._last_op_of_stream.get(producer))

    def join(self, stream: str, producer: str) -> None:
        """Issue `wait_stream`, and also wait for what `producer` itself waits for before its next work."""
        self.wait_stream(stream, producer)
        for event in self._waits.get(producer, ()):
            self.stream_wait(stream, event)

    def host_wait(self, event: int | None) -> None:
        """Block the host on `event` before it issues the next op."""
        if event is not None:
            self._host_waits.append(event)

    def synchronize(self) -> None:
        """`torch.cuda.synchronize`: block the host on all work that any stream has so far."""
        self._host_waits += self._last_op_of_stream.values()

    # -- ops --------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        stream: str,
        work: Work | None,
        *,
        launches: int = 1,
        overhead: str | None = None,
        module: str = "",
        events: int = 1,
    ) -> int:
        """Issue one op and return its number, which is also its event."""
        ops = self.ops
        number = len(ops)
        after: tuple[int, ...] = ()
        if work is not None:
            if stream in self._waits:
                waits = self._waits.pop(stream)
                after = tuple(dict.fromkeys(waits)) if len(waits) > 1 else (waits[0],)
            self._last_op_of_stream[stream] = number
        host_waits: tuple[int, ...] = ()
        if self._host_waits:
            host_waits = tuple(dict.fromkeys(self._host_waits))
            self._host_waits = []
        # an Op, without the call of the named tuple's own __new__, which takes as long again
        op = (name, stream, work, after, host_waits, launches, overhead, self.phase, module, events)
        ops.append(tuple.__new__(Op, op))
        return number

    def kernels(
        self,
        name: str,
        kernels: Sequence[Kernel],
        *,
        stream: str = COMPUTE,
        overhead: str | None = None,
        module: str = "",
        events: int = 1,
    ) -> int:
        """Issue kernels that run back to back on one stream, and return the op's number. The host spends the
        time of `overhead` `events` times.
        """
        work = self._work(tuple(kernels))
        launches = sum([kernel.launches for kernel in work.kernels])
        return self.add(
            name, stream, work, launches=launches, overhead=overhead, module=module, events=events
        )

    def _work(self, kernels: tuple[Kernel, ...]) -> Kernels:
        work = self._kernels.get(kernels)
        if work is None:
            work = self._kernels[kernels] = Kernels(kernels)
        return work

    def move(
        self,
        name: str,
        read_bytes: float,
        written_bytes: float,
        launches: int = 1,
        *,
        stream: str = COMPUTE,
        overhead: str | None = None,
        module: str = "",
        events: int = 1,
    ) -> int:
        """Issue the kernels of `move_kernels`, and return the op's number."""
        key = read_bytes + written_bytes, launches
        work = self._copies.get(key)
        if work is None:
            work = self._copies[key] = self._work(move_kernels(read_bytes, written_bytes, launches))
        return self.add(
            name, stream, work, launches=launches, overhead=overhead, module=module, events=events
        )

    def collective(
        self,
        kind: CollectiveKind,
        full_bytes: int,
        dtype: str,
        group: str,
        *,
        stream: str,
        name: str = "",
        module: str = "",
    ) -> int:
        """Issue one collective call and return its op number. `full_bytes` are those of `Collective.bytes`.

        # [Note: one communicator, one collective at a time]
        A process group is one communicator, and it runs its collectives in the order of issue, whatever
        streams they are on (torch 2.13 `_fully_shard.py`, set_separate_reduce_scatter_group). Only different
        groups overlap, as HSDP's all-reduce does.
        """
        work = self._collectives.get((kind, full_bytes, dtype, group))
        if work is None:
            work = Collective(kind, full_bytes, dtype, group)
            self._collectives[kind, full_bytes, dtype, group] = work
        return self.communicate(name or kind, stream, work, module)

    def all_to_all(
        self,
        split_sizes: SplitSizes,
        dtype: str,
        group: str,
        *,
        stream: str,
        name: str = "",
        module: str = "",
    ) -> int:
        """Issue an all-to-all of any split sizes. See `Collective.all_to_all`."""
        work = Collective.all_to_all(split_sizes, dtype, group)
        return self.communicate(name or work.kind, stream, work, module)

    def communicate(self, name: str, stream: str, work: Collective | PointToPoint, module: str = "") -> int:
        """Issue a collective or messages. See [Note: one communicator, one collective at a time]."""
        previous = self._last_op_of_group.get(work.group)
        if previous is not None and self.ops[previous].stream != stream:
            self.stream_wait(stream, previous)
        number = self.add(name, stream, work, overhead="collective_call", module=module)
        self._last_op_of_group[work.group] = number
        return number

    def point_to_point(
        self,
        messages: Sequence[Message],
        dtype: str,
        group: str,
        *,
        stream: str,
    ) -> int:
        """Issue one call that sends and receives `messages` (`batch_isend_irecv`). A single message is a lone
        `isend` or `irecv`, and its `group` is the two ranks. See [Note: who a message meets].
        """
        work = PointToPoint(tuple(messages), dtype, group)
        return self.communicate(work.kind, stream, work)

    def copy(self, name: str, copy: Copy, *, stream: str, module: str = "") -> int:
        return self.add(name, stream, copy, module=module)

    def host(self, name: str, overhead: str | None = None, *, module: str = "", events: int = 1) -> int:
        """Issue a host-only op: a hook, or a point where the host waits."""
        return self.add(name, "host", None, launches=0, overhead=overhead, module=module, events=events)

    # -- memory -----------------------------------------------------------------------------------------

    def allocate(
        self,
        category: Category,
        size: int,
        device: Device = "gpu",
        *,
        is_pinned: bool = False,
        owner: str = "",
        tensors: tuple[int, ...] = (),
        stream: str = "",
        part: str = "",
        micro_batch: int = -1,
    ) -> None:
        """Allocate `size` bytes before the next op is issued.

        They are the `part` of `owner`'s memory (for `micro_batch`, where memory is held per micro-batch), in
        tensors of `tensors` bytes, allocated on `stream` (default: the stream of the next work).
        """
        assert not tensors or sum(tensors) == size, f"{owner}: {tensors} are not {size} bytes"
        if size:
            self._change(category, size, device, -1, is_pinned, owner, tensors, stream, part, micro_batch)

    def _change(
        self,
        category: Category,
        size: int,
        device: Device,
        until: int,
        is_pinned: bool,
        owner: str,
        tensors: tuple[int, ...],
        stream: str,
        part: str,
        micro_batch: int,
    ) -> None:
        """Change memory before the next op is issued, in the order of the fields of `MemoryChange`, which is
        made without the call of the named tuple's own __new__."""
        change = (
            len(self.ops), category, size, device, until, is_pinned, owner, tensors, stream, part,
            micro_batch,
        )  # fmt: skip
        self.memory.append(tuple.__new__(MemoryChange, change))

    def activations(self, size: int, owner: str, micro_batch: int, tensors: tuple[int, ...] = ()) -> None:
        """Allocate `size` bytes of the activations of `owner` before the next op is issued, in tensors of
        `tensors` bytes. A negative `size` frees them.
        """
        if size:
            self._change("activations", size, "gpu", -1, False, owner, tensors, "", "", micro_batch)

    def free(
        self,
        category: Category,
        size: int,
        device: Device = "gpu",
        *,
        is_pinned: bool = False,
        owner: str = "",
        part: str = "",
        micro_batch: int = -1,
    ) -> None:
        """Free `size` bytes of `owner` before the next op is issued."""
        if size:
            self._change(category, -size, device, -1, is_pinned, owner, (), "", part, micro_batch)

    def free_when_done(
        self,
        category: Category,
        size: int,
        op: int,
        *,
        owner: str = "",
        micro_batch: int = -1,
    ) -> None:
        """Free `size` bytes of which `record_stream` keeps the block reserved until `op` has ended."""
        if size:
            self._change(category, -size, "gpu", op, False, owner, (), "", "", micro_batch)

    def free_all(self) -> None:
        """Free all memory that is still allocated: what a pass without backward has left for it."""
        live: dict[tuple[Device, Category, bool, str, str, int], int] = {}
        for change in self.memory:
            key = (
                change.device, change.category, change.is_pinned, change.owner, change.part,
                change.micro_batch,
            )  # fmt: skip
            live[key] = live.get(key, 0) + change.bytes
        for (device, category, is_pinned, owner, part, micro_batch), size in live.items():
            self.free(
                category, size, device, is_pinned=is_pinned, owner=owner, part=part, micro_batch=micro_batch
            )

    def program(self, resident: Sequence[Memory], name: str = "") -> Program:
        """The program of the issued ops, for ranks that hold `resident` between steps."""
        if self._host_waits:
            self.host("end of step")
        ops: tuple[Op, ...] = tuple(self.ops)
        memory: Sequence[MemoryChange] = tuple(self.memory)
        if self._repeats:
            ops = UnrolledOps(self._unrolled_ops(), tuple([repeat for repeat, _ in self._repeats]))
            memory = UnrolledChanges(self.memory, self._repeats)
        return Program(name, ops, tuple(resident), memory, actions=tuple(self.actions))

    def _unrolled_ops(self) -> list[Op]:
        """The ops, with the waits of repeats counted from each repeat."""
        ops, new_tuple = self.ops.copy(), tuple.__new__
        waiting: dict[int, list[int]] = {}  # by source: its ops that wait
        for repeat, renumbered in self._repeats:
            source, shift = repeat.source_op, repeat.op - repeat.source_op
            if source not in waiting:
                end = source + repeat.num_ops
                waiting[source] = [
                    number for number in range(source, end) if ops[number][3] or ops[number][4]
                ]
            for number in waiting[source]:
                name, stream, work, after, waits, *rest = ops[number]
                after = tuple([op + shift if op >= source else renumbered[op] for op in after])
                waits = tuple([op + shift if op >= source else renumbered[op] for op in waits])
                ops[number + shift] = new_tuple(Op, (name, stream, work, after, waits, *rest))
        return ops

    def finish(
        self,
        framework: str,
        world_size: int,
        resident: Sequence[Memory],
        labels: dict[str, str] | None = None,
    ) -> Plan:
        """The plan of a step in which all ranks run the issued program."""
        return Plan.uniform(
            framework, world_size, self.program(resident), self.groups, tuple(self.notes), labels
        )


def read_scalar(
    builder: PlanBuilder,
    name: str,
    dtype: str,
    groups: Sequence[str],
    *,
    count: int = 1,
    later_groups: Sequence[str] = (),
) -> None:
    """Issue `.item()` of a scalar. Before it the scalar is all-reduced `count` times over `groups`, one after
    the other, and then once over each of `later_groups`. Groups of one rank reduce nothing.
    """
    size, reduction = DTYPE_BYTES[dtype], f"all_reduce {name}"
    reducing_groups = [group for group in groups if builder.groups[group].size > 1]
    for group in [
        *reducing_groups * count,
        *(group for group in later_groups if builder.groups[group].size > 1),
    ]:
        builder.collective("all_reduce", size, dtype, group, stream=COMPUTE, name=reduction)
    builder.host_wait(builder.record(COMPUTE))
    builder.host(f"read {name}")
