"""The section of a report on its pipeline: the stages, the bubbles, and the schedule as it ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zsim.plan.node_types import pipeline_rank_of
from zsim.plan.ops import Plan
from zsim.report.breakdown import Breakdown, step_breakdown
from zsim.report.critical.path import Peers
from zsim.report.memory import Ledger, Peak, peak
from zsim.report.pipeline.bubbles import Box, Bubbles, Interval, boxes, is_pipeline
from zsim.specs.strategy.training import DEFAULT_CONNECTIONS
from zsim.trace.trace import Trace

_TOLERANCE = 1e-9  # of the step


@dataclass(frozen=True, slots=True)
class PipelineRow:
    """One pipeline rank, by its first simulated GPU. Times are on the clock of the trace."""

    rank: int
    first_rank: int
    """The rank of its first simulated GPU."""
    layers: int | None
    """Number of layers of all its stages. None where unknown."""
    peak: Peak
    """The peak of its GPU memory."""
    breakdown: Breakdown
    """The breakdown of its step."""
    bubbles: tuple[Interval, ...]
    """The bubbles of its compute stream."""
    boxes: tuple[Box, ...]
    """Its forwards and backwards."""
    begin_seconds: float = 0.0
    """When its step begins."""

    @property
    def busy_seconds(self) -> float:
        """Seconds in which its compute stream runs kernels."""
        return _busy(self.breakdown)

    @property
    def bubble_seconds(self) -> float:
        return self.breakdown.seconds["bubble"]

    def marks(self, num_chunks: int) -> list[tuple[str, float, float]]:
        """The forwards and backwards by name, "F3", with virtual stages "F3 of stage 5"."""
        marks = []
        for box in self.boxes:
            stage_label = f" of stage {box.stage}" if num_chunks > 1 and box.kind else ""
            name = f"{box.kind}{box.micro_batch}{stage_label}" if box.kind else "optimizer"
            marks.append((name, box.start_seconds, box.end_seconds))
        return marks

    def to_dict(self) -> dict[str, Any]:
        """The entry of `stages` in `--json`."""
        return {
            "rank": self.rank,
            "layers": self.layers,
            "peak_bytes": self.peak.total,
            "busy_seconds": self.busy_seconds,
            "bubble_seconds": self.bubble_seconds,
            "first_rank": self.first_rank,
            "bytes_at_peak": dict(self.peak.at_total),
            "breakdown_seconds": dict(self.breakdown.seconds),
        }


@dataclass(frozen=True, slots=True)
class PipelineSection:
    """A pipeline's ranks in their order."""

    rows: tuple[PipelineRow, ...]
    micro_batches: int
    """Number of micro-batches of one pipeline in a step."""
    step_seconds: float
    shown_seconds: float | None = None
    """Seconds of the simulated step, where that has only some of the micro-batches."""

    @property
    def bubble_fraction(self) -> float:
        """Mean over the ranks of the part of the step that is a bubble."""
        return sum(row.bubble_seconds for row in self.rows) / len(self.rows) / self.step_seconds

    @property
    def slowest(self) -> PipelineRow:
        """The rank that the others wait for: that with the least bubble, the first of equal ones."""
        least = min(row.bubble_seconds for row in self.rows)
        slack = _TOLERANCE * self.step_seconds
        return next(row for row in self.rows if row.bubble_seconds <= least + slack)

    @property
    def fullest(self) -> PipelineRow:
        """The rank with the highest peak of GPU memory, the first of equal ones."""
        return max(self.rows, key=lambda row: row.peak.total)

    @property
    def num_chunks(self) -> int:
        """The highest number of stages on a rank."""
        return max((box.chunk + 1 for row in self.rows for box in row.boxes), default=1)

    @property
    def drawn_seconds(self) -> float:
        """The step that `boxes` and `bubbles` are of."""
        return self.step_seconds if self.shown_seconds is None else self.shown_seconds

    @property
    def drawn_micro_batches(self) -> int:
        """Number of micro-batches in the boxes."""
        return len({box.micro_batch for row in self.rows for box in row.boxes if box.kind == "F"})

    @property
    def bounds(self) -> tuple[float, float]:
        """When the first rank began its step and the last one ended it, on the clock of the trace."""
        begins = [row.begin_seconds for row in self.rows]
        return min(begins), max(begins) + self.drawn_seconds

    def mean_seconds(self) -> dict[str, float]:
        """The step by cause, as mean over the ranks."""
        names, count = self.rows[0].breakdown.seconds, len(self.rows)
        return {name: sum(row.breakdown.seconds[name] for row in self.rows) / count for name in names}


def pipeline_section(
    plan: Plan,
    trace: Trace,
    peers: Peers,
    *,
    layers: Sequence[int] = (),
    connections: int = DEFAULT_CONNECTIONS,
) -> PipelineSection | None:
    """The section of the simulated step of `plan`. None where the ranks form no pipeline.

    `layers` is the number of each pipeline rank, () where unknown. `peers` and `connections` are those of
    `Bubbles`.
    """
    if not is_pipeline(plan):
        return None
    ledger, bubbles = Ledger.of(trace.memory), Bubbles(plan, trace, peers, connections)
    ranks_of_stages = _ranks_of_stages(plan, trace)
    rows = []
    for number, ranks in ranks_of_stages.items():
        breakdowns = {rank: bubbles.split_breakdown(rank_breakdown(trace, rank), rank) for rank in ranks}
        rank = max(ranks, key=lambda rank: _busy(breakdowns[rank]))  # of several types of GPUs, the slowest
        breakdown = breakdowns[rank]
        rows.append(
            PipelineRow(
                number,
                rank,
                layers[number] if layers else None,
                max(
                    (peak(ledger.usage("gpu", {member: 1})) for member in ranks),
                    key=lambda gpu_peak: gpu_peak.total,
                ),
                breakdown,
                tuple(bubbles.intervals(rank)),
                boxes(plan, trace, rank),
                trace.begins.get(rank, 0.0),
            )
        )
    section = PipelineSection(tuple(rows), 0, trace.step_seconds, trace.step_seconds)
    return replace(section, micro_batches=section.drawn_micro_batches)


def _busy(breakdown: Breakdown) -> float:
    return breakdown.seconds["compute"] + breakdown.seconds["optimizer"]


def rank_breakdown(trace: Trace, rank: int) -> Breakdown:
    """The breakdown of one rank on the clock of the rank's step."""
    return step_breakdown(trace.rank_view(rank), rank)


def _ranks_of_stages(plan: Plan, trace: Trace) -> Mapping[int, list[int]]:
    """By pipeline rank, the first simulated rank of each of its programs."""
    ranks_of_stages: dict[int, list[int]] = {}
    for program, rank in first_ranks(plan, trace).items():
        ranks_of_stages.setdefault(pipeline_rank_of(plan, program), []).append(rank)
    return dict(sorted(ranks_of_stages.items()))


def first_ranks(plan: Plan, trace: Trace) -> Mapping[int, int]:
    """The first simulated rank of each program."""
    rank_of_program: dict[int, int] = {}
    for rank in dict.fromkeys(trace.ranks.tolist()):
        rank_of_program.setdefault(int(plan.program_of[rank]), rank)
    return rank_of_program
