"""Orders of micro-batches as lists of actions, in the vocabulary of torch's pipelines.

Source: `_Action` and `_ComputationType` of torch 2.13 `torch/distributed/pipelining/schedules.py`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal[
    "F", "B", "I", "W", "UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_F", "SEND_B", "RECV_B"
]


class Action(NamedTuple):
    """One action of a rank on one of its stages: F and B are forward and backward of a micro-batch, I and W
    the backward of inputs and of weights where they are split; UNSHARD, RESHARD and REDUCE_GRAD have no
    micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int | None = None

    def __str__(self) -> str:
        """The action as torch writes it: "2F0", "1UNSHARD"."""
        return f"{self.stage}{self.kind}{'' if self.micro_batch is None else self.micro_batch}"


def no_pipeline(micro_batches: int) -> list[list[Action]]:
    """The actions without a pipeline: 0F0 0B0 0F1 0B1 ..., one micro-batch after the other."""
    kinds: tuple[Kind, Kind] = ("F", "B")
    return [[Action(kind, 0, number) for number in range(micro_batches) for kind in kinds]]
