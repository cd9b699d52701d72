"""Refine buckets, prefetches, switches and the loss of a good structure, one by one until none gains.

# [Note: the loss]
Another loss is tried where a candidate does not fit with the configured one, and for the best few. A loss
adds about the same cost to every configuration, so the ranking does not depend on it. Varying it everywhere
would simulate each configuration three times.

# [Note: other numbers]
Products in 8 bits, and collectives in 8 or 4, change what training computes, which no search can weigh
against a shorter step. They are tried on the best configuration, and stand beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zsim.study.differences import is_distinguishable
from zsim.study.tune.axes import LOSSES, choices_of
from zsim.study.tune.axis import LOSS, TunedAxis
from zsim.study.tune.candidates import Candidate
from zsim.study.tune.evaluate import CandidateResult, Evaluator
from zsim.study.tune.framework import tuning_of
from zsim.study.tune.search import Objective, fastest

WORTH = 0.002  # of the step: changes with a smaller gain are not made
_MAX_ROUNDS = 2


def refine(
    evaluator: Evaluator,
    start: CandidateResult,
    *,
    axes: Sequence[TunedAxis] | None = None,
    objective: Objective = fastest,
    keep: Sequence[str] = (),
) -> tuple[CandidateResult, list[CandidateResult]]:
    """(the best result, all results simulated on the way): rounds over the axes, each set to its best value.
    The axes are the details of the strategy's framework where none are given.

    Ends when a round changes nothing. A step within `WORTH` of its lower bound is tried only with other
    kernels.
    """
    best, seen = start, [start]
    axes = tuning_of(start.candidate.base.kind).details if axes is None else axes
    for _ in range(_MAX_ROUNDS):
        previous_best = best
        for axis in axes:
            is_at_bound = best.least_seconds >= best.seconds * (1 - WORTH)
            if axis.name in keep or (is_at_bound and not axis.changes_kernels):
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
    evaluator: Evaluator,
    best: CandidateResult,
    axis: TunedAxis,
    only: Mapping[str, Any] | None = None,
) -> list[CandidateResult]:
    """The simulated results of `best` with every other choice of an axis that fits and could be faster. With
    `only`, just the choice that sets these overrides.
    """
    candidate = best.candidate
    options: list[Candidate] = [
        candidate.replace_choice(axis.name, choice, candidate.number)
        for choice in choices_of(axis, candidate.base, candidate.overrides)
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


def other_numerics(
    evaluator: Evaluator, best: CandidateResult, axes: Sequence[TunedAxis], objective: Objective = fastest
) -> CandidateResult | None:
    """`best` with the choices of axes that change what training computes, where they gain by more than zsim's
    error. None where none does. Of choices that cannot be told from the fastest it is the first.
    """
    result = best
    for axis in axes:
        tried = variations(evaluator, result, axis)
        fastest_one = min(tried, key=lambda m: m.objective_value(objective), default=result)
        if fastest_one.objective_value(objective) < result.objective_value(objective) * (1 - WORTH):
            alike = (m for m in tried if not is_distinguishable(m.row, fastest_one.row))
            result = next(alike, fastest_one)
    return result if result is not best and is_distinguishable(result.row, best.row) else None


def key_without_loss(candidate: Candidate) -> str:
    """A key shared by configurations that differ only in the loss."""
    overrides = sorted((key, str(value)) for key, value in candidate.overrides.items() if key != LOSS)
    return f"{candidate.base.key} {overrides}"


def split_losses(space: Sequence[Candidate]) -> tuple[list[Candidate], dict[int, Candidate]]:
    """(each configuration with its first loss, the configured one, replacements by candidate number). The
    replacement has the next loss, to try if the candidate does not fit.
    """
    last: dict[str, Candidate] = {}
    first: list[Candidate] = []
    replacements: dict[int, Candidate] = {}
    for candidate in space:
        key = key_without_loss(candidate)
        if key in last:
            replacements[last[key].number] = candidate
        else:
            first.append(candidate)
        last[key] = candidate
    return first, replacements


def choose_loss(
    evaluator: Evaluator, best: Sequence[CandidateResult], objective: Objective
) -> tuple[list[CandidateResult], list[CandidateResult]]:
    """(each result with the loss that is best for the first of them, if it gains by it, all results simulated
    for this).
    """
    improved: list[CandidateResult] = []
    seen: list[CandidateResult] = []
    best_loss: str | None = None
    for measured in best:
        tried: list[CandidateResult] = []
        if LOSSES.name in measured.candidate.choices:
            tried = variations(evaluator, measured, LOSSES, {} if best_loss is None else {LOSS: best_loss})
        seen += tried
        variation = min(tried, key=lambda m: m.objective_value(objective), default=measured)
        if not variation.objective_value(objective) < measured.objective_value(objective) * (1 - WORTH):
            variation = measured
        if best_loss is None:
            best_loss = variation.candidate.overrides.get(LOSS)
        improved.append(variation)
    return improved, seen
