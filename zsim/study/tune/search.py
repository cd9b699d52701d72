"""Branch and bound: the best of a space, with the proof that nothing better was left out.

Candidates are taken in the order of their lower bounds. The first bounds come from the batch alone. Then
memory is checked exactly, and bounds come from plans. The most promising candidates are simulated. The search
ends when no remaining candidate could beat the best even with all communication hidden, so the result is the
best of everything that fits.

With a budget the search may end before that. The remaining candidates are then counted, with the lowest of
their bounds: none of them is faster than that.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from zsim.study.tune.bounds import Bound
from zsim.study.tune.candidates import Candidate
from zsim.study.tune.evaluate import CandidateResult, Evaluator

# The value to minimise, from (seconds of the step or their lower bound, number of GPUs).
Objective = Callable[[float, int], float]
# The period of a steady step is measured between ends of steps. If the last op of a step is not a kernel,
# the period may be this much below the sum of the kernels.
_SLACK = 0.995
_WAVE = 4
_PLANS = 3  # candidates planned for each that a budget lets be simulated


def fastest(seconds: float, gpus: int) -> float:
    """Seconds of a step."""
    return seconds


def cheapest(seconds: float, gpus: int) -> float:
    """GPU-seconds of a step."""
    return seconds * gpus


@dataclass
class SearchResult:
    """The best results in order. The counts are numbers of candidates."""

    best: list[CandidateResult]
    measured: list[CandidateResult] = field(default_factory=list)
    """All simulated results."""
    num_candidates: int = 0
    num_refused: int = 0
    num_too_large: int = 0
    num_too_slow: int = 0
    num_left: int = 0
    """The candidates that the budget left unexamined."""
    least_bound: float | None = None
    """The lower bound on the objective of those candidates (None: there are none)."""

    @property
    def num_simulated(self) -> int:
        return len(self.measured)


def search(
    evaluator: Evaluator,
    candidates: Sequence[Candidate],
    *,
    objective: Objective = fastest,
    count: int = 5,
    replacements: Mapping[int, Candidate] | None = None,
    budget: int | None = None,
) -> SearchResult:
    """The best candidate that fits, then the next best of those simulated, with ties in the order of the
    space.

    The first is the same as if every candidate were simulated, and at least `count` are simulated.
    `replacements` has, by candidate number, the candidate that replaces one that does not fit. If torch may
    not find room for a candidate, its replacement is evaluated as well, and counts as one more candidate.
    With `budget`, at most so many candidates are simulated, and about `_PLANS` times as many planned (None:
    as many as the proof needs).
    """
    result = SearchResult([], num_candidates=len(candidates))
    replacements = replacements or {}
    queue = _bound_entries(evaluator, candidates, objective, result, replacements)
    heapq.heapify(queue)
    planned = 0
    while queue and (
        len(result.measured) < count or queue[0].worth < result.best[0].objective_value(objective)
    ):
        if budget is not None and len(result.measured) >= budget:
            break
        wave = []
        if budget is not None and planned >= _PLANS * budget:
            wave = _planned_wave(queue, result.best[0].objective_value(objective) if result.best else inf)
            if not wave and result.measured:
                break
        wave = wave or _next_wave(queue)
        planned += 0 if wave[0].is_checked else len(wave)
        if wave[0].is_checked:
            if budget is not None:
                wave, excess = wave[: budget - len(result.measured)], wave[budget - len(result.measured) :]
                for entry in excess:
                    heapq.heappush(queue, entry)
            retries = _simulate(evaluator, wave, result, replacements)
            result.num_candidates += len(retries)
            for entry in _bound_entries(evaluator, retries, objective, result, replacements):
                heapq.heappush(queue, entry)
            result.best = sorted(
                result.measured, key=lambda m: (m.objective_value(objective), m.candidate.number)
            )[:count]
        else:
            for entry in _check_memory(evaluator, wave, objective, result, replacements):
                heapq.heappush(queue, entry)
    best = result.best[0].objective_value(objective) if result.best else inf
    result.num_left = sum(entry.worth < best for entry in queue)
    result.num_too_slow = len(queue) - result.num_left
    result.least_bound = queue[0].worth if result.num_left else None
    return result


@dataclass(frozen=True, order=True)
class _Entry:
    """A candidate and the lower bound on its objective, from the batch alone or (if `is_checked`) from its
    plan."""

    worth: float
    number: int
    is_checked: bool
    candidate: Candidate = field(compare=False)
    bound: Bound = field(compare=False)


def _bound_entries(
    evaluator: Evaluator,
    candidates: Sequence[Candidate],
    objective: Objective,
    result: SearchResult,
    replacements: Mapping[int, Candidate],
) -> list[_Entry]:
    """Entries for the candidates that may fit. Each that does not is replaced if `replacements` has a
    replacement.
    """
    queue = []
    for first in candidates:
        candidate, bound = first, evaluator.bound(first)
        while (
            bound is not None
            and evaluator.is_too_large(candidate, bound)
            and candidate.number in replacements
        ):
            candidate = replacements[candidate.number]
            bound = evaluator.bound(candidate)
        if bound is None:
            result.num_refused += 1
        elif evaluator.is_too_large(candidate, bound):
            result.num_too_large += 1
        else:
            value = objective(bound.seconds, candidate.base.world_size) * _SLACK
            queue.append(_Entry(value, candidate.number, False, candidate, bound))
    return queue


def _next_wave(queue: list[_Entry]) -> list[_Entry]:
    """The next few most promising entries, all of one kind: to be checked, or to be simulated."""
    wave = [heapq.heappop(queue)]
    while queue and len(wave) < _WAVE and queue[0].is_checked == wave[0].is_checked:
        wave.append(heapq.heappop(queue))
    return wave


def _planned_wave(queue: list[_Entry], best: float) -> list[_Entry]:
    """The next few entries that are planned and may be better than `best`."""
    wave = sorted(entry for entry in queue if entry.is_checked and entry.worth < best)[:_WAVE]
    queue[:] = [entry for entry in queue if entry not in wave]
    heapq.heapify(queue)
    return wave


def _check_memory(
    evaluator: Evaluator,
    wave: Sequence[_Entry],
    objective: Objective,
    result: SearchResult,
    replacements: Mapping[int, Candidate],
) -> Iterator[_Entry]:
    """The entries that fit, with bounds from their plans, and the replacements of those that do not."""

    def replacement_entries(entry: _Entry) -> list[_Entry]:
        number = entry.candidate.number
        if number in replacements:
            return _bound_entries(evaluator, [replacements[number]], objective, result, replacements)
        result.num_too_large += 1
        return []

    possible = []
    for entry in wave:
        if evaluator.is_too_large(entry.candidate, entry.bound):
            yield from replacement_entries(entry)
        else:
            possible.append(entry)
    memories = evaluator.memory([entry.candidate for entry in possible])
    for entry, memory in zip(possible, memories, strict=True):
        if memory is None:
            result.num_refused += 1
        elif not evaluator.fits(memory):
            yield from replacement_entries(entry)
        else:
            value = objective(memory.least_seconds, entry.candidate.base.world_size) * _SLACK
            yield _Entry(max(value, entry.worth), entry.number, True, entry.candidate, entry.bound)


def _simulate(
    evaluator: Evaluator, wave: Sequence[_Entry], result: SearchResult, replacements: Mapping[int, Candidate]
) -> list[Candidate]:
    """Simulate the wave into `result`. Returns the replacements of candidates for which torch may not find
    room.
    """
    retries = []
    for measured in evaluator.simulate([entry.candidate for entry in wave]):
        if measured is None:
            result.num_refused += 1
        else:
            assert measured.row["fits"], measured.candidate.label
            result.measured.append(measured)
            if measured.may_run_out and measured.candidate.number in replacements:
                retries.append(replacements[measured.candidate.number])
    return retries
