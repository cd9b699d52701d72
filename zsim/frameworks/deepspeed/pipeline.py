"""Steps and buffers of DeepSpeed's `PipelineEngine`: the copies, cuts and gathers of a rank around its
blocking sends and receives.

Source: DeepSpeed 0.19.8 `TrainSchedule` of `deepspeed/runtime/pipe/schedule.py`, `PipelineEngine` and its
`_exec_schedule` of `deepspeed/runtime/pipe/engine.py`, `send` and `recv` of `deepspeed/runtime/pipe/p2p.py`,
`PartitionedTensor` of `deepspeed/runtime/utils.py`.

# [Note: pipeline buffers]
One tensor receives all activations of a stage, another all gradients. An activation is copied out of it
(`recvd`), and once more before the forward. The first copy stays until the gradient of the input has been
sent, an output until its backward has ended: up to max(2, min(stages after this one and itself,
micro-batches)) of each (`TrainSchedule.num_pipe_buffers`). Nobody empties the last stage's outputs: the
logits of the latest micro-batches are held until others take their places.

# [Note: a part from each]
If tensor-parallel ranks share a stage, each sends 1/t of an activation (`pipe_partitioned`) and of a gradient
(`grad_partitioned`), after the tensor's shape and parts in int64, which are copied to the GPU while the host
waits. The receiver gathers the input before its forward, and before the backward its own output, which it had
replaced by its part, and the gradient. Without `grad_partitioned` gradients are sent in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zsim.cost.kernels.shapes import BatchShape
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.deepspeed.settings.schema import PipelineBlock
from zsim.operations import Loss
from zsim.operations.operation import operations_of
from zsim.plan.actions import Action, MessageCall, Step
from zsim.plan.builder import COMPUTE, PlanBuilder, move_kernels
from zsim.plan.ops import Memory, Message
from zsim.plan.pipeline.messages import Messenger, input_of, output_of
from zsim.plan.pipeline.run_actions import PipelineRuntime
from zsim.plan.stage import Stage
from zsim.plan.walk import RESIDUAL
from zsim.specs.strategy.parallelism import PIPELINE, TENSOR

_LOSSES_BYTES = 2 * 4  # the replica's loss and the mean over the replicas, fp32


class DeepSpeedMessenger(Messenger):
    """Messages of the stage that a pipeline rank holds: see the module's notes. `settings` is the JSON's
    `pipeline`.
    """

    def __init__(
        self,
        builder: PlanBuilder,
        stages: Mapping[int, Stage],
        ranks: Sequence[int],
        rank: int,
        settings: PipelineBlock,
    ) -> None:
        super().__init__(builder, stages, ranks, rank, empties_outputs=False)
        (self.stage,) = stages.values()
        sharing = self.stage.parallelism.tensor
        self.activation_parts = sharing if settings.pipe_partitioned else 1
        self.gradient_parts = sharing if settings.grad_partitioned else 1
        self.message_bytes = self.stage.message_bytes
        self._shape_bytes = 8 * (sharing + 7)  # dimensions, 3 sizes, parts, rank, t + 1 offsets

    def resident(self) -> list[Memory]:
        """The tensors that receive, and the logits of earlier micro-batches."""
        memories = []
        if not self.stage.is_first:
            memories.append(Memory("buffers", self.message_bytes // self.activation_parts))
        if not self.stage.is_last:
            memories.append(Memory("buffers", self.message_bytes // self.gradient_parts))
        if self.stage.training.gradient_accumulation_steps > 1:
            memories.append(Memory("buffers", self._logits_bytes))
        return memories

    @property
    def _logits_bytes(self) -> int:
        """Bytes of the last stage's outputs, which Megatron-DeepSpeed's GPTModelPipe casts to fp32."""
        losses = operations_of(self.stage.workload.model.after, Loss)
        tokens = BatchShape.of(self.stage.training).tokens
        return sum(tokens * loss.vocab_size * DTYPE_BYTES["fp32"] for loss in losses)

    # -- around the computation ---------------------------------------------------------------------------

    def pre_forward(self, stage: int, micro_batch: int) -> None:
        if micro_batch == 0:
            self.builder.allocate("buffers", self._logits_bytes)  # left from the step before
        if self.stage.is_first:
            return
        part = self.message_bytes // self.activation_parts
        self.builder.kernels("copy input", move_kernels(part, part))
        if self.activation_parts > 1:
            self._gather("input", self.activation_parts)
            self._allocate(-1, input_of(stage), stage, micro_batch, part)

    def post_forward(self, stage: int, micro_batch: int) -> None:
        if self.stage.is_last:
            self.builder.free("buffers", self._logits_bytes)
            return
        if self.activation_parts > 1:
            self._partition("output", self.activation_parts)
        self._allocate(1, output_of(stage), stage, micro_batch, self.message_bytes // self.activation_parts)

    def pre_backward(self, stage: int, micro_batch: int) -> None:
        if self.stage.is_last:
            return
        if self.activation_parts > 1 and self.gradient_parts > 1:
            self._gather_output(stage, micro_batch)
        if self.gradient_parts > 1:
            self._gather("gradient", self.gradient_parts)
        self._allocate(1, RESIDUAL, stage, micro_batch)

    def end_gradients(self, stage: int, micro_batch: int) -> None:
        if self.stage.is_last:
            self.builder.allocate("buffers", self._logits_bytes)
        else:
            output_bytes = self.message_bytes + (
                self.message_bytes // self.activation_parts if self.activation_parts > 1 else 0
            )
            self._allocate(-1, output_of(stage), stage, micro_batch, output_bytes)
        if self.activation_parts > 1 and not self.stage.is_first:
            self._allocate(1, input_of(stage), stage, micro_batch)  # until its gradient is sent

    def end_step(self) -> None:
        """`_aggregate_total_loss`: the last stage averages the loss over its data-parallel ranks and hands
        it to the other stages, whose host waits for a copy of zeros to the GPU first."""
        builder = self.builder
        builder.free("buffers", self._logits_bytes)
        if self.stage.is_last:
            data = self.stage.group()
            if data.size > 1:
                builder.collective("all_reduce", 4, "fp32", data.name, stream=COMPUTE, name="all_reduce loss")
        else:
            builder.host_wait(builder.record(COMPUTE))
            builder.host("place of the losses")
        builder.collective(
            "broadcast", _LOSSES_BYTES, "fp32", PIPELINE, stream=COMPUTE, name="broadcast losses"
        )

    # -- messages -----------------------------------------------------------------------------------------

    def post(self, call: MessageCall) -> None:
        """Each message alone, and whatever goes before and after it."""
        for message in call.messages:
            kind, stage, micro_batch = message[0], message.stage, message.micro_batch or 0
            if kind == "SEND_B" and self.gradient_parts > 1:
                self._partition("gradient", self.gradient_parts)
            if kind == "RECV_B" and self.activation_parts > 1 and self.gradient_parts == 1:
                self._gather_output(stage, micro_batch)
            self._post_single(message, call)
            self._wait(message)
            if kind == "RECV_F":
                part = self.message_bytes // self.activation_parts
                self._allocate(1, input_of(stage), stage, micro_batch, part)
                self.builder.kernels("copy received input", move_kernels(part, part))
            elif kind == "SEND_B":
                self._allocate(-1, input_of(stage), stage, micro_batch)

    def _bytes(self, message: Action) -> int:
        is_activation = message.kind in ("SEND_F", "RECV_F")
        return self.message_bytes // (self.activation_parts if is_activation else self.gradient_parts)

    def _issue(self, messages: list[Message], group: str, call: MessageCall) -> int:
        """Issue the message, and the shape first where a part is sent."""
        if messages[0].bytes < self.message_bytes:
            self.builder.wait_stream(group, COMPUTE)
            shapes = [message._replace(bytes=self._shape_bytes) for message in messages]
            self.builder.point_to_point(shapes, "int64", group, stream=group)
        return super()._issue(messages, group, call)

    # -- parts --------------------------------------------------------------------------------------------

    def _partition(self, label: str, num_parts: int) -> None:
        """`PartitionedTensor` of a tensor, and `to_meta`, a blocking copy."""
        size, builder = self.message_bytes // num_parts, self.builder
        builder.kernels(f"cut {label}", move_kernels(size, size))
        builder.host_wait(builder.record(COMPUTE))
        builder.host(f"shape of {label}")

    def _gather(self, label: str, num_parts: int) -> None:
        """`full`: gather into zeros, and copy."""
        builder, size = self.builder, self.message_bytes
        builder.allocate("buffers", size)
        builder.kernels(f"zeros for {label}", move_kernels(0, size))
        dtype = self.stage.message_dtype
        builder.collective("all_gather", size, dtype, TENSOR, stream=COMPUTE, name=f"all_gather {label}")
        builder.kernels(f"copy gathered {label}", move_kernels(size, size))
        builder.free("buffers", size)

    def _gather_output(self, stage: int, micro_batch: int) -> None:
        self._gather("output", self.activation_parts)
        self._allocate(1, output_of(stage), stage, micro_batch)


def train_schedule_steps(ranks: int, micro_batches: int) -> list[list[Step]]:
    """The steps of 2 (micro-batches + ranks - 1) slots, per pipeline rank.

    Stage s has forwards in the slots of its own parity, of micro-batch (slot - s) / 2, and backwards in the
    others, of (slot + s + 1) / 2 - ranks. A slot begins with the messages to and from one neighbour, each by
    itself and waited for by the compute stream. With the previous stage the gradient of the slot before goes
    out, then the input comes in. With the next stage the gradient comes in, then the output of the slot
    before goes out. Gradients are reduced after the last slot.
    """
    return [[*_slots(ranks, rank, micro_batches), Action("REDUCE_GRAD", rank)] for rank in range(ranks)]


def _slots(ranks: int, rank: int, micro_batches: int) -> list[Step]:
    steps: list[Step] = []
    previous: Action | None = None
    for slot in range(2 * (micro_batches + ranks - 1)):
        current = _computation(ranks, rank, micro_batches, slot)
        sends = [previous] if previous is not None else []
        is_forward = slot % 2 == rank % 2
        if is_forward and rank > 0:
            steps += [_lone_message(action._replace(kind="SEND_B")) for action in sends]
            steps += [_lone_message(current._replace(kind="RECV_F"))] if current else []
        elif not is_forward and rank < ranks - 1:
            steps += [_lone_message(current._replace(kind="RECV_B"))] if current else []
            steps += [_lone_message(action._replace(kind="SEND_F")) for action in sends]
        steps += [current] if current else []
        previous = current
    return steps


def _computation(ranks: int, rank: int, micro_batches: int, slot: int) -> Action | None:
    """The forward or backward of a slot, None where the micro-batch lies outside the batch."""
    is_forward = slot % 2 == rank % 2
    number = (slot - rank) // 2 if is_forward else (slot + rank + 1) // 2 - ranks
    return Action("F" if is_forward else "B", rank, number) if 0 <= number < micro_batches else None


def _lone_message(message: Action) -> MessageCall:
    return MessageCall((message,), is_batched=False, waits="stream")


@dataclass(frozen=True, slots=True)
class DeepSpeedRuntime(PipelineRuntime):
    """`PipelineEngine`. `settings` is the JSON's `pipeline`."""

    settings: PipelineBlock = field(default_factory=PipelineBlock)

    def steps(self, micro_batches: int) -> list[list[Step]]:
        return train_schedule_steps(self.parallelism.pipeline, micro_batches)

    def messenger(
        self, builder: PlanBuilder, stages: Mapping[int, Stage], ranks: Sequence[int], rank: int
    ) -> DeepSpeedMessenger:
        return DeepSpeedMessenger(builder, stages, ranks, rank, self.settings)
