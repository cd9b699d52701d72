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
_APART = 1 / 200  # of the step, between kernels of the optimizer


class Box(NamedTuple):
    """One action of a pipeline rank from its first kernel to its last, on the trace's clock."""

    kind: str
    """F, B, I or W as in `zsim.plan.pipeline.schedules.Action`, "" for the optimizer. The optimizer is cut
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
    own = trace.of_rank(rank)
    order = own.info_indices.argsort(kind="stable")
    starts, ends = own.start_seconds[order].tolist(), own.end_seconds[order].tolist()
    chunk_of = {stage: chunk for chunk, stage in enumerate(_stages(program))}
    found = []
    for (kind, stage, micro_batch), places in program.once(_places_by_action):
        spans = [(starts[place], ends[place]) for place in places]
        apart = math.inf if kind else _APART * trace.step_seconds
        for start, end in _runs(spans, apart):
            found.append(Box(kind, stage, chunk_of.get(stage, -1), micro_batch, start, end))
    return tuple(found)


def _runs(spans: Sequence[tuple[float, float]], apart: float) -> list[tuple[float, float]]:
    """The `spans` from the first to the last, in order, cut where more than `max_gap` seconds are between."""
    runs: list[tuple[float, float]] = []
    for start, end in spans:
        if runs and start - runs[-1][1] <= apart:
            runs[-1] = (runs[-1][0], max(runs[-1][1], end))
        else:
            runs.append((start, end))
    return runs


def stages_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """The stages that `rank` computes, in the model's order."""
    return _stages(plan.program_on(rank))


def _stages(program: Program) -> tuple[int, ...]:
    return tuple(sorted({action.stage for _, action in program.actions if action.kind in DRAWN}))


def _places_by_action(program: Program) -> list[tuple[tuple[str, int, int], list[int]]]:
    """By drawn action (kind, stage, micro-batch), and for the optimizer at the end, its kernels on the
    compute stream, as positions among the program's ops with work.
    """
    begins = [*program.actions, (len(program.ops), None)]
    found: list[tuple[tuple[str, int, int], list[int]]] = []
    updating: list[int] = []
    current, following = -1, 0
    place = -1
    for number, op in enumerate(program.ops):
        while following < len(begins) and begins[following][0] <= number:
            action = begins[following][1]
            following += 1
            current = -1
            if action is not None and action.kind in DRAWN:
                micro_batch = -1 if action.micro_batch is None else action.micro_batch
                found.append(((action.kind, action.stage, micro_batch), []))
                current = len(found) - 1
        if op.work is None:
            continue
        place += 1
        if op.stream != COMPUTE or not isinstance(op.work, Kernels):
            continue
        if op.phase == "optimizer":
            updating.append(place)
        elif op.phase in COMPUTING and current >= 0:
            found[current][1].append(place)
    return [*found, (("", -1, -1), updating)]
