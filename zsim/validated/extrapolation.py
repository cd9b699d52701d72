"""The respects in which a job exceeds all validated runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any

from zsim.validated.features import ALLOCATOR, HOST, KERNELS, NETWORK, OFFLOADING, Features
from zsim.validated.runs import ValidatedRun, ValidatedRuns

_VouchesFor = Callable[[Features, Features], bool]


@dataclass(frozen=True, slots=True)
class Extrapolation:
    """A respect in which a job exceeds all validated runs."""

    respect: str
    """One of `RESPECTS`."""
    sentence: str
    """The respect in words."""
    steps: float = 1.0
    """The distance, in doublings for counted respects. Otherwise 1."""


def _is_same_kind(run: Features, job: Features) -> bool:
    return run.framework == job.framework and run.is_several == job.is_several


@dataclass(frozen=True, slots=True)
class ValidationRespect:
    """A respect in which validated runs vouch for a job.

    For counted respects a run vouches up to twice its count, since what they cost is estimated for one
    doubling.
    """

    applies: Callable[[Features], bool]
    """Whether a job has the respect."""
    vouches: _VouchesFor
    """Whether a run vouches for a job."""
    group: Callable[[Features], Any]
    """The group of a job. An extrapolating job is taken to be of a new group."""


RESPECTS: Mapping[str, ValidationRespect] = {
    "framework": ValidationRespect(
        lambda job: True, lambda run, job: run.framework == job.framework, lambda job: job.framework
    ),
    "gpu": ValidationRespect(
        lambda job: True,
        lambda run, job: run.framework == job.framework and run.gpu == job.gpu,
        lambda job: (job.framework, job.gpu),
    ),
    "fabric": ValidationRespect(
        lambda job: bool(job.fabric), lambda run, job: run.fabric == job.fabric, lambda job: job.fabric
    ),
    "strategy": ValidationRespect(
        lambda job: True, lambda run, job: run.strategy == job.strategy, lambda job: job.strategy
    ),
    "mixture": ValidationRespect(
        lambda job: job.is_mixture,
        lambda run, job: run.framework == job.framework and run.is_mixture,
        lambda job: job.framework,
    ),
    "several nodes": ValidationRespect(
        lambda job: job.is_several,
        lambda run, job: run.framework == job.framework and run.is_several,
        lambda job: job.framework,
    ),
    "gpus": ValidationRespect(
        lambda job: job.is_several,
        lambda run, job: run.framework == job.framework and 2 * run.gpus > job.gpus,
        lambda job: (job.framework, job.gpus),
    ),
    "parameters": ValidationRespect(
        lambda job: True,
        lambda run, job: run.framework == job.framework and 2 * run.parameters > job.parameters,
        lambda job: job.framework,
    ),
    "binding": ValidationRespect(
        lambda job: True,
        lambda run, job: _is_same_kind(run, job) and run.binding == job.binding,
        lambda job: (job.framework, job.is_several, job.binding),
    ),
}


def extrapolations(job: Features, runs: Sequence[ValidatedRun]) -> list[Extrapolation]:
    """The respects in which no run vouches for the job, in the order of `RESPECTS`."""
    features = ValidatedRuns.from_runs(runs).features
    framework_features = [run for run in features if run.framework == job.framework]
    extrapolated = []

    def lacks(respect: str, candidates: Sequence[Features]) -> bool:
        validation_respect = RESPECTS[respect]
        return validation_respect.applies(job) and not any(
            validation_respect.vouches(run, job) for run in candidates
        )

    def add(respect: str, sentence: str, steps: float = 1.0) -> None:
        extrapolated.append(Extrapolation(respect, sentence, steps))

    if not framework_features:
        add("framework", f"no validated run of {job.framework}")
        # Judged by all other frameworks' runs, the job counts as one of theirs in every other respect.
        framework_features = [replace(run, framework=job.framework) for run in features]
    if lacks("gpu", framework_features):
        of_framework = f" of {job.framework}" if any(run.gpu == job.gpu for run in features) else ""
        add("gpu", f"GPU {job.gpu} without a validated run{of_framework}")
    if lacks("fabric", features):
        add("fabric", f"{job.fabric} without a validated run")
    if lacks("strategy", features):
        add("strategy", f"{job.strategy} without a validated run")
    of_framework = f" of {job.framework}" if any(run.framework == job.framework for run in features) else ""
    if lacks("mixture", framework_features):
        add("mixture", f"no validated run{of_framework} of a mixture of experts")
    if lacks("several nodes", framework_features):
        add("several nodes", f"no validated run{of_framework} on several nodes")
    for respect, label in (("gpus", "more GPUs"), ("parameters", "more parameters")):
        maximum = max((getattr(run, respect) for run in framework_features), default=0)
        if maximum and getattr(job, respect) > maximum:
            doublings = log2(getattr(job, respect) / maximum)
            add(
                respect, f"{label} than any validated run{of_framework} ({_format_count(maximum)})", doublings
            )
    if any(_is_same_kind(run, job) for run in framework_features) and lacks("binding", framework_features):
        where = "several nodes" if job.is_several else "one node"
        add("binding", f"no validated run{of_framework} on {where} {_BINDINGS[job.binding]}")
    return extrapolated


_BINDINGS = {
    ALLOCATOR: "runs as short of memory",
    OFFLOADING: "waits as much for offloading",
    NETWORK: "waits as much for the network",
    HOST: "waits as much for the host",
    KERNELS: "is bound by kernels",
}
"""What is said of the runs that bind a job as it is bound. A step that is bound by kernels waits as well."""


def _format_count(number: int) -> str:
    return f"{number / 1e9:.3g}e9" if number >= 10**9 else f"{number:,}"
