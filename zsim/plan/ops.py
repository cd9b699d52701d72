"""The plan: the ops of each rank, as its host program issues them.

Ops are in host issue order. For each op the host may first block on earlier ops (`host_waits`), spends its
overhead, and enqueues the op on an in-order stream, where it starts once the stream is free and the ops in
`after` have ended. A plan holds no seconds and no hardware.

# [Note: memory follows the host]
The caching allocator allocates and frees memory when the *host* gets there, not when the stream does.
So memory is a list of changes in the order in which the host makes them, each tied to the op it issues
next, and the peak of allocated bytes follows from the order alone. A freed block that `record_stream`
protects (`until`) counts as free at once too, as in `torch.cuda.max_memory_allocated`: the allocator cannot
reuse it before op `until` has ended, but when it runs short it waits for that op and does not fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np

from zsim.arrays import Ints
from zsim.cost.kernels.kernel import Kernel
from zsim.memo import Memo
from zsim.plan.actions import Action
from zsim.specs.model.spec import ExchangeLibrary
from zsim.trace.trace import SpanInfo


class HostCall(NamedTuple):
    """A blocking call of a recorded host. See zsim.plan.recorded.infer, [Note: a call that blocks]."""

    seconds: float
    """Seconds of the host's work before the call."""
    waits: bool
    """Whether the call lasts until the next of the op's `host_waits` has ended."""
    overhead_seconds: float = 0.0
    """Seconds that the call lasts after that."""
    info: SpanInfo | None = None
    """The awaited op, for the report."""


@dataclass(frozen=True, slots=True)
class RecordedWork:
    """The work of a recorded op, the only kind of work with seconds.

    The host first makes `calls`, then works for `host_seconds`, and issues the op.
    """

    info: SpanInfo | None
    """The recorded span. None is the end of the host's step, which no trace shows."""
    seconds: float
    """Seconds of a kernel, or of a collective's transfer."""
    bounds: tuple[float, float] = (0.0, 0.0)
    """Start and end of the recorded span."""
    meets: bool = False
    """Whether it is a collective that starts when all members of its group have arrived."""
    lag_seconds: float = 0.0
    """Delay of the start that its waits do not explain."""
    host_seconds: float = 0.0
    calls: tuple[HostCall, ...] = ()
    allocator_spans: tuple[tuple[float, float], ...] = ()
    """The host's spans in torch's allocator, which had run short. Each is the seconds from the issue of the
    previous op, or from the step's start, to the span's start, and the seconds from the span's end to the
    issue of this op.
    """
    is_on_host: bool = False
    """Whether the host itself runs the op."""
    is_issue_known: bool = True

    @property
    def kind(self) -> str:
        return "" if self.info is None else self.info.kind


Category = Literal["parameters", "gradients", "optimizer_states", "activations", "buffers", "framework"]
MODEL_STATES = ("parameters", "gradients", "optimizer_states")
CATEGORIES: tuple[Category, ...] = get_args(Category)
Device = Literal["gpu", "host", "nvme"]
CollectiveKind = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "send", "recv"
]
MessageKind = Literal["send", "recv", "send_recv"]
SplitSizes = tuple[tuple[int, ...], ...]
Phase = Literal["forward", "recompute", "backward", "optimizer", "accumulate", "reference"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels that run back to back on the op's stream."""

    kernels: tuple[Kernel, ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective call."""

    kind: CollectiveKind
    bytes: int
    """Output of an all-gather, input of a reduce-scatter, buffer of an all-reduce, largest input of an
    all-to-all.
    """
    dtype: str
    group: str
    split_sizes: SplitSizes | None = None
    """In an all-to-all of unequal parts, the bytes from member i to member j: row i is torch's
    `input_split_sizes` of i, column j the `output_split_sizes` of j. None where all are equal. All members
    have the whole table, because a program's ranks may be anywhere in a communicator.
    """
    library: ExchangeLibrary | None = None
    """The library whose kernels run an all-to-all of equal parts. None stands for the cluster's backend."""

    @classmethod
    def all_to_all(cls, split_sizes: SplitSizes, dtype: str, group: str) -> Collective:
        """An all-to-all in which member i sends `split_sizes[i][j]` bytes to member j."""
        is_equal = len({size for row in split_sizes for size in row}) == 1
        return cls("all_to_all", max(map(sum, split_sizes)), dtype, group, None if is_equal else split_sizes)


class Message(NamedTuple):
    """A tensor to or from the rank `shift` further in its communicator (-1: one back), with wraparound."""

    direction: Literal["send", "recv"]
    bytes: int
    shift: int


@dataclass(frozen=True, slots=True)
class PointToPoint:
    """One call that sends, receives or both: `isend`, `irecv` or `batch_isend_irecv`.

    # [Note: who a message meets]
    The n-th send from one rank to another over a communicator matches the receiver's n-th receive from the
    sender: NCCL has no tags. A batch of torch's uses its group's communicator and stream, a lone `isend` or
    `irecv` a communicator of two ranks, whose one stream both directions share. Each message is transferred
    once both sides have started it, and the call ends with the last of its messages.
    """

    messages: tuple[Message, ...]
    dtype: str
    group: str
    by_copy_engine: bool = False
    """Copy engines send the messages, which takes nothing from kernels."""

    @property
    def bytes(self) -> int:  # sent plus received
        return sum(message.bytes for message in self.messages)

    @property
    def kind(self) -> MessageKind:
        directions = {message.direction for message in self.messages}
        if len(directions) == 2:
            return "send_recv"
        return "send" if "send" in directions else "recv"


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy between GPU and host memory. Pageable memory is copied through the driver's pinned buffer."""

    direction: Literal["h2d", "d2h"]
    bytes: int
    is_pinned: bool = True


@dataclass(frozen=True, slots=True)
class HostWork:
    """Work of one rank's CPU threads on its host memory: `bytes` read plus written."""

    kind: Literal["optimizer", "copy"]
    """The rate: of the CPU optimizer, or of host memory ("copy": casts, copies, scaling)."""
    bytes: int
    numel: int = 0
    """Elements, for the report."""


@dataclass(frozen=True, slots=True)
class DriveIo:
    """One batch of asynchronous reads or writes of one rank, as DeepSpeed's aio handle submits them."""

    direction: Literal["read", "write"]
    bytes: int
    block_bytes: int = 2**20
    """Each of `threads` keeps `queue_depth` pieces of this size of a request in flight."""
    queue_depth: int = 8
    threads: int = 1
    is_direct: bool = False
    """To or from GPU memory without passing host memory (GPUDirect Storage)."""


@dataclass(frozen=True, slots=True)
class Memory:
    """`bytes` of one category held on one device between steps. Host memory may be pinned (page-locked)."""

    category: Category
    bytes: int
    device: Device = "gpu"
    is_pinned: bool = False
    lazy_tensors: tuple[int, ...] = ()
    """Bytes of tensors that only the first update allocates, in blocks free by then (torch.optim's
    states).
    """
    leftovers: tuple[int, ...] = ()
    """Bytes of temporary tensors that were live while this was allocated, and were freed afterwards."""


class MemoryChange(NamedTuple):
    """An allocation (or, negative `bytes`, a free) just before the host issues op number `op`."""

    op: int
    category: Category
    bytes: int
    device: Device = "gpu"
    until: int = -1
    """The op that must end before the block can be reused (-1: stream order suffices)."""
    is_pinned: bool = False
    owner: str = ""
    """The module, block or unit it is for, "" for a shared pool. Memory that is freed separately has separate
    owners (gradients before and after flattening).
    """
    tensors: tuple[int, ...] = ()
    """Bytes of each tensor, if several are allocated at once."""
    stream: str = ""
    """The allocating stream, if it is not the stream of the next work."""
    part: str = ""
    """Its kind, if a free means one of several (a gathered input, parameters, gradients)."""
    micro_batch: int = -1
    """The micro-batch, for memory held per micro-batch (activations), else -1."""


OffloadWork = Copy | HostWork | DriveIo


def state_bytes(by_category: Mapping[str, int]) -> int:
    """Bytes of parameters, gradients and optimizer states, of bytes by category."""
    return sum(by_category.get(state, 0) for state in MODEL_STATES)


def offload_kind(work: OffloadWork) -> str:
    """The name of a kind of offloaded work in reports: h2d, d2h, cpu, nvme_read or nvme_write."""
    if isinstance(work, Copy):
        return work.direction
    return "cpu" if isinstance(work, HostWork) else f"nvme_{work.direction}"


Work = Kernels | Collective | PointToPoint | Copy | HostWork | DriveIo | RecordedWork


class Op(NamedTuple):
    """One unit of the host program. An op whose `work` is None is host-only (a wait, a hook)."""

    name: str
    stream: str
    work: Work | None = None
    after: tuple[int, ...] = ()
    host_waits: tuple[int, ...] = ()
    launches: int = 1
    overhead: str | None = None
    """The framework event whose host time the op costs, `events` times."""
    phase: Phase = "forward"
    module: str = ""
    events: int = 1


@dataclass(frozen=True, eq=False)
class Group:
    """A kind of process group: `members[number]` are the ranks of one communicator, in its order. A rank is
    in at most one row, and rows need not cover the world.
    """

    name: str
    members: Ints

    def __eq__(self, group: object) -> bool:
        """Groups are equal if their names and members are."""
        if not isinstance(group, Group):
            return NotImplemented
        return self.name == group.name and np.array_equal(self.members, group.members)

    def __hash__(self) -> int:
        return hash((self.name, self.members.shape))

    @classmethod
    def regular(cls, name: str, world_size: int, size: int | None = None, stride: int = 1) -> Group:
        """The world split into communicators of `size` ranks (None: all) that are `stride` apart.

        World 16, size 4: [0..3], [4..7], ... with stride 1, [0, 4, 8, 12], [1, 5, 9, 13], ... with stride 4.
        """
        size = world_size if size is None else size
        count = world_size // (size * stride)
        assert count * size * stride == world_size, f"{name}: {world_size} ranks in {size} x {stride}"
        ranks = np.arange(world_size, dtype=np.int64).reshape(count, size, stride)
        return cls(name, ranks.transpose(0, 2, 1).reshape(-1, size))

    @property
    def size(self) -> int:
        """Number of ranks of one communicator."""
        return int(self.members.shape[1])

    @cached_property
    def stride(self) -> int | None:
        """Distance of consecutive members, if the group equals one of `regular`. None for other groups."""
        count, size = self.members.shape
        stride = int(self.members[0, 1] - self.members[0, 0]) if size > 1 else 1
        if stride < 1 or count * size % (size * stride):
            return None
        regular = Group.regular(self.name, count * size, size, stride)
        return stride if np.array_equal(self.members, regular.members) else None

    def ranks_of(self, rank: int) -> list[int]:
        """The members of the communicator that contains `rank`."""
        ranks: list[int] = self.members[(self.members == rank).any(axis=1)][0].tolist()
        return ranks

    def row_per_rank(self, world_size: int) -> Ints:
        """Per rank the number of its communicator, and -1 for ranks in none."""
        rows = np.full(world_size, -1, dtype=np.int64)
        rows[self.members] = np.arange(len(self.members))[:, None]
        return rows


class ActionRepeat(NamedTuple):
    """Ops and memory changes that repeat those of an action issued earlier, for another micro-batch. See
    [Note: a micro-batch as a repeat] of zsim.plan.pipeline.run_actions.
    """

    op: int
    """Its first op."""
    source_op: int
    """The first op of what it repeats, which is no repeat itself."""
    num_ops: int
    change: int
    """Its first memory change."""
    source_change: int
    num_changes: int
    micro_batch: int
    source_micro_batch: int


class UnrolledOps(tuple[Op, ...]):
    """The ops of a program with `repeats`, all of them. Each repeat's ops share what their source's ops have
    but for their waits.
    """

    repeats: tuple[ActionRepeat, ...]

    def __new__(cls, ops: Iterable[Op], repeats: tuple[ActionRepeat, ...]) -> Self:
        instance = super().__new__(cls, ops)
        instance.repeats = repeats
        return instance

    def __reduce__(self) -> tuple[type[UnrolledOps], tuple[tuple[Op, ...], tuple[ActionRepeat, ...]]]:
        return UnrolledOps, (tuple(self), self.repeats)


@dataclass(frozen=True)
class Program(Memo):
    """The ops that the ranks of one role issue in a step."""

    name: str
    """The role ("pipeline rank 2"), "" if there is only one."""
    ops: tuple[Op, ...]
    resident: tuple[Memory, ...] = ()
    memory: Sequence[MemoryChange] = ()
    startup_bytes: int = 0
    """GPU bytes before the first step if they may exceed the step's peak (all of the model moved there), else
    0.
    """
    actions: tuple[tuple[int, Action], ...] = ()
    """Forwards, backwards and calls of the framework, each with its first op."""
    pipeline_rank: int | None = None
    """See `zsim.plan.node_types.pipeline_rank_of`."""
    _derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def repeats(self) -> tuple[ActionRepeat, ...]:
        """The parts of `ops` that repeat an earlier part, in order."""
        return self.ops.repeats if isinstance(self.ops, UnrolledOps) else ()

    @property
    def is_recorded(self) -> bool:
        """Whether the program is the recording of a rank."""
        return bool(self.ops) and isinstance(self.ops[-1].work, RecordedWork)

    @cached_property
    def unique_work(self) -> Mapping[int, Work]:
        """The unique work of its ops by id: ops of equal work share it."""
        return {id(work): work for work in map(itemgetter(2), self.ops) if work is not None}

    @cached_property
    def offload_work(self) -> tuple[OffloadWork, ...]:
        """The offloaded work of its ops, in order."""
        if not any(isinstance(work, OffloadWork) for work in self.unique_work.values()):
            return ()
        return tuple(op.work for op in self.ops if isinstance(op.work, OffloadWork))

    @cached_property
    def message_ops(self) -> tuple[int, ...]:
        """The numbers of the ops that send or receive."""
        if not any(type(work) is PointToPoint for work in self.unique_work.values()):
            return ()
        return tuple(number for number, op in enumerate(self.ops) if type(op.work) is PointToPoint)


@dataclass(frozen=True, eq=False)
class Plan(Memo):
    """One steady training step of every rank: rank r runs `programs[program_of[r]]`."""

    framework: str
    programs: tuple[Program, ...]
    program_of: Ints
    groups: Mapping[str, Group]
    notes: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    _derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def uniform(
        cls,
        framework: str,
        world_size: int,
        program: Program,
        groups: Mapping[str, Group],
        notes: tuple[str, ...] = (),
        labels: Mapping[str, str] | None = None,
    ) -> Plan:
        """The plan in which all ranks run `program`."""
        return cls(framework, (program,), np.zeros(world_size, dtype=np.int64), groups, notes, labels or {})

    @property
    def world_size(self) -> int:
        return len(self.program_of)

    @property
    def program(self) -> Program:
        """The program of a plan with a single program."""
        assert len(self.programs) == 1, f"{self.framework}: {len(self.programs)} programs"
        return self.programs[0]

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops of a plan with a single program."""
        return self.program.ops

    @property
    def resident(self) -> tuple[Memory, ...]:
        """The resident memory of a rank in a plan with a single program."""
        return self.program.resident

    @property
    def memory(self) -> Sequence[MemoryChange]:
        """The memory changes of a plan with a single program."""
        return self.program.memory

    def program_on(self, rank: int) -> Program:
        """The program that `rank` runs."""
        return self.programs[int(self.program_of[rank])]

    @property
    def num_ops(self) -> int:
        """Number of ops of all programs."""
        return sum(len(program.ops) for program in self.programs)

    @property
    def has_messages(self) -> bool:
        return any(program.message_ops for program in self.programs)

    @property
    def has_offload(self) -> bool:
        """Whether any rank does offloaded work."""
        return any(program.offload_work for program in self.programs)

    @property
    def changes_memory(self) -> bool:
        return any(program.memory for program in self.programs)

    def map_programs(self, transform: Callable[[Program], Program]) -> Plan:
        """A copy of the plan with `transform` applied to every program."""
        return replace(self, programs=tuple(transform(program) for program in self.programs))

    def all_work(self) -> Iterator[Work]:
        """The work of all ops of all programs."""
        return (op.work for program in self.programs for op in program.ops if op.work is not None)

    def unique_work(self) -> Iterator[Work]:
        """The unique work of each program's ops: ops of equal work share it."""
        return (work for program in self.programs for work in program.unique_work.values())
