"""The vocabulary of pipelines: actions of a rank on its stages, calls that send and receive, and waits.

Source of the actions: `_Action` and `_ComputationType` of torch 2.13
`torch/distributed/pipelining/schedules.py`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal[
    "F", "B", "I", "W", "UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_F", "SEND_B", "RECV_B"
]


class Action(NamedTuple):
    """One action of a rank on one of its stages. F and B are forward and backward of a micro-batch, I and W
    the backward of inputs and of weights where they are split. UNSHARD, RESHARD and REDUCE_GRAD have no
    micro-batch. SEND_F sends the stage's output, SEND_B the gradient of its input. RECV_F receives its input,
    RECV_B the gradient of its output.
    """

    kind: Kind
    stage: int
    micro_batch: int | None = None

    def __str__(self) -> str:
        """The action as torch writes it: "2F0", "1UNSHARD"."""
        return f"{self.stage}{self.kind}{'' if self.micro_batch is None else self.micro_batch}"


class Overlap(NamedTuple):
    """A forward and a backward of two stages of a rank that a schedule pairs to overlap their communication.

    torch's own runtime runs the forward, then the backward, and sends the results of both afterwards
    (OVERLAP_F_B in `_PipelineScheduleRuntime._step_microbatches` of torch 2.13). As a step it is Megatron's:
    both run layer by layer (`zsim.frameworks.megatron.pipeline_runtime`).
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        """The pair as torch writes it: "(0F5;7B3)OVERLAP_F_B"."""
        return f"({self.forward};{self.backward})OVERLAP_F_B"


def actions_of(item: Action | Overlap) -> tuple[Action, ...]:
    """The action, or the two of an overlap."""
    return (item.forward, item.backward) if isinstance(item, Overlap) else (item,)


Order = list[Action | Overlap]  # what one pipeline rank computes, without messages


class MessageCall(NamedTuple):
    """Messages that a rank posts in one call, in order: SEND_F, RECV_F, SEND_B, RECV_B of stages of this
    rank.
    """

    messages: tuple[Action, ...]
    is_batched: bool
    """One `batch_isend_irecv` on the communicator of the pipeline's group, in which all messages progress at
    the same time. Otherwise each message has its own call on the communicator of its pair of ranks, where
    messages of both directions wait for one another in the order of posting (ProcessGroupNCCL's
    `pointToPoint`).
    """
    waits: Literal["host", "stream", "use"]
    """The wait after all are posted. "host" blocks the host until the messages and the compute stream are
    done, also without messages. "stream" has the compute stream wait for all.
    "use" has only the action that needs a receive wait for it, and a send is waited for at a MessageWait or
    the step's end.
    """
    has_communicator_per_direction: bool = False
    """The two directions of the pair have a communicator each, named by the sender."""
    num_shape_messages: int = 0
    """The number of small messages before each message, each in its own call on the same communicator. The
    host waits for each.
    """


class MessageWait(NamedTuple):
    """The compute stream waits for messages of earlier calls that wait for their "use"."""

    messages: tuple[Action, ...]


Step = Action | Overlap | MessageCall | MessageWait  # what one pipeline rank's host issues, in order


def no_pipeline(micro_batches: int) -> list[list[Action]]:
    """The actions without a pipeline: 0F0 0B0 0F1 0B1 ..., one micro-batch after the other."""
    kinds: tuple[Kind, Kind] = ("F", "B")
    return [[Action(kind, 0, number) for number in range(micro_batches) for kind in kinds]]
