"""Whether two simulated configurations differ by more than zsim's error on their ratio, and a step predicted
from a measured one: the measured step times the ratio of the two predictions.

# [Note: anchored on a measured step]
The error of a prediction is mostly the same for two steps of one job on one machine, so the ratio of two
predictions is off by less than either (zsim/validated/ratios.py). A measured step of the job, on fewer nodes
or with a shorter sequence, carries all that is common. What remains is the error of the ratio, which is
estimated from pairs of published runs that differ in the same settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zsim.api import Result
from zsim.errors import InputError
from zsim.report.views.text.plain import paragraph
from zsim.specs.experiment.load import experiment_of
from zsim.specs.experiment.tables import Experiment
from zsim.study.search import simulate
from zsim.study.sweep.records import report_row
from zsim.units import format_seconds
from zsim.validated.errors import REPEAT_ERROR
from zsim.validated.ratios import ALLOCATOR_SHORT, NO_DIFFERENCE, is_ratio_significant, ratio_range
from zsim.validated.validation import format_range
from zsim.validated.verdict import Verdict

# Setting (`zsim.validated.ratios.SETTINGS`) -> the columns of a sweep's row that hold it.
_COLUMNS = {
    "batch": ("training.micro_batch_size", "training.gradient_accumulation_steps"),
    "sequence length": ("training.sequence_length",),
    "GPUs": ("nodes", "gpus"),
    "strategy": ("strategy",),
    "parallelism": (),
    "network": ("cluster",),
    "training": (
        "training.precision", "training.activation_checkpointing", "training.checkpoint_every",
        "training.block_checkpointing", "training.cross_entropy", "training.compile",
    ),
    "another model or GPU": ("model", "gpu"),
}  # fmt: skip


def range_of_row(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """(low, high) of the row's step interval in seconds, or None where the row has no interval."""
    low, high = row.get("step_seconds_low"), row.get("step_seconds_high")
    return None if low is None or high is None else (low, high)


def verdict_of_row(row: Mapping[str, Any]) -> Verdict | None:
    """The row's verdict, or None for a row without one, such as a row saved by an earlier release."""
    word, probability = row.get("verdict"), row.get("fits_probability")
    return None if word is None or probability is None else Verdict(word, probability)


# Keys of DeepSpeed's file that are settings of their own: the batch, which follows from the number of GPUs
# too, and the precision.
_NOT_STRATEGY = frozenset(
    {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "precision"}
)


def _strategy_settings(row: Mapping[str, Any]) -> Any:
    """The framework's settings of a row, without those that are columns of their own."""
    text = row.get("strategy.settings")
    settings = json.loads(text) if isinstance(text, str) and text.startswith("{") else text
    if not isinstance(settings, Mapping):
        return settings
    return {key: value for key, value in settings.items() if key not in _NOT_STRATEGY}


# What follows from a row's other columns: the GPUs, the length, the batch and the strategy.
_FOLLOWING = frozenset(
    {"data", "style", "context_inner", "context_masks", "tensor_grain", "buffered_micro_batches"}
)
_DEGREES = frozenset({"tensor", "pipeline", "virtual_stages", "context", "expert", "expert_tensor"})


def _have_different_degrees(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two rows divide a replica of the model among ranks by different degrees, or under one framework
    in different ways. Rows of an older zsim do not say how they do.
    """
    differ = {
        key.removeprefix("parallelism.")
        for key, value in first.items()
        if key.startswith("parallelism.") and value != second.get(key, value)
    } - _FOLLOWING
    if first.get("parallelism.style") != second.get("parallelism.style"):
        differ &= _DEGREES
    if all((row.get("parallelism.context") or 1) == 1 for row in (first, second)):
        differ.discard("context_method")
    return bool(differ)


def differing_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """The settings in which two rows of a sweep differ, as `zsim.validated.ratios` names them."""
    names = [
        name
        for name, columns in _COLUMNS.items()
        if any(first.get(column) != second.get(column) for column in columns)
        or (name == "strategy" and _strategy_settings(first) != _strategy_settings(second))
        or (name == "parallelism" and _have_different_degrees(first, second))
    ]
    is_short = bool(first.get("allocator_retries") or second.get("allocator_retries"))
    return [*names, ALLOCATOR_SHORT] if is_short and names else names


def is_shared(row: Mapping[str, Any]) -> bool:
    """Whether several ranks share a replica of the model in a row of a sweep."""
    return any((row.get(f"parallelism.{axis}") or 1) > 1 for axis in ("tensor", "pipeline", "context"))


def is_distinguishable(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether zsim can tell which of two rows is faster per token."""
    tokens = (first["step_tokens"], second["step_tokens"])
    costs = [row["step_seconds"] / count for row, count in zip((first, second), tokens, strict=True)]
    shared = is_shared(first) or is_shared(second)
    return is_ratio_significant(costs[0], costs[1], differing_settings(first, second), is_shared=shared)


def format_step_range(row: Mapping[str, Any], best: Mapping[str, Any] | None = None) -> str:
    """The row's step interval, e.g. "3.90 to 5.10 s (80 %)", with a note if zsim cannot tell the row from
    `best`. Empty without an interval.
    """
    interval = range_of_row(row)
    if interval is None:
        return ""
    text = f"{format_range(interval)} (80 %)"
    if best is not None and best is not row and not is_distinguishable(row, best):
        text += f"; {NO_DIFFERENCE} from 1"
    return text


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
