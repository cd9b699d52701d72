"""A step predicted from a measured one: the measured step times the ratio of the two predictions.

# [Note: anchored on a measured step]
The error of a prediction is mostly the same for two steps of one job on one machine, so the ratio of two
predictions is off by less than either (zsim/validated/ratios.py). A measured step of the job, on fewer nodes
or with a shorter sequence, carries all that is common. What remains is the error of the ratio, which is
estimated from pairs of published runs that differ in the same settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zsim.api import Result
from zsim.errors import InputError
from zsim.report.views.text.plain import paragraph
from zsim.specs.experiment.load import experiment_of
from zsim.specs.experiment.tables import Experiment
from zsim.study.differences import differing_settings, is_shared
from zsim.study.search import simulate
from zsim.study.sweep.records import report_row
from zsim.units import format_seconds
from zsim.validated.ratios import ratio_range
from zsim.validated.runs import REPEAT_ERROR
from zsim.validated.validation import format_range


@dataclass(frozen=True)
class AnchoredStep:
    """The time of a step, derived from a measured step of the same job under other settings."""

    step_seconds: float
    low: float
    """The lower end of the 80 % interval of `step_seconds`."""
    high: float
    """The upper end of the 80 % interval of `step_seconds`."""
    measured_seconds: float
    """The measured time of the other step."""
    predicted_seconds: float
    """The predicted time of the measured step."""
    kinds: tuple[str, ...]
    """The kinds of settings in which the two steps differ."""
    settings: Mapping[str, Any]
    """The dotted keys with which the other step was measured."""

    @property
    def error(self) -> float:
        """The error of the prediction of the measured step: predicted over measured, less one."""
        return self.predicted_seconds / self.measured_seconds - 1.0

    def to_dict(self) -> dict[str, Any]:
        """The object in `zsim trust --json`."""
        return {
            "step_seconds": self.step_seconds,
            "step_seconds_range": [self.low, self.high],
            "measured_seconds": self.measured_seconds,
            "predicted_seconds": self.predicted_seconds,
            "error_fraction": self.error,
            "differs_in": list(self.kinds),
            "settings": {key: str(value) for key, value in self.settings.items()},
        }

    def lines(self) -> list[str]:
        where = ", ".join(f"{key}={value}" for key, value in self.settings.items()) or "this very job"
        text = (
            f"measured with {where}: {format_seconds(self.measured_seconds)}, predicted "
            f"{format_seconds(self.predicted_seconds)} ({self.error:+.1%}). By the ratio of the two steps "
            f"this one takes {format_seconds(self.step_seconds)}, with 80 % "
            f"{format_range((self.low, self.high))}."
        )
        return paragraph(text)


def anchor_step(
    result: Result, experiment: Experiment, settings: Mapping[str, Any], measured_seconds: float
) -> AnchoredStep:
    """The step of `result`, a simulation of `experiment`, predicted from a measured step of the same job
    under other `settings` (dotted keys). Without settings the job itself was measured, and repeated runs
    differ by 0.6 %.

    Raises InputError for a measured time that is not above 0, and for settings that do not simulate.
    """
    if not measured_seconds > 0:
        raise InputError(f"measured: found {measured_seconds:g} s, expected a step's seconds, above 0")
    predicted = result.report.step_seconds
    if not settings:
        low, high = measured_seconds * (1 - REPEAT_ERROR), measured_seconds * (1 + REPEAT_ERROR)
        return AnchoredStep(measured_seconds, low, high, measured_seconds, predicted, (), {})
    measured_result = simulate(experiment_of(experiment, settings))
    rows = report_row(result.report, result.job), report_row(measured_result.report, measured_result.job)
    kinds, shared = differing_settings(*rows), any(map(is_shared, rows))
    ratio = predicted / measured_result.report.step_seconds
    low, high = ratio * (1 - REPEAT_ERROR), ratio * (1 + REPEAT_ERROR)
    if kinds:
        low, high = ratio_range(ratio, kinds, is_shared=shared)
    return AnchoredStep(
        measured_seconds * ratio,
        measured_seconds * low,
        measured_seconds * high,
        measured_seconds,
        measured_result.report.step_seconds,
        tuple(kinds),
        dict(settings),
    )
