"""The numbers of a simulated setting, kept to show it with others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

from zsim.engine.micro_batches import SimulatedStep, sample_counts, simulate_step
from zsim.errors import NotSimulatedError, ZsimError
from zsim.explain.report_of import report_of_step
from zsim.explain.sampled_micro_batches import full_variants
from zsim.plan.make import make_plan
from zsim.report.fit import fit_of
from zsim.report.report import Report
from zsim.report.views.text.sentences import headline
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.ui.field import Field
from zsim.ui.form import Form
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
        first_ops, second_ops = _num_ops(job, first), _num_ops(job, second)
    except ZsimError:
        return  # the simulation says what is wrong
    count = first_ops + (second_ops - first_ops) * (steps - first) // (second - first)
    if count > MAX_OPS:
        raise NotSimulatedError(
            f"training.gradient_accumulation_steps: {steps:,} micro-batches are about {count:,} ops; the "
            f"page simulates up to {MAX_OPS:,}. With simulation.every_micro_batch = false, in other "
            "settings, a few are simulated and the rest taken to be alike; zsim run has no such bound"
        )


def _num_ops(job: Job, steps: int) -> int:
    short_job = replace(job, training=replace(job.training, gradient_accumulation_steps=steps))
    return sum(len(program.ops) for program in make_plan(short_job).programs)


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

    def get_step(
        self, token: str, form: Form, field_values: Mapping[str, Any], other_settings: str
    ) -> SimulatedStep:
        """The simulated step of a setting. Raises as `get_prediction` does."""
        step = self.steps.get(token)
        return simulate_step(_job(form, field_values, other_settings)) if step is None else step

    def get_prediction(
        self, token: str, form: Form, field_values: Mapping[str, Any], other_settings: str
    ) -> Prediction:
        """The outcome of a setting. Raises InputError and NotSimulatedError as `zsim.simulate` does."""
        prediction = self.predictions.get(token)
        if prediction is None:
            step = simulate_step(_job(form, field_values, other_settings))
            variants = full_variants(step, has_range=False)
            prediction = Prediction.of(report_of_step(step, 0.0, variants))
            self.store(token, prediction)
        return prediction


def _job(form: Form, field_values: Mapping[str, Any], other_settings: str) -> Job:
    job = resolve(form.experiment(field_values, other_settings))
    check_size(job)
    return job


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
        texts = [_text(field_values.get(key)) for field_values, _ in settings]
        if len(set(texts)) > 1:
            yield f"{shown.label} {shown.unit}".strip(), texts
    other_texts = [
        ", ".join(filter(None, map(str.strip, other_settings.splitlines()))) or "none"
        for _, other_settings in settings
    ]
    if len(set(other_texts)) > 1:
        yield "Other settings", other_texts


def _text(value: Any) -> str:
    return "left open" if value is None or value == "" else str(value)
