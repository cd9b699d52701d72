"""The best of a space, refined and simulated in full. A result that may run out of memory ranks last.

# [Note: only the whole step shows it]
A step of many micro-batches is simulated with only a few of them. That is enough for its time and its
tensors, but not for where torch's allocator finds room: the blocks of later micro-batches lie among those of
earlier ones. So the first result is simulated in full, and if it runs out of memory, the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zsim.study.differences import verdict_of_row
from zsim.study.tune.axes import LOSSES, Candidate
from zsim.study.tune.evaluate import CandidateResult, Evaluator, MemoryBounds
from zsim.study.tune.explain import differing_axes
from zsim.study.tune.framework import tuning_of
from zsim.study.tune.goals import Space
from zsim.study.tune.search import SearchResult, choose_loss, key_without_loss, refine, search, split_losses
from zsim.validated.verdict import Verdict

_CLOSE = 1.03  # a second structure within this ratio of the best is refined too
_FEW = 3  # the best loss is chosen for at least this many, however few results are asked for
LONGEST = 64  # micro-batches up to which a step is simulated in full for verification


@dataclass(frozen=True)
class VerifiedSpace:
    """The results of searching a space."""

    space: Space
    search: SearchResult
    best: list[CandidateResult]
    """The best results in order, the first simulated in full."""
    measured: list[CandidateResult]
    """All simulated configurations."""

    @property
    def may_run_out(self) -> bool:
        """Whether torch may not find room even for the best result, and hence for any of them."""
        return bool(self.best) and self.best[0].may_run_out


@dataclass(frozen=True)
class Verifier:
    """How to search spaces."""

    evaluator: Evaluator
    keep: Sequence[str]
    count: int
    start: Candidate
    """The experiment's own configuration."""
    is_compared: bool
    """Whether that configuration is ranked among the results."""
    budget: int | None = None
    """As in `search`."""

    def verify_best(self, space: Space) -> VerifiedSpace:
        """The results of the space, or of the first `fallback` whose best result does not run out of memory.
        If there is none, the results of `space`, with a remark on it.
        """
        first = verified = self.verify(space)
        while verified.may_run_out:
            fallback = verified.space.fallback()
            if fallback is None:
                remark = f"{space.remark}, by their tensors alone: torch's allocator may find no room"
                return replace(first, space=replace(space, remark=remark if space.remark else ""))
            verified = self.verify(fallback)
        return verified

    def verify(self, space: Space) -> VerifiedSpace:
        """The best results that fit, the first of them also in a simulation of the full step. See [Note: only
        the whole step shows it]. The evaluator remembers those that run out of memory, so a second search
        ranks them last.
        """
        search_result = self._search(space)
        compared: list[CandidateResult] = []
        if self.is_compared:
            start_result, _ = simulate_start(self.evaluator, self.start)
            compared = [] if start_result is None else [start_result]
        measured = list(search_result.measured)
        best = self._verify_first([*self._refine(search_result, space, measured), *compared], space)
        while best and best[0].may_run_out and search_result.best and not search_result.best[0].may_run_out:
            self._verify_first(search_result.best, space)
            search_result = self._search(space)
            measured += [
                m
                for m in search_result.measured
                if m.candidate not in [result.candidate for result in measured]
            ]
            best = self._verify_first(
                [*self._choose_losses(search_result, space, measured), *compared], space
            )
        return VerifiedSpace(space, search_result, self._drop_loss_variants(best), [*measured, *compared])

    def _search(self, space: Space) -> SearchResult:
        first, replacements = split_losses(space.candidates)
        return search(
            self.evaluator, first, objective=space.objective, count=self.count, replacements=replacements,
            budget=self.budget,
        )  # fmt: skip

    def _choose_losses(
        self, search_result: SearchResult, space: Space, measured: list[CandidateResult]
    ) -> list[CandidateResult]:
        best_few = _rank(search_result.measured, space)[: max(self.count, _FEW)]
        improved, seen = choose_loss(self.evaluator, best_few, space.objective)
        measured += seen
        return _rank(improved, space)

    def _drop_loss_variants(self, ranked: Sequence[CandidateResult]) -> list[CandidateResult]:
        """The first of each set of configurations that differ only in the loss."""
        unique_results: dict[str, CandidateResult] = {}
        for measured in ranked:
            is_start = measured.candidate is self.start or _differs_only_in_loss(
                self.start, measured.candidate
            )
            unique_results.setdefault("given" if is_start else key_without_loss(measured.candidate), measured)
        return list(unique_results.values())

    def _refine(
        self, search_result: SearchResult, space: Space, measured: list[CandidateResult]
    ) -> list[CandidateResult]:
        best = self._choose_losses(search_result, space, measured)
        values = [m.objective_value(space.objective) for m in best]
        for index, start in enumerate(best[:2]):
            if values[index] > _CLOSE * values[0]:
                continue
            details = tuning_of(start.candidate.base.kind).details
            if not self.is_compared:  # the size that the goal decided holds for the kernels as they are
                details = tuple(axis for axis in details if not axis.changes_kernels)
            improved, seen = refine(
                self.evaluator, start, axes=details, objective=space.objective, keep=self.keep
            )
            measured += seen[1:]
            best[index] = improved
        return best

    def _verify_first(self, best: Sequence[CandidateResult], space: Space) -> list[CandidateResult]:
        """`best` ranked, with the first one verified. If verification shows that it may run out of memory, it
        is ranked last and the next is verified.
        """
        ranked = _drop_repeated_start(_rank(best, space), self.start)
        for _ in best:
            if not ranked:
                break
            ranked[0] = self.evaluator.verify(ranked[0], LONGEST)
            if not ranked[0].may_run_out:
                break
            ranked = _rank(ranked, space)
        return ranked


def _differs_only_in_loss(start: Candidate, candidate: Candidate) -> bool:
    """Whether a candidate is the configuration `start`, except for its loss."""
    return candidate.base is start.base and set(differing_axes(start, candidate)) <= {LOSSES.name}


def simulate_start(
    evaluator: Evaluator, candidate: Candidate
) -> tuple[CandidateResult | None, MemoryBounds | None]:
    """(the experiment's own configuration simulated, if it fits, whatever the headroom, its memory)."""
    memory = evaluator.memory([candidate])[0]
    if memory is None or not memory.fits:
        return None, memory
    return evaluator.simulate([candidate])[0], memory


def start_verdict(evaluator: Evaluator, candidate: Candidate) -> Verdict | None:
    """The verdict on the experiment's own configuration, as a run of it has. None where it has none."""
    (result,) = evaluator.simulate([candidate])
    return None if result is None else verdict_of_row(result.row)


def _rank(best: Sequence[CandidateResult], space: Space) -> list[CandidateResult]:
    return sorted(best, key=lambda m: (m.objective_value(space.objective), m.candidate.number))


def _drop_repeated_start(ranked: Sequence[CandidateResult], start: Candidate) -> list[CandidateResult]:
    """The results without repetitions of the configuration `start`."""
    unique_results: list[CandidateResult] = []
    has_start = False
    for measured in ranked:
        candidate = measured.candidate
        is_start = candidate is start or (
            candidate.base is start.base and not differing_axes(start, candidate)
        )
        if not (is_start and has_start):
            unique_results.append(measured)
        has_start = has_start or is_start
    return unique_results
