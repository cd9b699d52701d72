"""The respects in which a job exceeds all validated runs, and the resulting widening of its interval."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import log2, sqrt
from typing import Any

import numpy as np

from zsim.arrays import Floats
from zsim.dataclass import dataclass
from zsim.validated.errors import LEVEL, interval_like, quantiles
from zsim.validated.features import Features
from zsim.validated.runs import ValidatedRun, ValidatedRuns, without_source

_Holds = Callable[[Features, Features], bool]


@dataclass(frozen=True, slots=True)
class Extrapolation:
    """A respect in which a job exceeds all validated runs."""

    respect: str
    """One of `RESPECTS`."""
    sentence: str
    """The respect in words."""
    steps: float = 1.0
    """The distance, in doublings for counted respects. Otherwise 1."""


def _same_kind(run: Features, job: Features) -> bool:
    return run.framework == job.framework and run.is_several == job.is_several


@dataclass(frozen=True, slots=True)
class Respect:
    """A respect in which validated runs vouch for a job.

    For counted respects a run vouches up to twice its count, since the widening is estimated for one
    doubling.
    """

    applies: Callable[[Features], bool]
    """Whether a job has the respect."""
    holds: _Holds
    """Whether a run vouches for a job."""
    group: Callable[[Features], Any]
    """The group of a job. An extrapolating job is taken to be of a new group."""
    asks: Callable[[Features], Any] | None = None
    """The part that `compared_part` returns. By default as `group`."""

    def asked(self, job: Features) -> Any:
        """The part of a job that `vouches` reads. Runs that vouch for a job vouch for all with the
        same part.
        """
        return (self.asks or self.group)(job)


RESPECTS: Mapping[str, Respect] = {
    "framework": Respect(
        lambda job: True, lambda run, job: run.framework == job.framework, lambda job: job.framework
    ),
    "gpu": Respect(
        lambda job: True,
        lambda run, job: run.framework == job.framework and run.gpu == job.gpu,
        lambda job: (job.framework, job.gpu),
    ),
    "fabric": Respect(
        lambda job: bool(job.fabric), lambda run, job: run.fabric == job.fabric, lambda job: job.fabric
    ),
    "strategy": Respect(
        lambda job: True, lambda run, job: run.strategy == job.strategy, lambda job: job.strategy
    ),
    "mixture": Respect(
        lambda job: job.is_mixture,
        lambda run, job: run.framework == job.framework and run.is_mixture,
        lambda job: job.framework,
    ),
    "several nodes": Respect(
        lambda job: job.is_several,
        lambda run, job: run.framework == job.framework and run.is_several,
        lambda job: job.framework,
    ),
    "gpus": Respect(
        lambda job: job.is_several,
        lambda run, job: run.framework == job.framework and 2 * run.gpus > job.gpus,
        lambda job: (job.framework, job.gpus),
    ),
    "parameters": Respect(
        lambda job: True,
        lambda run, job: run.framework == job.framework and 2 * run.parameters > job.parameters,
        lambda job: job.framework,
        lambda job: (job.framework, job.parameters),
    ),
    "binding": Respect(
        lambda job: True,
        lambda run, job: _same_kind(run, job) and run.binding == job.binding,
        lambda job: (job.framework, job.is_several, job.binding),
    ),
}


def extrapolations(job: Features, runs: Sequence[ValidatedRun]) -> list[Extrapolation]:
    """The respects in which no run vouches for the job, in the order of `RESPECTS`."""
    known = ValidatedRuns.of(runs).features
    own = [run for run in known if run.framework == job.framework]
    found = []

    def lacks(respect: str, among: Sequence[Features]) -> bool:
        one = RESPECTS[respect]
        return one.applies(job) and not any(one.holds(run, job) for run in among)

    def add(respect: str, sentence: str, steps: float = 1.0) -> None:
        found.append(Extrapolation(respect, sentence, steps))

    if not own:
        add("framework", f"no validated run of {job.framework}")
        # Judged by all other frameworks' runs, the job counts as one of theirs in every other respect.
        own = [replace(run, framework=job.framework) for run in known]
    if lacks("gpu", own):
        of = f" of {job.framework}" if any(run.gpu == job.gpu for run in known) else ""
        add("gpu", f"GPU {job.gpu} without a validated run{of}")
    if lacks("fabric", known):
        add("fabric", f"{job.fabric} without a validated run")
    if lacks("strategy", known):
        add("strategy", f"{job.strategy} without a validated run")
    of = f" of {job.framework}" if any(run.framework == job.framework for run in known) else ""
    if lacks("mixture", own):
        add("mixture", f"no validated run{of} of a mixture of experts")
    if lacks("several nodes", own):
        add("several nodes", f"no validated run{of} on several nodes")
    for respect, what in (("gpus", "more GPUs"), ("parameters", "more parameters")):
        most = max((getattr(run, respect) for run in own), default=0)
        if most and getattr(job, respect) > most:
            doublings = log2(getattr(job, respect) / most)
            add(respect, f"{what} than any validated run{of} ({_count(most)})", doublings)
    if any(_same_kind(run, job) for run in own) and lacks("binding", own):
        where = "several nodes" if job.is_several else "one node"
        add("binding", f"no validated run{of} on {where} is bound by {job.binding}")
    return found


def _count(number: int) -> str:
    return f"{number / 1e9:.3g}e9" if number >= 10**9 else f"{number:,}"


def stretch_of(found: Sequence[Extrapolation], widening: Mapping[str, float]) -> float:
    """Factor on the interval's ends, which is 1 without extrapolation.

    The respects, and the doublings of one, are taken to err independently: their excesses add in squares.
    """
    return 1.0 + sqrt(sum(one.steps * (widening[one.respect] - 1.0) ** 2 for one in found))


def estimate_widening(runs: Sequence[ValidatedRun]) -> dict[str, float]:
    """The factor on intervals by respect, which is at least 1.

    For each run, the runs of other sources that vouch for it in the respect are left out as well. Its error
    is measured in ends of the interval that the remaining runs give. `LEVEL` of these, with equal weight for
    every group and in it for every source, are below the factor.
    """
    factors = {}
    for name, respect in RESPECTS.items():
        scores = scores_without(runs, respect)
        weights = _in_groups(list(scores), respect)
        far = quantiles(np.array(list(scores.values())), weights, (LEVEL,))[0] if scores else 1.0
        factors[name] = max(1.0, far)
    return factors


def _in_groups(runs: Sequence[ValidatedRun], respect: Respect) -> Floats:
    """Weights that are equal for all groups, within a group for all sources, and within a source for all
    runs."""
    groups = [respect.group(run.features) for run in runs]
    pairs = Counter((group, run.source) for group, run in zip(groups, runs, strict=True))
    sources = Counter(group for group, _ in pairs)
    weights = [
        1.0 / (sources[group] * pairs[group, run.source]) for group, run in zip(groups, runs, strict=True)
    ]
    return np.array(weights)


def scores_without(runs: Sequence[ValidatedRun], respect: Respect | None = None) -> dict[ValidatedRun, float]:
    """Each run's error as a multiple of the end of its interval, judged only by runs of other sources that do
    not vouch for it in the respect. Runs that lack the respect are missing."""
    scores: dict[ValidatedRun, float] = {}
    judges: dict[tuple[str, Features], ValidatedRuns] = {}
    others = {source: _Others(without_source(runs, source)) for source in {run.source for run in runs}}
    for run in runs:
        key = (run.source, run.features)
        if key not in judges:
            judges[key] = others[run.source].that_lack(respect, run.features)
        if judges[key]:
            interval = interval_like(run.features, judges[key])[1]
            scores[run] = run.error / interval[run.error > 0]
    return scores


class _Others:
    """The runs of other sources, and those of them that do not vouch for a part of a job."""

    def __init__(self, runs: ValidatedRuns) -> None:
        self._runs = runs
        self._parts: dict[Any, ValidatedRuns] = {}

    def that_lack(self, respect: Respect | None, job: Features) -> ValidatedRuns:
        """The runs that do not vouch for a job in a respect. None if the respect does not apply to it."""
        if respect is None:
            return self._runs
        if not respect.applies(job):
            return ValidatedRuns()
        asked = respect.asked(job)
        if asked not in self._parts:
            left = {one for one in self._runs.features if not respect.holds(one, job)}
            self._parts[asked] = ValidatedRuns(run for run in self._runs if run.features in left)
        return self._parts[asked]
