"""The messages of one pipeline rank: its sends and receives as ops, their memory, and their waits.

# [Note: whose memory a message is]
A received activation is the stage's input, which the stage's first module keeps from its forward on. A
received gradient is the gradient of the residual stream. An output is kept until it is sent where the
framework empties it then (`deallocate_pipeline_outputs`, which Megatron-Core's command line always sets),
else until its backward (`fwd_cache` of torch 2.13 distributed/pipelining/stage.py). Stages of one rank that
follow each other hand their tensors over without a message.

# [Note: messages of several forwards]
Where a reference runs too, a message has the outputs of all forwards. Each reads its part of what was
received, and the model's part, which is kept, keeps all of it until the backward that it is for. The gradient
comes and goes in such tensors too (ms-swift 4.6 megatron/trainers: `torch.concat` of the outputs, slices of
the input, whose backward fills a tensor of the whole input).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from zsim.plan.actions import Action, Kind, MessageCall
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.ops import Group, Memory, Message
from zsim.plan.stage import Stage
from zsim.plan.walk import RESIDUAL
from zsim.specs.strategy.parallelism import PIPELINE

Direction = Literal["send", "recv"]
_NEXT: frozenset[Kind] = frozenset({"SEND_F", "RECV_B"})  # with the stage behind; others with the one before
_SHAPE_BYTES = 8 * 256  # int64 [256] of shapes, which DeepSpeed and nanotron send ahead


class Messenger:
    """Posts the messages of a pipeline rank that holds `stages`. `ranks` has the rank of every stage."""

    def __init__(
        self,
        builder: PlanBuilder,
        stages: Mapping[int, Stage],
        ranks: Sequence[int],
        rank: int,
        *,
        empties_outputs: bool,
    ) -> None:
        self.builder, self.stages, self.rank = builder, stages, rank
        self.ranks, self.empties_outputs = ranks, empties_outputs
        self._events: dict[Action, int] = {}

    def resident(self) -> list[Memory]:
        """The buffers that a rank keeps between steps."""
        return []

    def begin_step(self) -> None:
        """The counterpart of `end_step`: what the step before has left."""

    # -- around the computation ---------------------------------------------------------------------------

    def pre_forward(self, stage: int, micro_batch: int) -> None:
        """Wait for the input, which the stage's first module takes over."""
        if not self.stages[stage].is_first and not self._is_local(stage, -1):
            self._wait(Action("RECV_F", stage, micro_batch))
            self._allocate(-1, input_of(stage), stage, micro_batch, self.stages[stage].message_bytes)

    def post_forward(self, stage: int, micro_batch: int) -> None:
        """Allocate the output."""
        if not self.stages[stage].is_last and not self._is_local(stage, 1):
            self._allocate(1, output_of(stage), stage, micro_batch)

    def pre_backward(self, stage: int, micro_batch: int) -> None:
        """Wait for the gradient of the output."""
        if not self.stages[stage].is_last and not self._is_local(stage, 1):
            self._wait(Action("RECV_B", stage, micro_batch))
            if not self.empties_outputs:
                self._allocate(-1, output_of(stage), stage, micro_batch)

    def end_step(self) -> None:
        """After the optimizer, exchange what the stages need from each other."""

    def begin_gradients(self, stage: int, micro_batch: int) -> None:
        """The backward that computes the input's gradient begins."""

    def end_gradients(self, stage: int, micro_batch: int) -> None:
        """The backward that computes the input's gradient has ended: see
        [Note: messages of several forwards].
        """
        current = self.stages[stage]
        others = current.sent_bytes - current.message_bytes
        if not current.is_last and not self._is_local(stage, 1):
            self._allocate(-1, RESIDUAL, stage, micro_batch, others)
        if not current.is_first and not self._is_local(stage, -1):
            self._allocate(-1, input_of(stage), stage, micro_batch, others)
            self._allocate(1, RESIDUAL, stage, micro_batch, others)

    # -- messages -----------------------------------------------------------------------------------------

    def post(self, call: MessageCall) -> None:
        """Issue the messages of one call."""
        builder = self.builder
        for message in call.messages:
            if message.kind.startswith("RECV"):
                self._receive(message)
        self._post(call)
        if call.waits == "use":
            return
        events = [self._events[message] for message in call.messages]
        self.wait(call.messages)
        if call.waits == "host":
            for event in (builder.record(COMPUTE), *events):
                builder.host_wait(event)

    def _receive(self, message: Action) -> None:
        """Allocate what a message is received in."""
        owner = input_of(message.stage) if message.kind == "RECV_F" else RESIDUAL
        self._allocate(1, owner, message.stage, message.micro_batch)

    def _post(self, call: MessageCall) -> None:
        if call.is_batched:
            self._post_batch(call)
        else:
            for message in call.messages:
                self._post_single(message, call)

    def wait(self, messages: tuple[Action, ...]) -> None:
        """Have the compute stream wait for messages. Sent tensors are no longer needed afterwards."""
        for message in messages:
            self._wait(message)

    def finish(self) -> None:
        """Wait for all messages that nobody has waited for."""
        self.wait(tuple(self._events))

    def _wait(self, message: Action) -> None:
        event = self._events.pop(message, None)
        if event is None:
            return
        self.builder.stream_wait(COMPUTE, event)
        self._free_sent(message)

    def _free_sent(self, message: Action) -> None:
        """Free what was sent, unless its stage keeps it."""
        if message.kind == "SEND_F" and self.empties_outputs:
            self._allocate(-1, output_of(message.stage), message.stage, message.micro_batch)
        elif message.kind == "SEND_B":
            self._allocate(-1, RESIDUAL, message.stage, message.micro_batch)

    def _post_batch(self, call: MessageCall) -> None:
        """`batch_isend_irecv` on the pipeline's communicator."""
        if not call.messages:
            return
        group, size = self.builder.groups[PIPELINE], self.builder.groups[PIPELINE].size
        messages = [
            Message(_direction(message), self._bytes(message), _shift(self._peer(message) - self.rank, size))
            for message in call.messages
        ]
        event = self._issue(messages, group.name, call)
        self._events |= dict.fromkeys(call.messages, event)

    def _post_single(self, message: Action, call: MessageCall) -> None:
        """`isend` or `irecv` on the communicator of the two ranks."""
        peer = self._peer(message)
        low, high = min(self.rank, peer), max(self.rank, peer)
        sender = self.rank if _direction(message) == "send" else peer
        name = f"{PIPELINE} {low}-{high}" + (f" from {sender}" if call.has_communicator_per_direction else "")
        groups = self.builder.groups
        if name not in groups:
            groups[name] = Group(name, groups[PIPELINE].members[:, [low, high]])
        shift = 1 if peer > self.rank else -1
        self._events[message] = self._issue(
            [Message(_direction(message), self._bytes(message), shift)], name, call
        )

    def _issue(self, messages: list[Message], group: str, call: MessageCall) -> int:
        builder = self.builder
        dtype = self.stages[call.messages[0].stage].message_dtype
        for _ in range(call.num_shape_messages):
            shapes = [message._replace(bytes=_SHAPE_BYTES) for message in messages]
            builder.host_wait(builder.point_to_point(shapes, "int64", group, stream=group))
        builder.wait_stream(group, COMPUTE)
        return builder.point_to_point(messages, dtype, group, stream=group)

    def _peer(self, message: Action) -> int:
        return self.ranks[message.stage + (1 if message.kind in _NEXT else -1)]

    def _is_local(self, stage: int, step: int) -> bool:
        """Whether the stage before (-1) or behind (1) is on this rank too."""
        return self.ranks[stage + step] == self.rank

    def _bytes(self, message: Action) -> int:
        return self.stages[message.stage].sent_bytes

    def _allocate(
        self, sign: int, owner: str, stage: int, micro_batch: int | None, size: int | None = None
    ) -> None:
        """Allocate (`sign` 1) or free (-1) `size` bytes of a micro-batch, those of a message if None."""
        number = 0 if micro_batch is None else micro_batch
        count = self.stages[stage].sent_bytes if size is None else size
        self.builder.activations(sign * count, owner, number)


def _direction(message: Action) -> Direction:
    return "send" if message.kind.startswith("SEND") else "recv"


def _shift(distance: int, size: int) -> int:
    """The distance around the pipeline's ring, at most half of it."""
    return (distance + size // 2) % size - size // 2 if abs(distance) == size - 1 and size > 2 else distance


def input_of(stage: int) -> str:
    """The owner of a stage's received activation."""
    return f"input of stage {stage}"


def output_of(stage: int) -> str:
    """The owner of the memory of a stage's output."""
    return f"output of stage {stage}"
