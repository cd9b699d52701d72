"""Steps of nanotron's pipeline engines, for blocks that pass one tensor on.

Source: nanotron (commit 2411b022) `src/nanotron/parallel/pipeline_parallel/`: `engine.py`,
`run_communication` of `state.py`, `send_tensors` and `recv_tensors` of `p2p.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.plan.actions import Action, Kind, MessageCall, Step
from zsim.plan.pipeline.pipeline_checks import check_micro_batches
from zsim.plan.pipeline.runtime import PipelineRuntime

_SHAPES = 2  # `_send_meta`: seven numbers, then sizes and strides; the receiver's host reads both


def all_forward_all_backward_steps(ranks: int, micro_batches: int) -> list[list[Step]]:
    """`AllForwardAllBackwardPipelineEngine`: every computation comes after its receive and before its
    send.
    """
    programs = []
    for rank in range(ranks):
        steps: list[Step] = []
        for number in range(micro_batches):
            steps += [*_lone_message("RECV_F", ranks, rank, number), Action("F", rank, number)]
            steps += _lone_message("SEND_F", ranks, rank, number)
        for number in range(micro_batches):
            steps += [*_lone_message("RECV_B", ranks, rank, number), Action("B", rank, number)]
            steps += _lone_message("SEND_B", ranks, rank, number)
        programs.append(steps)
    return programs


def one_forward_one_backward_steps(ranks: int, micro_batches: int) -> list[list[Step]]:
    """`OneForwardOneBackwardPipelineEngine`: in the steady turns a forward's output leaves only in front of
    the backward that follows, and a backward's gradient only after the receive of the next forward's input.
    """
    programs = []
    for rank in range(ranks):
        num_warmup = ranks - 1 - rank
        steps: list[Step] = []
        for number in range(num_warmup):
            steps += [*_lone_message("RECV_F", ranks, rank, number), Action("F", rank, number)]
            steps += _lone_message("SEND_F", ranks, rank, number)
        turns = micro_batches - num_warmup
        for number in range(turns):
            steps += _lone_message("RECV_F", ranks, rank, number + num_warmup)
            steps += _lone_message("SEND_B", ranks, rank, number - 1) if number else []
            steps.append(Action("F", rank, number + num_warmup))
            steps += _lone_message("SEND_F", ranks, rank, number + num_warmup)
            steps += [*_lone_message("RECV_B", ranks, rank, number), Action("B", rank, number)]
        steps += _lone_message("SEND_B", ranks, rank, turns - 1) if turns else []
        for number in range(turns, micro_batches):
            steps += [*_lone_message("RECV_B", ranks, rank, number), Action("B", rank, number)]
            steps += _lone_message("SEND_B", ranks, rank, number)
        programs.append(steps)
    return programs


def _lone_message(kind: Kind, ranks: int, rank: int, number: int) -> list[Step]:
    """One lone message, which the compute stream waits for. None beyond the ends of the pipeline."""
    is_back = kind in ("RECV_F", "SEND_B")
    if rank == (0 if is_back else ranks - 1):
        return []
    return [
        MessageCall(
            (Action(kind, rank, number),), is_batched=False, waits="stream", num_shape_messages=_SHAPES
        )
    ]


@dataclass(frozen=True, slots=True)
class NanotronRuntime(PipelineRuntime):
    """nanotron's `pipeline_parallel/engine.py`."""

    def check(self, micro_batches: int) -> None:
        least = self.parallelism.pipeline - 1
        if self.parallelism.schedule == "1f1b":
            expected = f"at least pipeline ranks - 1, {least}"
            check_micro_batches(self.parallelism, micro_batches, expected, lambda number: number >= least)

    def steps(self, micro_batches: int) -> list[list[Step]]:
        if self.parallelism.schedule == "gpipe":
            return all_forward_all_backward_steps(self.parallelism.pipeline, micro_batches)
        return one_forward_one_backward_steps(self.parallelism.pipeline, micro_batches)
