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
from zsim.study.tune.evaluate import Evaluator, Measured

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

    best: list[Measured]
    measured: list[Measured] = field(default_factory=list)
    """All simulated results."""
    num_candidates: int = 0
    num_refused: int = 0
    num_too_large: int = 0
    num_too_slow: int = 0
    num_left: int = 0
    """The candidates that the budget left unexamined."""
    least_worth: float | None = None
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
    instead: Mapping[int, Candidate] | None = None,
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
    found = SearchResult([], num_candidates=len(candidates))
    instead = instead or {}
    queue = _bounded(evaluator, candidates, objective, found, instead)
    heapq.heapify(queue)
    planned = 0
    while queue and (len(found.measured) < count or queue[0].worth < found.best[0].worth(objective)):
        if budget is not None and len(found.measured) >= budget:
            break
        wave = []
        if budget is not None and planned >= _PLANS * budget:
            wave = _planned_wave(queue, found.best[0].worth(objective) if found.best else inf)
            if not wave and found.measured:
                break
        wave = wave or _next_wave(queue)
        planned += 0 if wave[0].is_checked else len(wave)
        if wave[0].is_checked:
            if budget is not None:
                wave, more = wave[: budget - len(found.measured)], wave[budget - len(found.measured) :]
                for entry in more:
                    heapq.heappush(queue, entry)
            others = _simulate(evaluator, wave, found, instead)
            found.num_candidates += len(others)
            for entry in _bounded(evaluator, others, objective, found, instead):
                heapq.heappush(queue, entry)
            found.best = sorted(found.measured, key=lambda m: (m.worth(objective), m.candidate.number))[
                :count
            ]
        else:
            for entry in _checked(evaluator, wave, objective, found, instead):
                heapq.heappush(queue, entry)
    best = found.best[0].worth(objective) if found.best else inf
    found.num_left = sum(entry.worth < best for entry in queue)
    found.num_too_slow = len(queue) - found.num_left
    found.least_worth = queue[0].worth if found.num_left else None
    return found


@dataclass(frozen=True, order=True)
class _Entry:
    """A candidate and the lower bound on its objective, from the batch alone or (if `is_checked`) from its
    plan."""

    worth: float
    number: int
    is_checked: bool
    candidate: Candidate = field(compare=False)
    bound: Bound = field(compare=False)


def _bounded(
    evaluator: Evaluator,
    candidates: Sequence[Candidate],
    objective: Objective,
    found: SearchResult,
    instead: Mapping[int, Candidate],
) -> list[_Entry]:
    """Entries for the candidates that may fit. Each that does not is replaced if `replacements` has a
    replacement.
    """
    queue = []
    for first in candidates:
        candidate, bound = first, evaluator.bound(first)
        while bound is not None and evaluator.is_too_large(candidate, bound) and candidate.number in instead:
            candidate = instead[candidate.number]
            bound = evaluator.bound(candidate)
        if bound is None:
            found.num_refused += 1
        elif evaluator.is_too_large(candidate, bound):
            found.num_too_large += 1
        else:
            worth = objective(bound.seconds, candidate.base.world_size) * _SLACK
            queue.append(_Entry(worth, candidate.number, False, candidate, bound))
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


def _checked(
    evaluator: Evaluator,
    wave: Sequence[_Entry],
    objective: Objective,
    found: SearchResult,
    instead: Mapping[int, Candidate],
) -> Iterator[_Entry]:
    """The entries that fit, with bounds from their plans, and the replacements of those that do not."""

    def other(entry: _Entry) -> list[_Entry]:
        number = entry.candidate.number
        if number in instead:
            return _bounded(evaluator, [instead[number]], objective, found, instead)
        found.num_too_large += 1
        return []

    possible = []
    for entry in wave:
        if evaluator.is_too_large(entry.candidate, entry.bound):
            yield from other(entry)
        else:
            possible.append(entry)
    memories = evaluator.memory([entry.candidate for entry in possible])
    for entry, memory in zip(possible, memories, strict=True):
        if memory is None:
            found.num_refused += 1
        elif not evaluator.fits(memory):
            yield from other(entry)
        else:
            worth = objective(memory.least_seconds, entry.candidate.base.world_size) * _SLACK
            yield _Entry(max(worth, entry.worth), entry.number, True, entry.candidate, entry.bound)


def _simulate(
    evaluator: Evaluator, wave: Sequence[_Entry], found: SearchResult, instead: Mapping[int, Candidate]
) -> list[Candidate]:
    """Simulate the wave into `result`. Returns the replacements of candidates for which torch may not find
    room.
    """
    others = []
    for measured in evaluator.simulate([entry.candidate for entry in wave]):
        if measured is None:
            found.num_refused += 1
        else:
            assert measured.row["fits"], measured.candidate.label
            found.measured.append(measured)
            if measured.may_run_out and measured.candidate.number in instead:
                others.append(instead[measured.candidate.number])
    return others
