"""Messages of torch's pipelines, which keep a buffer for every message that a stage will receive.

# [Note: buffers for all micro-batches]
A stage allocates buffers for the inputs and for the gradients of its outputs of all micro-batches once, and
keeps them (`_setup_forward_recv_info`, `_create_grad_recv_info` of torch 2.13
distributed/pipelining/stage.py). A stage on the same rank as its neighbour has the neighbour's tensors
instead. A forward works on its buffer, so that what its first module keeps of the input is the buffer.
Between forward and backward it is counted as the module's. A backward adds to the gradient it received out of
place, for the buffer is still referred to. What a stage sends back is freed once it is sent. Its output stays
for its backward (`fwd_cache`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.cost.kernels.shapes import WorkOptions
from zsim.cost.memory.activations import saves_only_block_input
from zsim.plan.actions import Action, MessageCall
from zsim.plan.builder import PlanBuilder
from zsim.plan.pipeline.messages import Messenger, output_of
from zsim.plan.stage import Stage
from zsim.plan.walk import RESIDUAL

INPUT_BUFFERS, GRADIENT_BUFFERS = "buffers for inputs of stage", "buffers for gradients of stage"


class TorchMessenger(Messenger):
    """Posts the messages of a rank of torch's pipelines: see [Note: buffers for all micro-batches]."""

    def __init__(
        self, builder: PlanBuilder, stages: Mapping[int, Stage], ranks: Sequence[int], rank: int
    ) -> None:
        super().__init__(builder, stages, ranks, rank, empties_outputs=False)
        any_stage = next(iter(stages.values()))
        micro_batches = any_stage.training.gradient_accumulation_steps // any_stage.parallelism.passes
        self._slots = max(micro_batches, any_stage.parallelism.buffered_micro_batches)
        self._reads_buffer = {number for number, stage in stages.items() if _keeps_input(stage)}

    def begin_step(self) -> None:
        """The buffers that the step before has left."""
        self._allocate_buffers(1)

    def end_step(self) -> None:
        self._allocate_buffers(-1)

    def _allocate_buffers(self, sign: int) -> None:
        for number, stage in self.stages.items():
            for slot in range(self._slots):
                if not stage.is_first:
                    self._allocate(sign, f"{INPUT_BUFFERS} {number}", number, slot)
                if not stage.is_last:
                    self._allocate(sign, f"{GRADIENT_BUFFERS} {number}", number, slot)

    # -- around the computation ---------------------------------------------------------------------------

    def pre_forward(self, stage: int, micro_batch: int) -> None:
        """Wait for the input, whose buffer the stage's first module takes over."""
        self._wait(Action("RECV_F", stage, micro_batch))
        self._take_buffer(-1, stage, micro_batch)

    def pre_backward(self, stage: int, micro_batch: int) -> None:
        """Wait for the gradient of the output."""
        self._wait(Action("RECV_B", stage, micro_batch))

    def begin_gradients(self, stage: int, micro_batch: int) -> None:
        """The first sum of the output's gradient with another is a new tensor. The last stage's walk makes
        its own.
        """
        if not self.stages[stage].is_last:
            self._allocate(1, RESIDUAL, stage, micro_batch)

    def end_gradients(self, stage: int, micro_batch: int) -> None:
        """The input's gradient is there, and what the first module kept is the stage's buffer again."""
        if not self.stages[stage].is_last and not self._is_local(stage, 1):
            self._allocate(-1, output_of(stage), stage, micro_batch)
        if self.stages[stage].is_first:
            return
        if self._is_local(stage, -1):  # takes the place of the buffer of the stage before
            self._allocate(-1, RESIDUAL, stage, micro_batch)
        self._take_buffer(1, stage, micro_batch)

    def _take_buffer(self, sign: int, stage: int, micro_batch: int) -> None:
        if stage in self._reads_buffer:
            self._allocate(sign, f"{INPUT_BUFFERS} {stage}", stage, micro_batch % self._slots)

    # -- messages -----------------------------------------------------------------------------------------

    def _receive(self, message: Action) -> None:
        """Allocate nothing: the buffer is there."""

    def _post(self, call: MessageCall) -> None:
        super()._post(call)
        for message in call.messages:
            if message.kind == "SEND_B":
                size = self.stages[message.stage].message_bytes
                number = message.micro_batch or 0
                self.builder.free_when_done(
                    "activations", size, self._events[message], owner=RESIDUAL, micro_batch=number
                )

    def _free_sent(self, message: Action) -> None:
        """Free nothing: the tensor was freed, or is kept."""


def _keeps_input(stage: Stage) -> bool:
    """Whether a later stage keeps its input, and nothing made of it, until its backward."""
    segment = next((segment for segment in stage.workload.segments if segment.calls), None)
    if stage.is_first or segment is None:
        return False
    first = segment.calls[0].module
    return segment.is_checkpointed or saves_only_block_input(first, WorkOptions.of(stage.training))
