"""The numbers of a simulated setting, kept to show it with others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from threading import Lock
from typing import Any

from zsim.dataclass import dataclass
from zsim.engine.micro_batches import SimulatedStep, simulate_step
from zsim.explain.report_of import report_of_step
from zsim.explain.variants import step_variants
from zsim.report.fit import fit_of
from zsim.report.report import Report
from zsim.report.views.text.sentences import headline
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.ui.fields import Field
from zsim.ui.form import Form
from zsim.ui.process.size import check_size
from zsim.validated.verdict import Tone

_MAX_KEPT = 64
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
            verdict=f"{fit.label} ({fit.verdict.odds})",
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

    kept: dict[str, Prediction] = field(default_factory=dict)
    steps: dict[str, SimulatedStep] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def keep(self, token: str, outcome: Prediction, step: SimulatedStep | None = None) -> None:
        with self.lock:
            self.kept[token] = outcome
            while len(self.kept) > _MAX_KEPT:
                self.kept.pop(next(iter(self.kept)))
            if step is not None:
                self.steps[token] = step
            while len(self.steps) > _MAX_STEPS:
                self.steps.pop(next(iter(self.steps)))

    def step_of(self, token: str, form: Form, shown: Mapping[str, Any], more: str) -> SimulatedStep:
        """The simulated step of a setting. Raises as `get_prediction` does."""
        found = self.steps.get(token)
        return simulate_step(_job(form, shown, more)) if found is None else found

    def outcome_of(self, token: str, form: Form, shown: Mapping[str, Any], more: str) -> Prediction:
        """The outcome of a setting. Raises InputError and NotSimulatedError as `zsim.simulate` does."""
        found = self.kept.get(token)
        if found is None:
            step = simulate_step(_job(form, shown, more))
            variants = step_variants(step.outcome, has_range=False)
            found = Prediction.of(report_of_step(step, 0.0, variants))
            self.keep(token, found)
        return found


def _job(form: Form, shown: Mapping[str, Any], more: str) -> Job:
    job = resolve(form.experiment(shown, more))
    check_size(job)
    return job


def token_of(shown: Mapping[str, Any], more: str) -> str:
    """A setting as one text, to tell it from others. Numbers are as a browser writes them, 2.0 as 2."""
    numbers = {key: int(value) for key, value in shown.items() if isinstance(value, float) and value % 1 == 0}
    return json.dumps([{**shown, **numbers}, more], sort_keys=True, default=str)


def differences(
    fields: Mapping[str, Field], settings: Sequence[tuple[Mapping[str, Any], str]]
) -> Iterator[tuple[str, list[str]]]:
    """(label, its text in every setting) of each setting that is not the same in all."""
    for key, one in fields.items():
        texts = [_text(shown.get(key)) for shown, _ in settings]
        if len(set(texts)) > 1:
            yield f"{one.label} {one.unit}".strip(), texts
    others = [", ".join(filter(None, map(str.strip, more.splitlines()))) or "none" for _, more in settings]
    if len(set(others)) > 1:
        yield "Other settings", others


def _text(value: Any) -> str:
    return "left open" if value is None or value == "" else str(value)
