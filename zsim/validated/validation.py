"""The trust in a step time: an interval of 80 %, and the validated runs behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, expm1, hypot, log
from typing import Any

from zsim.validated.extrapolation import extrapolations
from zsim.validated.features import Features
from zsim.validated.runs import (
    FIRST_DISSIMILAR_CELL,
    FRAMEWORK_CELL,
    MIN_SOURCES,
    ValidatedRun,
    ValidatedRuns,
    exclude_source,
    similar_runs,
    validated_runs,
)
from zsim.validated.spread import SpreadEstimates, spread_estimates, spread_of, spread_parts

OFFLOADING = "CPU, host memory, PCIe and drives"
"""The inputs of offloading, as an `InputSpread` names them."""
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


@dataclass(frozen=True, slots=True)
class InputSpread:
    """The step with an input of the job at both ends of its spread, as multiples of the predicted one."""

    what: str
    """The input, for "by how fast ... may be"."""
    fast: float
    """At most 1."""
    slow: float
    """At least 1."""


def input_spread(what: str, ends: tuple[float, float] | None, step_seconds: float) -> InputSpread | None:
    """The spread of a step of `step_seconds` that takes `ends` seconds with its input at both ends. None
    without ends.
    """
    if ends is None:
        return None
    return InputSpread(what, min(1.0, ends[0] / step_seconds), max(1.0, ends[1] / step_seconds))


@dataclass(frozen=True, slots=True)
class Validation:
    """The interval of a step and the validated runs behind it.

    The measured step is between `low` and `high` with 80 %. Errors are predicted over measured, less one.
    """

    low: float
    """The lower end of the interval, as a multiple of the predicted step."""
    high: float
    """The upper end of the interval, as a multiple of the predicted step."""
    regime: str
    """The features that the `runs` behind the interval have in common with the job."""
    runs: int
    """Similar runs. 0 if no run is similar, and the errors are then None."""
    sources: int
    mean_absolute_error: float | None
    worst_absolute_error: float | None
    extrapolates: tuple[str, ...]
    features: Features
    runs_less_alike: int = 0  # runs of a broader cell, if the alike ones are of too few sources
    """Runs of a broader cell, if the similar ones are of too few sources."""
    inputs: tuple[InputSpread, ...] = ()  # that the interval is wider for
    """The inputs that the interval is wider for."""
    unexplained: float = 0.0
    """By how much longer than predicted measured steps of the regime are in the mean of their sources, a
    fraction. The reason is not known. The interval counts it, and the prediction does not.
    """

    def range_of(self, step_seconds: float) -> tuple[float, float]:
        """The interval of a step that is predicted to take `step_seconds`."""
        return self.low * step_seconds, self.high * step_seconds

    @property
    def input_ends(self) -> tuple[float, float]:
        """The step with all inputs at the fast ends of their spreads, and at the slow ones, as multiples of
        the predicted one: their logarithms add in squares."""
        return (
            exp(-hypot(*(log(each.fast) for each in self.inputs))),
            exp(hypot(*(log(each.slow) for each in self.inputs))),
        )

    def extend_to_shorter(self, share: float) -> Validation:
        """The interval extended down to that of a step of `share` of the predicted one, a fraction."""
        return replace(self, low=self.low * share)

    def to_dict(self) -> dict[str, Any]:
        """The `validation` table of `--json`."""
        return {
            "regime": self.regime,
            "runs": self.runs,
            "sources": self.sources,
            "runs_less_alike": self.runs_less_alike,
            "mean_absolute_error": self.mean_absolute_error,
            "worst_absolute_error": self.worst_absolute_error,
            "extrapolates": list(self.extrapolates),
            "unexplained_fraction": self.unexplained,
            "inputs": [asdict(input_spread) for input_spread in self.inputs],
        }


def validation_of(
    features: Features,
    runs: Sequence[ValidatedRun] | None = None,
    estimates: SpreadEstimates | None = None,
    *,
    excluded_source: str | None = None,
) -> Validation:
    """Judge a job by validated runs (default: the shipped ones), except those of the source
    `excluded_source`. See [Note: what an interval assumes] in `zsim.validated.spread`.
    """
    runs = exclude_source(validated_runs() if runs is None else runs, excluded_source)
    estimates = spread_estimates() if estimates is None else estimates
    spread = spread_of(spread_parts(features, runs, estimates))
    similar, cell = similar_runs(features, runs)
    absolute = [abs(expm1(-run.error_for_others)) for run in similar]
    sources = {run.source for run in similar}
    low, high = estimates.ends(features, spread)
    return Validation(
        exp(low),
        exp(high),
        regime_of(features, cell),
        len(similar),
        len(sources),
        sum(absolute) / len(absolute) if absolute else None,
        max(absolute, default=None),
        tuple(extrapolation.sentence for extrapolation in extrapolations(features, runs)),
        features,
        _count_less_similar(features, runs, len(similar)) if len(sources) < MIN_SOURCES else 0,
        unexplained=expm1(estimates.unexplained.get(features.regime, 0.0)),
    )


def widen_for_input(validation: Validation, input_spread: InputSpread) -> Validation:
    """The validation of a step one of whose inputs is known to a spread only.

    Errors of zsim and of its input are taken to be independent: on either side of the prediction their
    logarithms add in squares. An input that does not move the step leaves the interval as it is.
    """
    below, above = max(0.0, -log(validation.low)), max(0.0, log(validation.high))
    low = validation.low * exp(below - hypot(below, log(input_spread.fast)))
    high = validation.high * exp(hypot(above, log(input_spread.slow)) - above)
    return replace(validation, low=low, high=high, inputs=(*validation.inputs, input_spread))


def _count_less_similar(features: Features, runs: ValidatedRuns, num_similar: int) -> int:
    """Number of runs of the job's framework and number of nodes that are not like it."""
    cell = features.cells[FRAMEWORK_CELL]
    return max(0, len(runs.cell_indices(FRAMEWORK_CELL, cell)) - num_similar)


def regime_of(features: Features, cell: int = 0) -> str:
    """The features that the runs of a cell share: "FSDP, several nodes, H100, bound by kernels"."""
    if cell >= FIRST_DISSIMILAR_CELL:
        return "no similar validated run"
    words = [features.framework, "several nodes" if features.is_several else "one node"]
    words += [features.strategy] if features.strategy != features.framework else []
    words += ["mixture of experts"] if features.is_mixture else []
    if cell == 0:
        words += [features.chip.upper(), f"bound by {features.binding}"]
    return ", ".join(words)


def describe_unexplained(validation: Validation) -> str:
    """One sentence on what measured steps take beyond predicted ones, for reasons that are not known. Empty
    where that is less than 5 %.
    """
    share, regime = validation.unexplained, validation.features.regime
    if abs(share) < 0.05:
        return ""
    return (
        f"unexplained: measured steps ({regime}) are on average {abs(share):.0%} "
        f"{'longer' if share > 0 else 'shorter'} than predicted; the range includes this"
    )


def format_range(seconds: tuple[float, float]) -> str:
    """E.g. "9.14 to 10.9 s", "0.98 to 1.09 s": three digits, in the unit of the longer time."""
    unit, name = next(((size, name) for size, name in _UNITS if seconds[1] >= size), _UNITS[-1])
    return f"{_format_three_digits(seconds[0] / unit)} to {_format_three_digits(seconds[1] / unit)} {name}"


def _format_three_digits(value: float) -> str:
    rounded = float(f"{value:.3g}")
    return f"{rounded:.{max(0, 3 - len(str(int(rounded))))}f}"


def format_validation(validation: Validation, step_seconds: float) -> str:
    """E.g. "9.14 to 10.9 s (80 %), from 14 similar runs"."""
    text = f"{format_range(validation.range_of(step_seconds))} (80 %), from "
    if not validation.runs:
        return text + "dissimilar runs"
    text += f"{validation.runs:,} similar run{'s' if validation.runs > 1 else ''}"
    return text + (f" and {validation.runs_less_alike:,} less similar" if validation.runs_less_alike else "")
