"""Branch and bound: the best of a space, with the proof that nothing better was left out.

Candidates are taken in the order of their lower bounds. The first bounds come from the batch alone. Then
memory is checked exactly, and bounds come from plans. The most promising candidates are simulated. The search
ends when no remaining candidate could beat the best even with all communication hidden, so the result is the
best of everything that fits.

With a budget the search may end before that. The remaining candidates are then counted, with the lowest of
their bounds: none of them is faster than that.

Refine buckets, prefetches, switches and the loss of a good structure, one by one until none gains.

# [Note: the loss]
Another loss is tried where a candidate does not fit with the configured one, and for the best few. A loss
adds about the same cost to every configuration, so the ranking does not depend on it. Varying it everywhere
would simulate each configuration three times.

# [Note: other numbers]
Products in 8 bits, and collectives in 8 or 4, change what training computes, which no search can weigh
against a shorter step. They are tried on the best configuration, and stand beside it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from zsim.study.differences import is_distinguishable
from zsim.study.tune.axes import LOSSES, Candidate, choices_of
from zsim.study.tune.bounds import Bound
from zsim.study.tune.evaluate import CandidateResult, Evaluator
from zsim.study.tune.framework import LOSS, TunedAxis, tuning_of

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
    replaced: set[int] = field(default_factory=set)
    """Numbers of candidates that do not fit, and were replaced."""
    num_replaced: int = 0
    """Configurations that do not fit with their first loss, and were tried with another."""
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
    return _Search(evaluator, objective, count, replacements or {}, budget).run(candidates)


@dataclass(frozen=True, order=True)
class _Entry:
    """A candidate and the lower bound on its objective, from the batch alone or (if `is_checked`) from its
    plan."""

    worth: float
    number: int
    is_checked: bool
    candidate: Candidate = field(compare=False)
    bound: Bound = field(compare=False)


@dataclass
class _Search:
    """The candidates that are left, the most promising first, and what is known of the others."""

    evaluator: Evaluator
    objective: Objective
    count: int
    replacements: Mapping[int, Candidate]
    budget: int | None
    result: SearchResult = field(default_factory=lambda: SearchResult([]))
    queue: list[_Entry] = field(default_factory=list)

    @property
    def best(self) -> float:
        """The objective of the best so far."""
        best = self.result.best
        return best[0].objective_value(self.objective) if best else inf

    def run(self, candidates: Sequence[Candidate]) -> SearchResult:
        result, queue, budget, planned = self.result, self.queue, self.budget, 0
        result.num_candidates = len(candidates)
        self._add(candidates)
        while queue and (len(result.measured) < self.count or queue[0].worth < self.best):
            if budget is not None and len(result.measured) >= budget:
                break
            wave = []
            if budget is not None and planned >= _PLANS * budget:
                wave = _planned_wave(queue, self.best)
                if not wave and result.measured:
                    break
            wave = wave or _next_wave(queue)
            if not wave[0].is_checked:
                planned += len(wave)
                self._check_memory(wave)
                continue
            if budget is not None:
                wave, excess = wave[: budget - len(result.measured)], wave[budget - len(result.measured) :]
                for entry in excess:
                    heapq.heappush(queue, entry)
            self._simulate(wave)
            result.best = sorted(
                result.measured, key=lambda m: (m.objective_value(self.objective), m.candidate.number)
            )[: self.count]
        result.num_left = sum(entry.worth < self.best for entry in queue)
        result.num_too_slow = len(queue) - result.num_left
        later = {candidate.number for candidate in self.replacements.values()}
        result.num_replaced = len(result.replaced - later)
        result.least_bound = queue[0].worth if result.num_left else None
        return result

    def _add(self, candidates: Sequence[Candidate]) -> None:
        """Queue the candidates that may fit. Each that does not is replaced if there is a replacement."""
        evaluator, result = self.evaluator, self.result
        for candidate in candidates:
            bound = evaluator.bound(candidate)
            while (
                bound is not None
                and evaluator.is_too_large(candidate, bound)
                and candidate.number in self.replacements
            ):
                result.replaced.add(candidate.number)
                candidate = self.replacements[candidate.number]
                bound = evaluator.bound(candidate)
            if bound is None:
                result.num_refused += 1
            elif evaluator.is_too_large(candidate, bound):
                result.num_too_large += 1
            else:
                value = self.objective(bound.seconds, candidate.base.world_size) * _SLACK
                heapq.heappush(self.queue, _Entry(value, candidate.number, False, candidate, bound))

    def _replace(self, entry: _Entry) -> None:
        """Queue the replacement of an entry that does not fit, if there is one."""
        number = entry.candidate.number
        if number in self.replacements:
            self.result.replaced.add(number)
            self._add([self.replacements[number]])
        else:
            self.result.num_too_large += 1

    def _check_memory(self, wave: Sequence[_Entry]) -> None:
        """Queue the entries that fit, with bounds from their plans, and the replacements of the others."""
        possible = []
        for entry in wave:
            if self.evaluator.is_too_large(entry.candidate, entry.bound):
                self._replace(entry)
            else:
                possible.append(entry)
        memories = self.evaluator.memory([entry.candidate for entry in possible])
        for entry, memory in zip(possible, memories, strict=True):
            if memory is None:
                self.result.num_refused += 1
            elif not self.evaluator.fits(memory):
                self._replace(entry)
            else:
                value = self.objective(memory.least_seconds, entry.candidate.base.world_size) * _SLACK
                heapq.heappush(self.queue, replace(entry, worth=max(value, entry.worth), is_checked=True))

    def _simulate(self, wave: Sequence[_Entry]) -> None:
        """Simulate the wave, and queue the replacements of those for which torch may not find room."""
        retries = []
        for measured in self.evaluator.simulate([entry.candidate for entry in wave]):
            if measured is None:
                self.result.num_refused += 1
                continue
            assert measured.row["fits"], measured.candidate.label
            self.result.measured.append(measured)
            if measured.may_run_out and measured.candidate.number in self.replacements:
                retries.append(self.replacements[measured.candidate.number])
        self.result.num_candidates += len(retries)
        self._add(retries)


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
    evaluator: Evaluator, best: CandidateResult, axis: TunedAxis, only: Mapping[str, Any] | None = None
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
            equals = (m for m in tried if not is_distinguishable(m.row, fastest_one.row))
            result = next(equals, fastest_one)
    return result if result is not best and is_distinguishable(result.row, best.row) else None


def split_losses(space: Sequence[Candidate]) -> tuple[list[Candidate], dict[int, Candidate]]:
    """(each configuration with its first loss, the configured one, replacements by candidate number). The
    replacement has the next loss, to try if the candidate does not fit.
    """
    last: dict[str, Candidate] = {}
    first: list[Candidate] = []
    replacements: dict[int, Candidate] = {}
    for candidate in space:
        key = candidate.key((LOSS,))
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
