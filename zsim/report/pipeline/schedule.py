"""The schedule of a pipeline as it ran: when each rank's forwards and backwards of micro-batches were."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Kernels, Plan, Program
from zsim.trace.trace import Trace

COMPUTING = frozenset({"forward", "recompute", "backward"})
DRAWN = ("F", "B", "I", "W")
_MAX_GAP = 1 / 200  # of the step, between kernels of the optimizer


class Box(NamedTuple):
    """One action of a pipeline rank from its first kernel to its last, on the trace's clock."""

    kind: str
    """F, B, I or W as in `zsim.plan.actions.Action`, "" for the optimizer. The optimizer is cut
    where it waits for other ranks, and its stage, chunk and micro-batch are -1.
    """
    stage: int
    chunk: int
    """The index of the stage among the rank's stages, 0 without virtual stages."""
    micro_batch: int
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


def boxes(plan: Plan, trace: Trace, rank: int) -> tuple[Box, ...]:
    """The actions of `rank` in the order of its host. `trace` is the step of `plan`, with one span per op
    with work. Actions without kernels on the compute stream are left out.
    """
    program = plan.program_on(rank)
    rank_trace = trace.select_rank(rank)
    order = rank_trace.info_indices.argsort(kind="stable")
    starts, ends = rank_trace.start_seconds[order].tolist(), rank_trace.end_seconds[order].tolist()
    chunk_of = {stage: chunk for chunk, stage in enumerate(_stages(program))}
    actions = []
    for (kind, stage, micro_batch), positions in program.memoize(_kernels_of_actions):
        spans = [(starts[position], ends[position]) for position in positions]
        max_gap = math.inf if kind else _MAX_GAP * trace.step_seconds
        for start, end in _merge_spans(spans, max_gap):
            actions.append(Box(kind, stage, chunk_of.get(stage, -1), micro_batch, start, end))
    return tuple(actions)


def _merge_spans(spans: Sequence[tuple[float, float]], max_gap: float) -> list[tuple[float, float]]:
    """The `spans` from the first to the last, in order, cut where more than `max_gap` seconds are between."""
    runs: list[tuple[float, float]] = []
    for start, end in spans:
        if runs and start - runs[-1][1] <= max_gap:
            runs[-1] = (runs[-1][0], max(runs[-1][1], end))
        else:
            runs.append((start, end))
    return runs


def stages_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """The stages that `rank` computes, in the model's order."""
    return _stages(plan.program_on(rank))


def _stages(program: Program) -> tuple[int, ...]:
    return tuple(sorted({action.stage for _, action in program.actions if action.kind in DRAWN}))


def _kernels_of_actions(program: Program) -> list[tuple[tuple[str, int, int], list[int]]]:
    """By drawn action (kind, stage, micro-batch), and for the optimizer at the end, its kernels on the
    compute stream, as positions among the program's ops with work.
    """
    begins = [*program.actions, (len(program.ops), None)]
    kernels_of_actions: list[tuple[tuple[str, int, int], list[int]]] = []
    optimizer_kernels: list[int] = []
    current, next_begin = -1, 0
    position = -1
    for number, op in enumerate(program.ops):
        while next_begin < len(begins) and begins[next_begin][0] <= number:
            action = begins[next_begin][1]
            next_begin += 1
            current = -1
            if action is not None and action.kind in DRAWN:
                micro_batch = -1 if action.micro_batch is None else action.micro_batch
                kernels_of_actions.append(((action.kind, action.stage, micro_batch), []))
                current = len(kernels_of_actions) - 1
        if op.work is None:
            continue
        position += 1
        if op.stream != COMPUTE or not isinstance(op.work, Kernels):
            continue
        if op.phase == "optimizer":
            optimizer_kernels.append(position)
        elif op.phase in COMPUTING and current >= 0:
            kernels_of_actions[current][1].append(position)
    return [*kernels_of_actions, (("", -1, -1), optimizer_kernels)]
