"""The memory profile of an experiment, by owner, without simulating it. Several variants can be compared."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zsim.api import simulate
from zsim.errors import InputError, ZsimError
from zsim.plan.make import make_plan, moments_of
from zsim.plan.memory.capacity import framework_memory, usable_bytes_of_fullest_gpu
from zsim.plan.moments import JobMoment
from zsim.report.job_features import framework_title
from zsim.report.memory import MemoryProfile, memory_profile
from zsim.report.report import Report
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.expert_layer import has_experts
from zsim.validated.verdict import Verdict, verdict_of


@dataclass(frozen=True)
class ProfiledJob:
    """A job and the memory of its fullest GPU over a step."""

    job: Job
    profile: MemoryProfile
    capacity_bytes: int
    """The bytes that are available to tensors."""
    moments: tuple[JobMoment, ...] = ()
    """Moments of the job outside of its step that need memory too."""

    @property
    def load(self) -> float:
        """GPU bytes as a fraction of the usable ones, the larger of the step's and those of any moment that
        the job passes through.
        """
        certain = (moment.gpu_bytes or 0 for moment in self.moments if moment.is_certain)
        return max(self.profile.peak.total, *certain, 0) / self.capacity_bytes

    @property
    def fits(self) -> bool:
        """Whether all tensors have room, by zsim's best estimate."""
        return self.profile.peak.total <= self.capacity_bytes

    @property
    def verdict(self) -> Verdict:
        """Whether the job fits, judged by its tensors: torch's allocator is not simulated."""
        return verdict_of(self.load, framework_title(self.job), is_mixture=has_experts(self.job.model))


def profile_memory(experiment: Experiment) -> ProfiledJob:
    """The memory profile that the plan's allocations and frees add up to. Its peak equals the simulated one.

    Raises InputError and NotSimulatedError as `simulate` does.
    """
    job = resolve(experiment)
    plan = make_plan(job)
    return ProfiledJob(
        job,
        memory_profile(plan, [framework_memory(job, plan)]),
        usable_bytes_of_fullest_gpu(job, plan),
        moments_of(job, plan),
    )


@dataclass(frozen=True)
class Variant:
    """One combination of the varied keys."""

    overrides: Mapping[str, Any]
    profiled: ProfiledJob | None = None
    report: Report | None = None
    """The simulated step, if the combination was simulated too."""
    error: str = ""
    """The reason why the combination cannot be planned."""

    @property
    def verdict(self) -> Verdict:
        """The verdict on the simulated step, or by the tensors alone if the combination was only planned."""
        if self.report is not None:
            return self.report.verdict
        assert self.profiled is not None, "a combination with an error has no verdict"
        return self.profiled.verdict


def compare_memory(
    experiment: Experiment, axes: Mapping[str, Sequence[Any]], *, simulates: bool = False
) -> Iterator[Variant]:
    """The memory of every combination of the dotted keys' values, with the last key varying fastest. With
    `simulates` the step is simulated too. A combination that is no valid experiment is yielded with its
    error.

    Raises InputError, before the first row, for a value that is invalid in every combination.
    """
    if not axes:
        raise InputError("nothing to vary; expected keys with values")
    combinations = [
        _make_combination(experiment, dict(zip(axes, values, strict=True)))
        for values in itertools.product(*axes.values())
    ]
    for key, values in axes.items():
        for value in values:
            errors = [
                combination.error for combination in combinations if combination.overrides[key] == value
            ]
            if all(errors):
                raise InputError(f"{key} = {value}: {errors[0]}")
    return _variants(combinations, simulates)


@dataclass(frozen=True)
class _Combination:
    """One combination, with its experiment or the reason why there is none."""

    overrides: Mapping[str, Any]
    experiment: Experiment | None = None
    error: str = ""


def _make_combination(experiment: Experiment, overrides: Mapping[str, Any]) -> _Combination:
    try:
        return _Combination(overrides, change_experiment(experiment, overrides))
    except ZsimError as error:
        return _Combination(overrides, error=str(error))


def _variants(combinations: Sequence[_Combination], simulates: bool) -> Iterator[Variant]:
    for combination in combinations:
        overrides = combination.overrides
        if combination.experiment is None:
            yield Variant(overrides, error=combination.error)
            continue
        try:
            profiled = profile_memory(combination.experiment)
            report = simulate(combination.experiment).report if simulates else None
        except ZsimError as error:
            yield Variant(overrides, error=str(error))
        else:
            yield Variant(overrides, profiled, report)
