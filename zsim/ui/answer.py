"""The page's answer for one experiment: its simulation in words and figures."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zsim.engine.micro_batches import SimulatedStep, simulate_step
from zsim.explain.report_of import report_of_step
from zsim.explain.sampled_micro_batches import full_variants
from zsim.report.fit import Fit, fit_of, format_torch_memory, moment_notes
from zsim.report.memory import Ledger
from zsim.report.report import Report
from zsim.report.views.html import figures
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.report import DEVICES, tiles
from zsim.report.views.html.timeline import close_ups, report_timeline
from zsim.report.views.text.sentences import format_trust, headline
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.formats.export import ExportedFiles, export_files
from zsim.study.search import advice
from zsim.trace.trace import Trace
from zsim.ui.form import resolved_values
from zsim.ui.prediction import Prediction, check_size
from zsim.units import format_bytes, format_seconds

_MAX_GPUS = 16_384
_DOUBLINGS = 3  # of the number of GPUs in the scaling curve, up and down


@dataclass(frozen=True)
class Tier:
    """One memory tier: its peak, its capacity (None: no known limit) and a sentence."""

    name: str
    peak_bytes: int
    capacity_bytes: int | None
    words: str

    @property
    def fits(self) -> bool:
        return self.capacity_bytes is None or self.peak_bytes <= self.capacity_bytes

    @property
    def fraction(self) -> float:
        return self.peak_bytes / self.capacity_bytes if self.capacity_bytes else 0.0


@dataclass(frozen=True)
class Answer:
    """One simulated experiment in words and figures."""

    title: str
    tokens_per_second: float
    fit: Fit
    has_room: bool
    """All tensors have room, so no changes are searched."""
    limit: str
    trust: str
    outcome: Prediction
    tiles: tuple[tuple[str, str, str], ...]
    tiers: tuple[Tier, ...]
    figures: Mapping[str, Figure]
    """The report's figures, by name."""
    views: tuple[tuple[str, float, float], ...]
    notes: tuple[str, ...]
    evidence: Mapping[str, str]
    resolved: Mapping[str, str]
    exported: ExportedFiles
    counts: tuple[int, ...]
    step: SimulatedStep | None


def answer(experiment: Experiment) -> Answer:
    """Simulate and explain the experiment.

    Raises InputError and NotSimulatedError as `zsim.simulate` does, and for a step of more ops than the page
    simulates.
    """
    start_seconds = time.perf_counter()
    job = resolve(experiment)
    check_size(job)
    step = simulate_step(job)
    wall_seconds = time.perf_counter() - start_seconds
    report = report_of_step(step, wall_seconds, full_variants(step, has_range=False))
    trace = step.whole_outcome.trace
    return Answer(
        title=headline(report),
        tokens_per_second=report.step_tokens / report.step_seconds,
        fit=fit_of(report),
        has_room=report.fits,
        limit=report.limit,
        trust=format_trust(report),
        outcome=Prediction.of(report),
        tiles=tuple(tile for tile in tiles(report) if tile[0] not in ("GPU memory", "HFU")),
        tiers=tuple(_tiers(report)),
        figures=dict(_figures(report, trace)),
        views=tuple(close_ups(trace.rank_view(report.rank), report.rank)),
        notes=(*report.notes, *moment_notes(report)),
        evidence=report.evidence,
        resolved=resolved_values(job),
        exported=export_files(job),
        counts=tuple(scaling_counts(job)),
        step=step,
    )


def scaling_counts(job: Job) -> list[int]:
    """The job's number of GPUs, halved and doubled a few times. Complete nodes above one node."""
    world, per_node = job.world_size, job.cluster.gpus_per_node
    halves = [world >> power for power in range(_DOUBLINGS, 0, -1) if world % (1 << power) == 0]
    doubles = [world << power for power in range(1, _DOUBLINGS + 1) if world << power <= _MAX_GPUS]
    possible_counts = [count for count in (*halves, *doubles) if count <= per_node or count % per_node == 0]
    return sorted({world, *possible_counts})


def remedy_settings(experiment: Experiment) -> dict[str, dict[str, Any]]:
    """Changes that make an experiment fit that does not: the settings that each changes, by its words."""
    fewest_gpus, remedy = advice(experiment)
    settings_by_words: dict[str, dict[str, Any]] = {}
    if remedy is not None:
        settings_by_words[f"{remedy.words} ({format_seconds(remedy.step_seconds)} per step)"] = dict(
            remedy.overrides
        )
    if fewest_gpus is not None:
        settings_by_words[f"{fewest_gpus:,} GPUs"] = {"gpus": fewest_gpus, "nodes": None}
    return settings_by_words


def _tiers(report: Report) -> Iterator[Tier]:
    for device, peak in report.peaks.items():
        if not peak.total:
            continue
        capacity = report.capacity_bytes.get(device)
        used_text = format_bytes(peak.total)
        if capacity is None:
            words = f"{used_text}, no limit known"
        elif peak.total <= capacity:
            words = f"{used_text} of {format_bytes(capacity)}, {format_bytes(capacity - peak.total)} free"
        else:
            words = f"{used_text} of {format_bytes(capacity)}, {format_bytes(peak.total - capacity)} too much"
        if device == "gpu" and report.allocator is not None:
            words += f"; {format_torch_memory(report)}"
        yield Tier(DEVICES[device], peak.total, capacity, words)


def _figures(report: Report, trace: Trace) -> Iterator[tuple[str, Any]]:
    yield "step", figures.step_breakdown(report)
    yield "timeline", report_timeline(report, trace.rank_view(report.rank))
    ledger = Ledger.of(trace.memory)
    for device, peak in report.peaks.items():
        if peak.total:
            usage = ledger.fullest(device, report.gpus_per_node, report.nodes)
            yield f"waterfall-{device}", figures.memory_waterfall(report, device)
            yield f"memory-{device}", figures.memory_timeline(usage, report, device)
