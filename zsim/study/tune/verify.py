"""The best of a space, refined and simulated in full. A result that may run out of memory ranks last.

# [Note: only the whole step shows it]
A step of many micro-batches is simulated with only a few of them. That is enough for its time and its
tensors, but not for where torch's allocator finds room: the blocks of later micro-batches lie among those of
earlier ones. So the first result is simulated in full, and if it runs out of memory, the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.dataclass import dataclass
from zsim.study.tune.axes import LOSSES
from zsim.study.tune.candidates import Candidate
from zsim.study.tune.evaluate import Evaluator, Measured, MemoryBounds
from zsim.study.tune.explain import differing_axes
from zsim.study.tune.goals import Space
from zsim.study.tune.losses import but_for_loss, by_loss, with_best_loss
from zsim.study.tune.refine import refine
from zsim.study.tune.search import SearchResult, search

_CLOSE = 1.03  # a second structure within this ratio of the best is refined too
_FEW = 3  # the best loss is chosen for at least this many, however few results are asked for
_LONGEST = 64  # micro-batches up to which a step is simulated in full for verification


@dataclass(frozen=True)
class Verified:
    """The results of searching a space."""

    space: Space
    found: SearchResult
    best: list[Measured]
    """The best results in order, the first simulated in full."""
    measured: list[Measured]
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
    given: Candidate
    """The experiment's own configuration."""
    is_compared: bool
    """Whether that configuration is ranked among the results."""
    budget: int | None = None
    """As in `search`."""

    def at_best(self, space: Space) -> Verified:
        """The results of the space, or of the first `fallback` whose best result does not run out of memory.
        If there is none, the results of `space`, with a remark on it.
        """
        first = verified = self.at(space)
        while verified.may_run_out:
            other = verified.space.otherwise()
            if other is None:
                unsure = f"{space.settled}, by their tensors alone: torch's allocator may find no room"
                return replace(first, space=replace(space, settled=unsure if space.settled else ""))
            verified = self.at(other)
        return verified

    def at(self, space: Space) -> Verified:
        """The best results that fit, the first of them also in a simulation of the full step. See [Note: only
        the whole step shows it]. The evaluator remembers those that run out of memory, so a second search
        ranks them last.
        """
        found = self._searched(space)
        compared: list[Measured] = []
        if self.is_compared:
            given, _ = measured_given(self.evaluator, self.given)
            compared = [] if given is None else [given]
        measured = list(found.measured)
        best = self._verified([*self._refined(found, space, measured), *compared], space)
        while best and best[0].may_run_out and found.best and not found.best[0].may_run_out:
            self._verified(found.best, space)
            found = self._searched(space)
            measured += [m for m in found.measured if m.candidate not in [one.candidate for one in measured]]
            best = self._verified([*self._with_losses(found, space, measured), *compared], space)
        return Verified(space, found, self._one_of_each(best), [*measured, *compared])

    def _searched(self, space: Space) -> SearchResult:
        first, instead = by_loss(space.candidates)
        return search(
            self.evaluator, first, objective=space.objective, count=self.count, instead=instead,
            budget=self.budget,
        )  # fmt: skip

    def _with_losses(self, found: SearchResult, space: Space, measured: list[Measured]) -> list[Measured]:
        few = _ranked(found.measured, space)[: max(self.count, _FEW)]
        better, seen = with_best_loss(self.evaluator, few, space.objective)
        measured += seen
        return _ranked(better, space)

    def _one_of_each(self, ranked: Sequence[Measured]) -> list[Measured]:
        """The first of each set of configurations that differ only in the loss."""
        found: dict[str, Measured] = {}
        for measured in ranked:
            is_given = measured.candidate is self.given or _is_but_for_loss(self.given, measured.candidate)
            found.setdefault("given" if is_given else but_for_loss(measured.candidate), measured)
        return list(found.values())

    def _refined(self, found: SearchResult, space: Space, measured: list[Measured]) -> list[Measured]:
        best = self._with_losses(found, space, measured)
        worths = [m.worth(space.objective) for m in best]
        for place, start in enumerate(best[:2]):
            if worths[place] > _CLOSE * worths[0]:
                continue
            better, seen = refine(self.evaluator, start, objective=space.objective, keep=self.keep)
            measured += seen[1:]
            best[place] = better
        return best

    def _verified(self, best: Sequence[Measured], space: Space) -> list[Measured]:
        """`best` ranked, with the first one verified. If verification shows that it may run out of memory, it
        is ranked last and the next is verified.
        """
        ranked = _distinct(_ranked(best, space), self.given)
        for _ in best:
            if not ranked:
                break
            ranked[0] = self.evaluator.verified(ranked[0], _LONGEST)
            if not ranked[0].may_run_out:
                break
            ranked = _ranked(ranked, space)
        return ranked


def _is_but_for_loss(given: Candidate, candidate: Candidate) -> bool:
    """Whether a candidate is the configuration `start`, except for its loss."""
    return candidate.base is given.base and set(differing_axes(given, candidate)) <= {LOSSES.name}


def measured_given(evaluator: Evaluator, candidate: Candidate) -> tuple[Measured | None, MemoryBounds | None]:
    """(the experiment's own configuration simulated, if it fits, whatever the headroom, its memory)."""
    memory = evaluator.memory([candidate])[0]
    if memory is None or not memory.fits:
        return None, memory
    return evaluator.simulate([candidate])[0], memory


def _ranked(best: Sequence[Measured], space: Space) -> list[Measured]:
    return sorted(best, key=lambda m: (m.worth(space.objective), m.candidate.number))


def _distinct(ranked: Sequence[Measured], given: Candidate) -> list[Measured]:
    """The results without repetitions of the configuration `start`."""
    found: list[Measured] = []
    has_given = False
    for measured in ranked:
        candidate = measured.candidate
        is_given = candidate is given or (
            candidate.base is given.base and not differing_axes(given, candidate)
        )
        if not (is_given and has_given):
            found.append(measured)
        has_given = has_given or is_given
    return found
