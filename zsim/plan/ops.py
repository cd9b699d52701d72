"""The plan: what each rank does, as its host program issues it.

Ops stand in host issue order. The host spends a little on each, may first block on earlier ops
(`host_waits`), and then enqueues the op on an in-order stream, where it starts once the stream is free and
the ops in `after` have ended. A plan holds no seconds and no hardware.

# [Note: memory follows the host]
The caching allocator hands out and takes back memory when the *host* gets there, not when the stream does.
So memory is a list of changes in the order in which the host makes them, each tied to the op it issues
next, and the peak of what is allocated follows from the order alone. A block that `record_stream` protects
(`until`) counts as free from then on too, as in `torch.cuda.max_memory_allocated`: the allocator cannot
hand it out before op `until` has ended, but when it runs short it waits for that and does not fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self, TypeVar, TypeVarTuple

import numpy as np

from zsim.arrays import Ints
from zsim.cost.kernels.kernel import Kernel
from zsim.plan.recorded.work import Recorded

Category = Literal["parameters", "gradients", "optimizer_states", "activations", "buffers", "framework"]
CATEGORIES: tuple[Category, ...] = (
    "parameters",
    "gradients",
    "optimizer_states",
    "activations",
    "buffers",
    "framework",
)
Device = Literal["gpu", "host", "nvme"]
CollectiveKind = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "send", "recv"
]
MessageKind = Literal["send", "recv", "send_recv"]
Arguments = TypeVarTuple("Arguments")
Derived = TypeVar("Derived")
Phase = Literal["forward", "recompute", "backward", "optimizer", "accumulate"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels that run back to back on the op's stream."""

    kernels: tuple[Kernel, ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective call. `bytes` is the full tensor: output of an all-gather, input of a
    reduce-scatter, buffer of an all-reduce. `group` names an entry of `Plan.groups`."""

    kind: CollectiveKind
    bytes: int
    dtype: str
    group: str


class Message(NamedTuple):
    """One tensor of `bytes` to or from the rank that is `shift` places further on in the communicator (-1:
    one place back; after the last comes the first)."""

    direction: Literal["send", "recv"]
    bytes: int
    shift: int


@dataclass(frozen=True, slots=True)
class PointToPoint:
    """One call that sends, receives or both: `isend`, `irecv`, or all that a `batch_isend_irecv` holds.

    # [Note: who a message meets]
    The n-th send of a rank to another over a communicator meets the other's n-th receive from it: NCCL has no
    tags. A batch of torch's goes over its group's communicator and stream, a lone `isend` or `irecv` over a
    communicator of two ranks, whose one stream both directions share. Each message moves once both sides have
    come to it, and the call is over when all of its messages are.
    """

    messages: tuple[Message, ...]
    dtype: str
    group: str

    @property
    def bytes(self) -> int:
        """Sent and received."""
        return sum(message.bytes for message in self.messages)

    @property
    def kind(self) -> MessageKind:
        directions = {message.direction for message in self.messages}
        if len(directions) == 2:
            return "send_recv"
        return "send" if "send" in directions else "recv"


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy between GPU and host memory. One that is not pinned goes through the driver's pinned buffer."""

    direction: Literal["h2d", "d2h"]
    bytes: int
    is_pinned: bool = True


@dataclass(frozen=True, slots=True)
class HostWork:
    """Work of one rank's CPU threads on its host memory: `bytes` read plus written.

    `kind` "optimizer" runs at the rate of the CPU optimizer, "copy" (casts, copies, scaling) at that of
    memory; `numel` is elements, for the report.
    """

    kind: Literal["optimizer", "copy"]
    bytes: int
    numel: int = 0


@dataclass(frozen=True, slots=True)
class DriveIo:
    """One batch of asynchronous reads or writes of one rank, as DeepSpeed's aio handle submits them.

    `threads` work on a request in pieces of `block_bytes`, each with `queue_depth` of them in flight.
    `is_direct`: to or from GPU memory without passing host memory (GPUDirect Storage).
    """

    direction: Literal["read", "write"]
    bytes: int
    block_bytes: int = 2**20
    queue_depth: int = 8
    threads: int = 1
    is_direct: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """`bytes` of one category on one device; host memory may be pinned (page-locked). `lazy_tensors`: the
    bytes of each tensor, where they are made by the first update, in what is free by then (torch.optim's
    states); () where they are there before the first step. `leftovers`: those of tensors that were there
    while it was made, and are freed since."""

    category: Category
    bytes: int
    device: Device = "gpu"
    is_pinned: bool = False
    lazy_tensors: tuple[int, ...] = ()
    leftovers: tuple[int, ...] = ()


class MemoryChange(NamedTuple):
    """`bytes` more (or, negative, less) of a category, just before the host issues op number `op`;
    `until` is the op that must end before the block can be used again (-1: stream order takes care).
    `owner`: the module, block or FSDP unit that it is for; "" where a framework's pool serves them all. A
    free takes what its owner holds, so what is freed apart has names apart (FSDP1's gradients before and
    after they are flattened). `tensors`: the bytes of each of several tensors that are allocated at once.
    `stream`: on which they are made, where that is not the stream of the next work. `part`: which of its
    owner's it is, where a free means one kind of several (FSDP2's gathered input, parameters, gradients).
    `micro_batch`: whose it is, where every micro-batch has one (activations), else -1."""

    op: int
    category: Category
    bytes: int
    device: Device = "gpu"
    until: int = -1
    is_pinned: bool = False
    owner: str = ""
    tensors: tuple[int, ...] = ()
    stream: str = ""
    part: str = ""
    micro_batch: int = -1


OffloadWork = Copy | HostWork | DriveIo


def offload_kind(work: OffloadWork) -> str:
    """What a piece of offloaded work is called on timelines and in reports: h2d, d2h, cpu, nvme_read,
    nvme_write."""
    if isinstance(work, Copy):
        return work.direction
    return "cpu" if isinstance(work, HostWork) else f"nvme_{work.direction}"


Work = Kernels | Collective | PointToPoint | Copy | HostWork | DriveIo | Recorded


class Op(NamedTuple):
    """One unit of the host program; `work` None is a host-only op (a wait, a hook). `overhead`: which event
    of the framework it costs the host, `events` times."""

    name: str
    stream: str
    work: Work | None = None
    after: tuple[int, ...] = ()
    host_waits: tuple[int, ...] = ()
    launches: int = 1
    overhead: str | None = None
    phase: Phase = "forward"
    module: str = ""
    events: int = 1


@dataclass(frozen=True, eq=False)
class Group:
    """A kind of process group: `members[number]` are the ranks of one communicator, in their order in it. A
    rank is in one row at most; rows need not cover the world."""

    name: str
    members: Ints

    def __eq__(self, other: object) -> bool:
        """Groups of one name and the same members are one group."""
        if not isinstance(other, Group):
            return NotImplemented
        return self.name == other.name and np.array_equal(self.members, other.members)

    def __hash__(self) -> int:
        return hash((self.name, self.members.shape))

    @classmethod
    def regular(cls, name: str, world_size: int, size: int | None = None, stride: int = 1) -> Group:
        """The world in groups of `size` ranks (None: all) that are `stride` apart.

        World 16, size 4: stride 1 gives [0..3], [4..7], ...; stride 4 gives [0, 4, 8, 12], [1, 5, 9, 13], ...
        """
        size = world_size if size is None else size
        count = world_size // (size * stride)
        assert count * size * stride == world_size, f"{name}: {world_size} ranks in {size} x {stride}"
        ranks = np.arange(world_size, dtype=np.int64).reshape(count, size, stride)
        return cls(name, ranks.transpose(0, 2, 1).reshape(-1, size))

    @property
    def size(self) -> int:
        """Ranks of one communicator."""
        return int(self.members.shape[1])

    @cached_property
    def stride(self) -> int | None:
        """How far neighbours are apart where the members are those of `regular`; None for other groups."""
        count, size = self.members.shape
        stride = int(self.members[0, 1] - self.members[0, 0]) if size > 1 else 1
        if stride < 1 or count * size % (size * stride):
            return None
        regular = Group.regular(self.name, count * size, size, stride)
        return stride if np.array_equal(self.members, regular.members) else None

    def ranks_of(self, rank: int) -> list[int]:
        """The members of the communicator that `rank` belongs to."""
        found: list[int] = self.members[(self.members == rank).any(axis=1)][0].tolist()
        return found

    def row_of(self, world_size: int) -> Ints:
        """Per rank the number of its communicator; -1 where it is in none."""
        rows = np.full(world_size, -1, dtype=np.int64)
        rows[self.members] = np.arange(len(self.members))[:, None]
        return rows


class Unchanging:
    """A value of which what follows is worked out once: runs on other hardware have it in common."""

    _derived: dict[Any, Any]

    def once(self, derive: Callable[[Self, *Arguments], Derived], *arguments: *Arguments) -> Derived:
        """What `derive`, a function of a module, makes of this value and the arguments. It is made the first
        time, and not to be changed."""
        key = (derive, arguments)
        if key not in self._derived:
            self._derived[key] = derive(self, *arguments)
        found: Derived = self._derived[key]
        return found


@dataclass(frozen=True)
class Program(Unchanging):
    """What the ranks of one role issue in a step; `name`: the role ("pipeline rank 2"), "" if there is one.

    `startup_bytes`: what each GPU holds before the first step where that is more than it keeps (a model that
    is moved to the GPU whole and sharded there).
    """

    name: str
    ops: tuple[Op, ...]
    resident: tuple[Memory, ...] = ()
    memory: tuple[MemoryChange, ...] = ()
    startup_bytes: int = 0
    _derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def is_recorded(self) -> bool:
        """Whether it is what a rank was recorded to do."""
        return bool(self.ops) and isinstance(self.ops[-1].work, Recorded)

    @cached_property
    def calls_with_messages(self) -> tuple[int, ...]:
        """The ops that send or receive."""
        return tuple(number for number, op in enumerate(self.ops) if type(op.work) is PointToPoint)


@dataclass(frozen=True, eq=False)
class Plan(Unchanging):
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
        """All ranks run the same program."""
        return cls(framework, (program,), np.zeros(world_size, dtype=np.int64), groups, notes, labels or {})

    @property
    def world_size(self) -> int:
        return len(self.program_of)

    @property
    def program(self) -> Program:
        """The program of a plan that has one."""
        assert len(self.programs) == 1, f"{self.framework}: {len(self.programs)} programs"
        return self.programs[0]

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops of a plan of one program."""
        return self.program.ops

    @property
    def resident(self) -> tuple[Memory, ...]:
        """What the GPUs of a plan of one program keep."""
        return self.program.resident

    @property
    def memory(self) -> tuple[MemoryChange, ...]:
        """The changes of memory of a plan of one program."""
        return self.program.memory

    def program_on(self, rank: int) -> Program:
        """What a rank runs."""
        return self.programs[int(self.program_of[rank])]

    @property
    def num_ops(self) -> int:
        """Of all programs."""
        return sum(len(program.ops) for program in self.programs)

    @property
    def has_messages(self) -> bool:
        return any(program.calls_with_messages for program in self.programs)

    @property
    def changes_memory(self) -> bool:
        return any(program.memory for program in self.programs)

    def with_programs(self, change: Callable[[Program], Program]) -> Plan:
        """The plan with every program changed."""
        return replace(self, programs=tuple(change(program) for program in self.programs))

    def works(self) -> Iterator[Work]:
        """The work of all ops of all programs."""
        return (op.work for program in self.programs for op in program.ops if op.work is not None)
