"""How far off zsim is on a job: what each respect of it costs, by published runs predicted as a stranger's.

# [Note: what an interval assumes]
Runs of one source have errors that are not exchangeable with those of another source, so 500 runs of one
source say little more about a new run than 50 do. Sources are taken to be exchangeable, the job's among
them (the hierarchical setting of Y. Lee, R. Barber and R. Willett, "Distribution-free inference with
hierarchical data", 2023). A job's source is exchangeable with blind sources alone (role blind), whose runs
were predicted before anything was known of them. Studied sources are not like it: zsim was changed until
their errors were explained, and these are half as large. So blind sources alone set how wide ranges are, and
by how much errors differ between jobs. Studied ones tell of respects that no blind run has.

Errors are larger on some jobs than on others, so that they are measured in units of a spread that is the
job's own: normalised conformal prediction (J. Lei, M. G'Sell, A. Rinaldo, R. Tibshirani and L. Wasserman,
"Distribution-free predictive inference for regression", JASA 2018, section 5.2). The spread is a sum: what
any run costs, and what each further respect adds in which the job is harder (`RESPECTS_OF_JOBS`) or in which
no run of another source vouches for it (`zsim.validated.extrapolation`). The parts are fitted to absolute
errors, every source with the same weight, none of the parts below zero. Settings that the job leaves open
(`OPEN_SENTENCES`) are inputs that may be otherwise: the spread of the step over their choices adds to it in
squares.

Where the sources of a regime (a framework, on one node or on several, GPUs of before bf16 apart) err to the
same side, the interval is about the mean of their median errors and not about zero: what is not explained
moves the interval, and never the prediction. The mean m of n sources counts as far as it is more than chance,
m (1 - s^2 / n m^2), the positive-part shrinkage of W. James and C. Stein ("Estimation with quadratic loss",
1961) with the sources' variance s^2.

The interval is a quantile of the blind sources' absolute errors in units of the spread, to either side. Two
quantiles of signed errors would need more sources: with 31, left out one at a time, intervals that hold as
often were a sixth wider. Each source is judged by parts and quantiles of the others (docs/accuracy.md), so
that coverage is measured, not proven, and holds for jobs like the published ones.

Ranges, with the shift of a regime, are made of published runs of role report too, as they say how far off
zsim is. No number that a prediction is made of is taken from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import hypot

from zsim.validated.extrapolation import extrapolations
from zsim.validated.features import NETWORK, OFFLOADING, Features
from zsim.validated.runs import REPEAT_ERROR, ValidatedRun, shipped_estimates

ANY = "any run"
OPEN_SENTENCES: Mapping[str, str] = {
    "dispatcher": "what brings tokens to their experts is not stated, and the network bounds the step",
    "hidden dispatcher": "what brings tokens to their experts is not stated",
    "loss": "whose kernels compute the loss is not stated",
    "compile": "whether blocks are compiled is not stated",
    "network": "the network is a preset's, not measured, and bounds the step",
    "hidden network": "the network is a preset's, not measured",
}
"""The settings that matter and may be left open, and what that is in words. A network, or an exchange of
tokens, is hidden where something else bounds the step."""
_HIDDEN = ("dispatcher", "network")


@dataclass(frozen=True, slots=True)
class JobRespect:
    """A respect in which jobs are harder to predict than others."""

    holds: Callable[[Features], bool]
    sentence: str


RESPECTS_OF_JOBS: Mapping[str, JobRespect] = {
    ANY: JobRespect(lambda job: True, "what any run costs"),
    "several nodes": JobRespect(lambda job: job.is_several, "several nodes"),
    "offloading": JobRespect(lambda job: job.is_offloaded or job.binding == OFFLOADING, "offloading"),
    "mixture": JobRespect(lambda job: job.is_mixture, "a mixture of experts"),
    "zero": JobRespect(lambda job: job.strategy.startswith("ZeRO"), "an engine of ZeRO"),
    "low precision": JobRespect(lambda job: job.is_low_precision, "products in 8 or 4 bits"),
    "no bf16": JobRespect(
        lambda job: job.lacks_bf16, "a GPU without bf16, with kernels and software of its time"
    ),
}
"""By name. The first holds for every job."""


@dataclass(frozen=True, slots=True)
class SpreadEstimates:
    """The numbers behind a spread, as validated_errors.toml has them."""

    shares: Mapping[str, float]
    """What a respect of `RESPECTS_OF_JOBS` adds to the spread."""
    extrapolation: Mapping[str, float]
    """What a respect without a run adds, by respect of `zsim.validated.extrapolation`, and of what is counted
    per doubling."""
    open: Mapping[str, float]
    """The spread of the step over the choices of an open setting, as a logarithm."""
    low: float
    """The lower end of errors in units of the spread, below 0."""
    high: float
    """The upper one, above 0."""
    unexplained: Mapping[str, float] = field(default_factory=dict)
    """The mean error that is not explained, ln(measured / predicted), by `Features.regime`."""

    def ends(self, job: Features, spread: float) -> tuple[float, float]:
        """The ends of the job's interval, as logarithms: about what is not explained, and on both sides of
        the prediction."""
        middle = self.unexplained.get(job.regime, 0.0)
        return min(middle + self.low * spread, -REPEAT_ERROR), max(middle + self.high * spread, REPEAT_ERROR)


@dataclass(frozen=True, slots=True)
class SpreadPart:
    """A part of a job's spread."""

    name: str
    share: float
    sentence: str
    is_open: bool = False
    """A setting that is left open, which adds in squares."""


@cache
def spread_estimates() -> SpreadEstimates:
    """The shipped numbers."""
    tables = shipped_estimates()
    scores = tables["scores"]
    return SpreadEstimates(
        tables["spread"],
        tables["extrapolation"],
        tables["open"],
        scores["low"],
        scores["high"],
        tables["unexplained"],
    )


def spread_parts(
    job: Features, runs: Sequence[ValidatedRun], estimates: SpreadEstimates
) -> tuple[SpreadPart, ...]:
    """The parts of the job's spread that are above zero, `runs` being those that may vouch for it."""
    components = [
        SpreadPart(name, estimates.shares.get(name, 0.0), respect.sentence)
        for name, respect in RESPECTS_OF_JOBS.items()
        if respect.holds(job)
    ]
    components += [
        SpreadPart(part.respect, part.steps * estimates.extrapolation.get(part.respect, 0.0), part.sentence)
        for part in extrapolations(job, runs)
    ]
    components += [
        SpreadPart(name, estimates.open.get(name, 0.0), OPEN_SENTENCES[name], is_open=True)
        for name in settings_left_open(job)
    ]
    return tuple(part for part in components if part.share > 0 or part.name == ANY)


def settings_left_open(job: Features) -> tuple[str, ...]:
    """The settings that the job leaves open, by the names of `OPEN_SENTENCES`."""
    return tuple(setting_with_binding(name, job.binding) for name in job.open_settings)


def setting_with_binding(name: str, binding: str) -> str:
    """The name in `OPEN_SENTENCES` of a setting of a job whose step `binding` bounds."""
    return f"hidden {name}" if name in _HIDDEN and binding != NETWORK else name


def spread_of(components: Sequence[SpreadPart]) -> float:
    """The spread: the sum of the parts, and in squares with it those of open settings."""
    total = sum(part.share for part in components if not part.is_open)
    return hypot(total, *(part.share for part in components if part.is_open))
