"""Refine buckets, prefetches and switches of a good structure, one after the other until none gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zsim.study.tune.axes import DETAILS, TunedAxis
from zsim.study.tune.candidates import Candidate
from zsim.study.tune.evaluate import CandidateResult, Evaluator
from zsim.study.tune.search import Objective, fastest

WORTH = 0.002  # of the step: changes with a smaller gain are not made
_MAX_ROUNDS = 2


def refine(
    evaluator: Evaluator,
    start: CandidateResult,
    *,
    axes: Sequence[TunedAxis] = DETAILS,
    objective: Objective = fastest,
    keep: Sequence[str] = (),
) -> tuple[CandidateResult, list[CandidateResult]]:
    """(the best result, all results simulated on the way): rounds over the axes, each set to its best value.

    Ends when a round changes nothing, or when the step is within `WORTH` of its lower bound.
    """
    best, seen = start, [start]
    for _ in range(_MAX_ROUNDS):
        previous_best = best
        for axis in axes:
            if best.least_seconds >= best.seconds * (1 - WORTH):
                return best, seen
            if axis.name in keep:
                continue
            tried = variations(evaluator, best, axis)
            seen += tried
            variation = min(tried, key=lambda m: m.objective_value(objective), default=best)
            if variation.objective_value(objective) < best.objective_value(objective) * (1 - WORTH):
                best = variation
        if best is previous_best:
            break
    return best, seen


def variations(
    evaluator: Evaluator, best: CandidateResult, axis: TunedAxis, only: Mapping[str, Any] | None = None
) -> list[CandidateResult]:
    """The simulated results of `best` with every other choice of an axis that fits and could be faster. With
    `only`, just the choice that sets these overrides.
    """
    candidate = best.candidate
    options: list[Candidate] = [
        candidate.replace_choice(axis.name, choice, candidate.number)
        for choice in axis.choices_of(candidate.base, candidate.overrides)
        if candidate.choices.get(axis.name) != choice and (not only or choice.overrides == only)
    ]
    options = [option for option in options if evaluator.bound(option) is not None]
    memories = evaluator.memory(options)
    fitting = [
        option
        for option, memory in zip(options, memories, strict=True)
        if memory is not None and evaluator.fits(memory) and memory.least_seconds < best.seconds
    ]
    return [measured for measured in evaluator.simulate(fitting) if measured is not None]
