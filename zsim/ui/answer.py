"""The page's answer for one experiment: its simulation in words, in figures, and in numbers that are kept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any

from zsim.api import Result, simulate
from zsim.engine.micro_batches import SimulatedStep, sample_counts
from zsim.engine.simulate import Outcome
from zsim.engine.simulator import Simulator
from zsim.errors import NotSimulatedError, ZsimError
from zsim.explain.variants import full_variants
from zsim.plan.make import make_plan
from zsim.report.fit import Fit, fit_of, format_torch_memory, moment_notes
from zsim.report.report import Report
from zsim.report.views.html import figures
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.report import DEVICES, tiles
from zsim.report.views.html.timeline import close_ups, report_timeline
from zsim.report.views.text.sentences import format_trust, headline
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.tables import Experiment
from zsim.specs.formats.export import ExportedFiles, export_files
from zsim.study.search import advice
from zsim.trace.trace import Trace
from zsim.ui.field import Field
from zsim.ui.form import Form, resolved_values
from zsim.units import format_bytes, format_seconds
from zsim.validated.verdict import Tone

MAX_OPS = 1_000_000  # of all programs together; measured: 2.4 GB and half a minute for a GPT-2 under ZeRO-3
_MIN_COUNTED = 32  # micro-batches, up to which a step is not counted before it is simulated


def check_size(job: Job) -> None:
    """Raises NotSimulatedError for a step of more ops than the page simulates.

    Every micro-batch adds the same number of ops, so plans of one and of two give the number of all.
    """
    steps, ranks = job.training.gradient_accumulation_steps, job.parallelism.pipeline
    if steps <= _MIN_COUNTED or not job.simulation.every_micro_batch:
        return
    second, first = sample_counts(job)
    if first == second:  # of such a schedule time does not follow from few, but its number of ops does
        second, first = 2 * ranks, ranks
    try:
        first_ops, second_ops = (
            make_plan(replace(job, training=replace(job.training, gradient_accumulation_steps=count))).num_ops
            for count in (first, second)
        )
    except ZsimError:
        return  # the simulation says what is wrong
    count = first_ops + (second_ops - first_ops) * (steps - first) // (second - first)
    if count > MAX_OPS:
        raise NotSimulatedError(
            f"training.gradient_accumulation_steps: {steps:,} micro-batches are about {count:,} ops; the "
            f"page simulates up to {MAX_OPS:,}. With simulation.every_micro_batch = false, in other "
            "settings, a few are simulated and the rest taken to be alike; zsim run has no such bound"
        )


class BoundedSimulator(Simulator):
    """Simulates what has no more ops than the page simulates. A loop has those of few micro-batches."""

    def outcome(self, job: Job, *, unfold: bool = False) -> Outcome:
        check_size(job)
        return super().outcome(job, unfold=unfold)


_MAX_PREDICTIONS = 64
_MAX_STEPS = 3  # each with its trace


@dataclass(frozen=True, slots=True)
class Prediction:
    """The numbers of one step."""

    title: str
    verdict: str
    tone: Tone
    step_seconds: float
    step_seconds_range: tuple[float, float] | None
    """Where a measured step lies with a probability of 80 %. None where no validated run is similar."""
    is_shared: bool
    tokens_per_second_per_gpu: float | None
    tokens_per_second: float
    mfu_fraction: float | None
    peak_bytes: int

    @classmethod
    def of(cls, report: Report) -> Prediction:
        fit = fit_of(report)
        return cls(
            title=headline(report),
            verdict=f"{fit.label} ({fit.verdict.chance})",
            tone=fit.tone,
            step_seconds=report.step_seconds,
            step_seconds_range=report.step_seconds_range,
            is_shared=report.is_shared,
            tokens_per_second_per_gpu=report.tokens_per_second_per_gpu,
            tokens_per_second=report.step_tokens / report.step_seconds,
            mfu_fraction=report.mfu_fraction,
            peak_bytes=report.peaks["gpu"].total,
        )


@dataclass(frozen=True)
class Predictions:
    """Predictions by setting, and the last few steps. A step that was simulated lately is not simulated
    again.
    """

    predictions: dict[str, Prediction] = field(default_factory=dict)
    steps: dict[str, SimulatedStep] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def store(self, token: str, outcome: Prediction, step: SimulatedStep | None = None) -> None:
        with self.lock:
            self.predictions[token] = outcome
            while len(self.predictions) > _MAX_PREDICTIONS:
                self.predictions.pop(next(iter(self.predictions)))
            if step is not None:
                self.steps[token] = step
            while len(self.steps) > _MAX_STEPS:
                self.steps.pop(next(iter(self.steps)))

    def get_step(self, form: Form, field_values: Mapping[str, Any], other_settings: str) -> SimulatedStep:
        """The simulated step of a setting. Raises as `get_prediction` does."""
        step = self.steps.get(setting_token(field_values, other_settings))
        if step is None:
            simulator = BoundedSimulator()
            step = simulator.step(simulator.job(form.experiment(field_values, other_settings)))
        return step

    def get_prediction(self, form: Form, field_values: Mapping[str, Any], other_settings: str) -> Prediction:
        """The outcome of a setting. Raises InputError and NotSimulatedError as `zsim.simulate` does."""
        token = setting_token(field_values, other_settings)
        if token not in self.predictions:
            experiment = form.experiment(field_values, other_settings)
            self.store(token, Prediction.of(_simulate(experiment).report))
        return self.predictions[token]


def _simulate(experiment: Experiment) -> Result:
    return simulate(
        experiment, simulator=BoundedSimulator(), variants=partial(full_variants, has_range=False)
    )


def setting_token(field_values: Mapping[str, Any], other_settings: str) -> str:
    """A setting as one text, to tell it from others. Numbers are as a browser writes them, 2.0 as 2."""
    numbers = {
        key: int(value) for key, value in field_values.items() if isinstance(value, float) and value % 1 == 0
    }
    return json.dumps([{**field_values, **numbers}, other_settings], sort_keys=True, default=str)


def differences(
    fields: Mapping[str, Field], settings: Sequence[tuple[Mapping[str, Any], str]]
) -> Iterator[tuple[str, list[str]]]:
    """(label, its text in every setting) of each setting that is not the same in all."""
    for key, shown in fields.items():
        values = [field_values.get(key) for field_values, _ in settings]
        texts = ["left open" if value is None or value == "" else str(value) for value in values]
        if len(set(texts)) > 1:
            yield f"{shown.label} {shown.unit}".strip(), texts
    other_texts = [
        ", ".join(filter(None, map(str.strip, other_settings.splitlines()))) or "none"
        for _, other_settings in settings
    ]
    if len(set(other_texts)) > 1:
        yield "Other settings", other_texts


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
    result = _simulate(experiment)
    job, step, report, trace = result.job, result.step, result.report, result.step.outcome.trace
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
        notes=(*report.notes, *moment_notes(report), *loop_notes(step)),
        evidence=report.evidence,
        resolved=resolved_values(job),
        exported=export_files(job),
        counts=tuple(scaling_counts(job)),
        step=step,
    )


def loop_notes(step: SimulatedStep) -> tuple[str, ...]:
    """Which micro-batches of a loop are shown."""
    counts = f"{step.outcome_micro_batches} of {step.micro_batches:,}"
    note = f"timelines and film show {counts} micro-batches, of which the others repeat one"
    return (note,) if step.is_loop else ()


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
    ledger = report.ledger(trace)
    for device, peak in report.peaks.items():
        if peak.total:
            usage = ledger.fullest(device)
            yield f"waterfall-{device}", figures.memory_waterfall(report, device)
            yield f"memory-{device}", figures.memory_timeline(usage, report, device)
