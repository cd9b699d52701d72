"""DeepCompile's activations in host memory: which leave in forward, and where backward has them again.

Transcribed from DeepSpeed 0.19.8 `compile/passes/offload_activation.py` and `csrc/compile/z3.cpp`.

# [Note: activations in host memory]
A tensor of 5 MiB or more that forward saves is copied to a page-locked buffer of its own behind its last use,
on a stream that first waits for all kernels issued before, and the kernels issued after wait for the copy
(`offload_tensor`, `wait_offload`). Backward copies it back on another stream, which waits for no kernel, and
the first reader waits for that copy (`reload_tensor`, `wait_reload`). What has come back stays to the end of
backward (`reload_buffers_`).

# [Note: activations that stay]
For five steps all of them leave, and the peak of these steps is measured. What then fits between it and nine
tenths of the GPU stays, the largest first (`_plan_against_floor_fwd`). A copy back starts so many operators
before the first reader as take its time, as far as the profile of backward with all activations has room for
it and for all that came back before (`_reload_activation_bwd`). Here it starts one module before, since a
plan knows no times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zsim.plan.builder import COMPUTE
from zsim.plan.hooks import CheckpointStore
from zsim.plan.ops import Memory
from zsim.plan.shared.checkpoints import CHECKPOINT
from zsim.plan.shared.host_side import HostSide
from zsim.plan.workload.workload import ModuleCall, Segment

OUT, BACK = "activations out", "activations back"  # streams
_MIN_BYTES = 5 * 2**20  # MIN_OFFLOAD_SIZE


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that forward saves for backward: its owner, its number among the owner's, its bytes."""

    owner: str
    number: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ActivationMoves:
    """The decisions of `offload_activation`."""

    leaving: frozenset[SavedTensor] = frozenset()
    """The tensors that forward sends to host memory."""
    returns: dict[int, tuple[SavedTensor, ...]] = field(default_factory=dict)
    """The tensors whose copy back starts before a node, by the node's number."""


class HostActivations(CheckpointStore):
    """Moves activations, checkpoints among them, and records who reads what forward saves. See [Note:
    activations in host memory]. `is_pinned` is `compile.offload_activation_pin_memory`.
    """

    repeats = False

    def __init__(self, host: HostSide, moves: ActivationMoves, *, is_pinned: bool) -> None:
        self.host, self.builder, self.moves, self.is_pinned = host, host.builder, moves, is_pinned
        self.readers: dict[SavedTensor, int] = {}
        """The node of backward that reads each saved tensor first."""
        self._saved: dict[str, tuple[SavedTensor, ...]] = {}  # by owner
        self._unread: tuple[SavedTensor, ...] = ()  # the checkpoint whose first reader is the next node
        self._events: dict[SavedTensor, int] = {}  # of copies back
        self._held_bytes = 0

    def resident(self) -> list[Memory]:
        """The buffers in host memory."""
        size = sum(tensor.bytes for tensor in self.moves.leaving)
        return [Memory("activations", size, "host", self.is_pinned)] if size else []

    # -- forward ----------------------------------------------------------------------------------------

    def send(self, owner: str, sizes: Sequence[int]) -> None:
        """Send what leaves of the tensors that `owner` saves. They are allocated."""
        builder = self.builder
        self._saved[owner] = tuple(SavedTensor(owner, number, size) for number, size in enumerate(sizes))
        for tensor in self._saved[owner]:
            if tensor not in self.moves.leaving:
                continue
            builder.wait_stream(OUT, COMPUTE)
            event = self.host.copy(f"{owner} to host", "d2h", tensor.bytes, OUT, is_pinned=self.is_pinned)
            assert event is not None
            builder.stream_wait(COMPUTE, event)
            builder.free_when_done(
                "activations", tensor.bytes, event, owner=owner, micro_batch=builder.micro_batch
            )

    def save(self, segment: Segment) -> None:
        if segment.checkpoint_bytes:
            sizes = (
                segment.input_bytes,
                *(size for call in segment.calls for size in call.work.kept_outputs),
            )
            self.send(segment.name + CHECKPOINT, sizes)

    # -- backward ---------------------------------------------------------------------------------------

    def restore(self, segment: Segment) -> None:
        self._unread = self._saved.get(segment.name + CHECKPOINT, ())

    def before_node(self, node: int, call: ModuleCall) -> None:
        """Start the copies that stand before a node, and wait for those of what it reads."""
        builder = self.builder
        for tensor in self.moves.returns.get(node, ()):
            builder.allocate(
                "activations", tensor.bytes, owner=tensor.owner, stream=BACK, micro_batch=builder.micro_batch
            )
            event = self.host.copy(
                f"{tensor.owner} to the GPU", "h2d", tensor.bytes, BACK, is_pinned=self.is_pinned
            )
            assert event is not None
            self._events[tensor] = event
        read, self._unread = self._unread, ()
        if builder.phase == "backward":
            read = (*read, *self._saved.get(call.name, ()))
        for tensor in read:
            self.readers.setdefault(tensor, node)
            if tensor in self._events:
                builder.stream_wait(COMPUTE, self._events.pop(tensor))

    def hold(self, owner: str) -> None:
        """Keep what has come back of the owner's tensors, which its backward has freed."""
        size = sum(tensor.bytes for tensor in self._saved.pop(owner, ()) if tensor in self.moves.leaving)
        self.builder.allocate("buffers", size, stream=BACK)
        self._held_bytes += size

    def drop(self, segment: Segment) -> None:
        self.hold(segment.name + CHECKPOINT)

    def end_backward(self) -> None:
        last = self.builder.record(COMPUTE)
        if self._held_bytes and last is not None:
            self.builder.free_when_done("buffers", self._held_bytes, last)
        self._held_bytes = 0


def moved_activations(
    readers: dict[SavedTensor, int], graph: range, peaks: Sequence[int], limit: int
) -> ActivationMoves:
    """The moves of all tensors that are large enough. `peaks` are the bytes that each node of backward,
    `graph`, has at most with all activations on the GPU. See [Note: activations that stay].
    """
    returns: dict[int, list[SavedTensor]] = {}
    back = 0
    leaving = [tensor for tensor in readers if tensor.bytes >= _MIN_BYTES]
    for tensor in sorted(leaving, key=readers.__getitem__):
        reader = readers[tensor]
        earlier = max(reader - 1, graph.start)
        fits = peaks[earlier - graph.start] + back + tensor.bytes <= limit
        returns.setdefault(earlier if fits else reader, []).append(tensor)
        back += tensor.bytes
    return ActivationMoves(frozenset(leaving), {node: tuple(tensors) for node, tensors in returns.items()})


def trim_moves(moves: ActivationMoves, headroom: int) -> ActivationMoves:
    """The moves but for the tensors that fit into `headroom` bytes, the largest first."""
    leaving = set(moves.leaving)
    in_order = [tensor for tensors in moves.returns.values() for tensor in tensors]
    for tensor in sorted(in_order, key=lambda tensor: -tensor.bytes):
        if tensor.bytes <= headroom:
            headroom -= tensor.bytes
            leaving.remove(tensor)
    kept = {
        node: tuple(tensor for tensor in tensors if tensor in leaving)
        for node, tensors in moves.returns.items()
    }
    return ActivationMoves(frozenset(leaving), kept)
